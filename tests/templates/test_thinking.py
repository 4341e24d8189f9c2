"""A budget of thoughts in gpt-oss's own tokens leaves an answer that is read whole (`make templates`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealring.node.engine import Grammars
from sealring.node.engine.text import Sections, Tokenizer, budget_of, grammar_of, load_tokenizer
from sealring.v1 import inference_pb2 as inference

pytestmark = pytest.mark.sweep

FOLDER = Path(__file__).parents[2] / "build" / "templates" / "gpt-oss"
BEGIN, END = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
THOUGHTS = "The user asks about Zürich. 天気 👩‍👩‍👧 <|end|> to=functions.f {[\n\n"
"""With tokens that are parts of a character, and a marker as text."""

SAID = "It is 21 °C ☀️ in <|channel|> Zürich."
ARGUMENTS = {"city": "Zürich 🏔"}
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ANSWERS = [
    (["<|channel|>final<|message|>", SAID], SAID, []),
    ([CALL, json.dumps(ARGUMENTS)], "", [ARGUMENTS]),
    (["<|channel|>commentary<|message|>", SAID, END + CALL, json.dumps(ARGUMENTS)], SAID, [ARGUMENTS]),
]
"""Markers and texts by turns, the text and the calls that are read."""


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    if not FOLDER.is_dir():
        pytest.skip("there is no tokenizer: make templates")
    made = load_tokenizer(FOLDER)
    yield made
    made.close()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(lambda: tokenizer, tokenizer.size)
    yield made
    made.close()


def written(tokenizer: Tokenizer, parts: list[str]) -> list[int]:
    ids = [
        tokenizer.encode_text(part) if place % 2 else tokenizer.encode_markers(part)
        for place, part in enumerate(parts)
    ]
    return [token for one in ids for token in one]


@pytest.mark.parametrize("pause", [0, 7])
def test_a_budget_may_end_thoughts_at_any_token(tokenizer: Tokenizer, grammars: Grammars, pause: int) -> None:
    """The model thinks on until it is stopped. With a `pause` it says a word after as many tokens and thinks
    again."""
    thoughts = tokenizer.encode_text(THOUGHTS)
    begin, end = map(tokenizer.encode_markers, (BEGIN, END))
    word = written(tokenizer, [END + "<|channel|>commentary<|message|>", "So.", END + BEGIN])
    for budget in range(len(thoughts)):
        chat = inference.Chat(template_arguments=json.dumps({"thinking_budget": budget}))
        chat.messages.add(role="user", content="How is it?")
        chat.tools.add(name="f", parameters='{"properties": {"city": {"type": "string"}}}')
        prompt = inference.Prompt(chat=chat)
        held = budget_of(tokenizer, chat, grammars.special, 10_000)
        assert held is not None
        made = grammar_of(
            prompt, tokenizer.format, grammars.special, "", silent=tokenizer.special, budget=held
        )
        matcher = grammars.compile(made).deep_copy()
        tokens, stopped, pauses = list(begin), 0, 0
        assert matcher.consume_tokens(begin)
        for place, token in enumerate(thoughts):
            if pause and place % pause == pause - 1:
                assert matcher.consume_tokens(word)
                tokens, pauses = tokens + word, pauses + 1
            if not matcher.validate_tokens([token]):
                break
            assert matcher.consume_token(token)
            tokens, stopped = [*tokens, token], stopped + 1
        assert stopped == budget
        assert matcher.compute_ff_tokens() == end
        tokens += end
        assert matcher.consume_tokens(end)
        for parts, said, calls in ANSWERS:
            answer = written(tokenizer, parts)
            rest = matcher.deep_copy()
            assert rest.consume_tokens(answer)
            assert rest.is_accepting()
            sections = Sections(tokenizer.format, tokenizer.special.values(), chat)
            text, thought, found = "", "", list[inference.ToolCall]()
            for piece, finish in pieces(tokenizer, [*tokens, *answer]):
                told, parsed = sections.take(piece, finish)
                text += told
                if parsed is not None:
                    thought += parsed.reasoning
                    found += parsed.tool_calls
            assert text == "So." * pauses + said
            assert [json.loads(call.arguments) for call in found] == calls
            assert thought == "".join(plain(tokenizer, thoughts[:budget], pause))


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> Iterator[tuple[str, inference.FinishReason.ValueType]]:
    detokenizer = tokenizer.detokenizer(spelt=True)
    for token in tokens:
        yield detokenizer.add(token), inference.FINISH_REASON_UNSPECIFIED
    yield detokenizer.flush(), inference.FINISH_REASON_STOP


def plain(tokenizer: Tokenizer, tokens: list[int], pause: int) -> Iterator[str]:
    """The texts of thoughts, of which each is decoded by itself."""
    size = pause or len(tokens) or 1
    cuts = [0, *range(size - 1, len(tokens), size)] if pause else [0]
    for start, stop in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
        detokenizer = tokenizer.detokenizer()
        yield "".join(map(detokenizer.add, tokens[start:stop])) + detokenizer.flush()
