"""What of a request becomes a grammar, and what that allows."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.errors import InvalidInput
from sealring.node.engine import Grammars
from sealring.node.engine.grammar import Follower
from sealring.node.engine.text import Delimiters, Tokenizer, format_of, grammar_of, load_tokenizer
from sealring.node.engine.text.constraints import may_be_held
from sealring.v1 import inference_pb2 as inference

MODEL = Path(__file__).parents[4] / "examples" / "demo_model" / "model"
HERMES = Delimiters(("<think>", "</think>"), ("<tool_call>", "</tool_call>"), name="json_tools")
SPECIAL = Delimiters(("<|system|>", "<|user|>"), ("<|assistant|>", "<|pad|>"), name="json_tools")
NUMBER: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "count", "arguments": {"n": 1}}\n</tool_call>'


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer, 1536)


def prompt_with(*, schema: bool = False, strict: bool = True, **fields: Any) -> inference.Prompt:
    tools = [
        inference.Tool(name=name, parameters=json.dumps(NUMBER), strict=strict) for name in ("count", "b.c")
    ]
    chat = inference.Chat(messages=[inference.ChatMessage(role="user", content="x")], tools=tools, **fields)
    return inference.Prompt(chat=chat, schema=json.dumps(NUMBER) if schema else "")


@pytest.fixture(scope="module")
def marking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tokenizer, Grammars]]:
    """A tokenizer whose markers are added tokens with a text, as those of Qwen and GLM are."""
    folder = tmp_path_factory.mktemp("marking")
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["special"] = token["content"] not in (*SPECIAL.call, *SPECIAL.thinking)
    file.write_text(json.dumps(content))
    loaded = load_tokenizer(folder)
    made = Grammars(lambda: loaded, 1536)
    yield loaded, made
    made.close()
    loaded.close()


def takes(grammar: str, *answers: str) -> list[bool]:
    """Which of these are whole answers. Special tokens are spelt."""
    found = []
    for answer in answers:
        grammars().try_out(grammar)
        follower = Follower(grammars().compile(grammar), tokenizer().end_tokens)
        tokens = [*tokenizer().encode_markers(answer), *tokenizer().end_tokens]
        found.append(all(map(follower.allows, tokens)))
    return found


def test_what_asks_for_nothing_has_no_grammar() -> None:
    assert grammar_of(prompt_with(strict=False), HERMES, dict, "") == ""
    assert grammar_of(prompt_with(), Delimiters(), dict, "") == ""  # a model that calls nothing
    assert grammar_of(inference.Prompt(text="x"), HERMES, dict, "") == ""
    unknown = Delimiters(None, ("<a>", "</a>"), name="pythonic")
    assert grammar_of(prompt_with(strict=False, call_required=True), unknown, dict, "") == ""


def test_calls_of_strict_tools_fit_their_schemas_and_text_is_free() -> None:
    grammar = grammar_of(prompt_with(), HERMES, dict, "")
    thought = "<think>\nso {n}, or <tool_call> perhaps"
    assert (
        takes(grammar, "any text", CALL, f"first {CALL} then {CALL}", "<think>hm</think>\n\nno") == [True] * 4
    )
    assert (
        takes(
            grammar,
            CALL.replace("1", '"1"'),
            CALL.replace("count", "other"),
            CALL.replace("</tool_call>", ""),
            thought,
        )
        == [False] * 4
    )


def test_a_schema_begins_after_thinking() -> None:
    prompt = prompt_with(schema=True, strict=False)
    del prompt.chat.tools[:]
    begun = grammar_of(prompt, HERMES, dict, "<think>\n")
    assert takes(begun, 'I {"n":</think>\n\n{"n": 1}', '</think>{"n":1}', '{"n": 1}', "<think>") == [
        True,
        True,
        False,
        False,
    ]
    silent = grammar_of(prompt, HERMES, dict, "<think>\n\n</think>\n\n")
    assert takes(silent, '{"n": 1}', '<think>so</think>{"n": 1}', 'so {"n": 1}', '{"n": 1} so') == [
        True,
        True,
        False,
        False,
    ]
    special = grammar_of(prompt, SPECIAL, grammars().special, "<|system|>", silent=tokenizer().special)
    assert takes(special, 'so<|user|>{"n": 1}', '{"n": 1}') == [True, False]


def test_what_a_schema_holds_begins_without_blanks() -> None:
    """But for line breaks behind thoughts, which the answer does not have."""
    prompt = prompt_with(schema=True, strict=False)
    for tools in (1, 0):
        del prompt.chat.tools[tools:]
        for said in ("", "<think>\n\n</think>\n\n"):
            grammar = grammar_of(prompt, HERMES, dict, said)
            blank = [f'{blanks}{{"n": 1}}' for blanks in ("", "\n", " ", "\n\n\n\n")]
            assert takes(grammar, *blank) == [True, False, False, False]
        grammar = grammar_of(prompt, HERMES, dict, "<think>\n")
        assert takes(grammar, *(f"hm</think>{one}" for one in blank)) == [True, True, False, True]
        plain = grammar_of(prompt, Delimiters(call=HERMES.call, name=HERMES.name), dict, "")
        assert takes(plain, *blank) == [True, False, False, False]


@pytest.mark.parametrize("required", [True, False])
def test_a_marker_is_taken_as_a_token_and_held_to_as_a_text(
    marking: tuple[Tokenizer, Grammars], required: bool
) -> None:
    loaded, made = marking
    prompt = prompt_with(strict=not required, call_required=required)
    said = "" if required else "<|system|>"
    held = may_be_held(prompt.chat)
    grammar = grammar_of(prompt, SPECIAL, made.special, said, held, loaded.special)

    def follows(*pieces: str) -> bool:
        follower = Follower(made.compile(grammar), loaded.end_tokens)
        tokens = [token for piece in pieces for token in loaded.encode_markers(piece)]
        return all(map(follower.allows, [*tokens, *loaded.end_tokens]))

    begin = "" if required else "so<|user|> then <|assistant|>"
    call = '\n{"name": "count", "arguments": {"n": 1}}\n<|pad|>'
    assert follows(begin + call)
    assert follows(begin + call + "<|assistant|>" + call)
    assert not follows(begin + call.replace("1", '"1"'))
    if not required:
        assert follows("so<|us", "er|>free")
        assert follows("so<|user|>no <|assis", "tant|>" + call)
        assert not follows("so<|user|>no <|assis", "tant|>" + call.replace("1", '"1"'))


def test_with_tools_the_answer_is_a_call_or_fits_the_schema() -> None:
    grammar = grammar_of(prompt_with(schema=True, strict=False), HERMES, dict, "")
    assert takes(
        grammar, '{"n": 1}', CALL, f"{CALL}\n{CALL}", CALL.replace("1", '"1"'), "text", f"{CALL} text"
    ) == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    unknown = Delimiters(None, ("<a>", "</a>"), name="pythonic")
    grammar = grammar_of(prompt_with(schema=True, strict=False), unknown, dict, "")
    assert takes(grammar, '{"n": 1}', "<a>whatever</a>", "text") == [True, True, False]


def test_a_required_call_is_the_answer() -> None:
    rest = CALL.removeprefix("<tool_call>")
    one = grammar_of(prompt_with(strict=False, call_required=True, one_call=True), HERMES, dict, "")
    assert takes(one, rest, rest + CALL, "text", rest.replace("count", "other")) == [
        True,
        False,
        False,
        False,
    ]
    several = grammar_of(prompt_with(strict=False, call_required=True), HERMES, dict, "")
    assert takes(several, rest, rest + CALL, rest + "text") == [True, True, False]


@pytest.mark.parametrize("form", ["json_tools", "qwen3_coder"])
def test_a_required_call_may_be_held_to_schemas_that_are_not_strict(form: str) -> None:
    prompt = prompt_with(strict=False, call_required=True, one_call=True)
    prompt.chat.tools[1].parameters = ""
    assert may_be_held(prompt.chat) == {0}
    prompt.chat.tools[1].parameters = json.dumps({"properties": {str(number): {} for number in range(513)}})
    assert may_be_held(prompt.chat) == {0}
    calling = dataclasses.replace(HERMES, name=form)
    held = grammar_of(prompt, calling, dict, "", may_be_held(prompt.chat))
    if form == "json_tools":
        good = CALL.removeprefix("<tool_call>")
    else:
        good = "\n<function=count>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
    other = good.replace("count", "b.c").replace("1", '"x"')
    assert takes(held, good, good.replace("1", "x"), other) == [True, False, True]
    prompt.chat.call_required = False
    assert not may_be_held(prompt.chat)


def test_messages_of_gpt_oss() -> None:
    """Their special tokens stand for some of this model's."""
    ours = ["<|system|>", "<|user|>", "<|assistant|>", "<|pad|>", "<|begin|>"]
    ids = {name: token for token, name in tokenizer().special.items()}
    theirs = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]
    special = {ids[one]: two for one, two in zip(ours, theirs, strict=True)}

    def told(text: str) -> str:
        for one, two in zip(ours, theirs, strict=True):
            text = text.replace(two, one)
        return text

    form = format_of("", ("<|call|>", *theirs))
    thought = "<|channel|>analysis<|message|>so {<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.count <|constrain|>json<|message|>{"n": 1}'
    final = "<|channel|>final<|message|>"
    strict = grammar_of(prompt_with(), form, lambda: special, "", silent=special)
    answers = [thought + final + "any text", final + "text", thought + call, call.replace("1", '"1"'), "text"]
    assert takes(strict, *map(told, answers)) == [True, True, True, False, False]
    held = grammar_of(prompt_with(schema=True), form, lambda: special, "", silent=special)
    answers = [thought + final + '{"n": 1}', final + '{"n": 1}', call, final + "text", thought]
    assert takes(held, *map(told, answers)) == [True, True, True, False, False]


def test_other_syntaxes() -> None:
    mistral = Delimiters(None, ("[TOOL_CALLS]", ""), name="mistral")
    grammar = grammar_of(prompt_with(), mistral, dict, "")
    assert takes(grammar, "hm", '[TOOL_CALLS]b.c[ARGS]{"n": 1}', "[TOOL_CALLS]b.c[ARGS]{}") == [
        True,
        True,
        False,
    ]
    deepseek = format_of("<｜tool▁calls▁begin｜>```json", ())
    grammar = grammar_of(prompt_with(), deepseek, dict, "")
    one = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>count\n```json\n{"n": 1}\n```<｜tool▁call▁end｜>'
    calls = f"hm<｜tool▁calls▁begin｜>{one}\n{one}<｜tool▁calls▁end｜>"
    assert takes(grammar, calls, calls.replace("1", '"1"')) == [True, False]
    with pytest.raises(InvalidInput) as caught:
        grammar_of(prompt_with(), Delimiters(None, ("<a>", "</a>"), name="pythonic"), dict, "")
    assert caught.value.reason == "NO_STRICT_TOOLS"


def test_a_call_has_no_arguments_that_its_schema_does_not_name() -> None:
    said: dict[str, Any] = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [
        inference.Tool(name="now"),
        inference.Tool(name="count", parameters=json.dumps(said), strict=True),
    ]
    chat = inference.Chat(messages=[inference.ChatMessage(role="user", content="x")], tools=tools)
    chat.call_required = chat.one_call = True
    grammar = grammar_of(inference.Prompt(chat=chat), HERMES, dict, "")
    calls = [("now", "{}"), ("now", '{"text": "ital"}'), ("count", '{"n": 1}'), ("count", '{"n": 1, "m": 2}')]
    written = [f'\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in calls]
    assert takes(grammar, *written) == [True, False, True, False]
    answer = inference.Prompt(schema=json.dumps(said), chat=inference.Chat(messages=chat.messages))
    grammar = grammar_of(answer, HERMES, dict, "")
    assert takes(grammar, '{"n": 1}', '{"n": 1, "m": 2}') == [True, False]


def test_strict_calls_are_refused_where_an_answer_may_be_a_call_without_a_marker() -> None:
    llama = format_of('<|start_header_id|> "parameters": ', ())
    with pytest.raises(InvalidInput) as caught:
        grammar_of(prompt_with(), llama, dict, "")
    assert caught.value.reason == "NO_STRICT_TOOLS"
    grammar = grammar_of(prompt_with(call_required=True, one_call=True), llama, dict, "")
    assert takes(grammar, '{"name": "count", "parameters": {"n": 1}}', '{"name": "count"}') == [True, False]
