"""Switches for thinking by all of their names, and budgets that the answer's grammar enforces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sealring.mesh.errors import FailedPrecondition, InvalidInput
from sealring.node.engine.text import THINK, Delimiters, budget_of, grammar_of
from sealring.node.engine.text.thinking import BUDGETS, FREE, Budget, Thinking, thinking_of_template
from sealring.v1 import inference_pb2 as inference

BEGIN, END = THINK[0]
FORM = Delimiters((BEGIN, END))
TOKENS = {"<end>": 256, BEGIN: 257, END: 258}
SIZE = 266
BUDGET = Budget(2, [257], [258])


@pytest.mark.parametrize(
    ("source", "on", "off"),
    [
        ("{{ enable_thinking }}", {}, {}),
        ("{{ thinking }}", {"thinking": True}, {"thinking": False}),
        ("{{ thinking_mode }}", {"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
        ("{{ reasoning_effort }}", {}, {}),
        ("nothing", {}, {}),
    ],
)
def test_one_switch_has_every_name_that_a_template_knows(
    source: str, on: dict[str, Any], off: dict[str, Any]
) -> None:
    thinking = thinking_of_template(source, (BEGIN, END))
    for told, more in ((True, on), (False, off)):
        assert thinking.arguments({"enable_thinking": told}) == {"enable_thinking": told, **more}
    assert thinking.arguments({"thinking": 1, "thinking_mode": 2}) == {"thinking": 1, "thinking_mode": 2}
    assert thinking.arguments({}) == {}


def test_the_effort_is_a_budget_where_the_template_does_not_know_it() -> None:
    knows = thinking_of_template("{{ thinking_effort }}", ())
    assert knows.arguments({"reasoning_effort": "low"}) == {
        "reasoning_effort": "low",
        "thinking_effort": "low",
    }
    assert knows.budget({"reasoning_effort": "low"}) is None
    other = Thinking()
    for effort in ("low", "medium", "high", "xhigh", 3, None):
        assert other.budget({"reasoning_effort": effort}) == BUDGETS.get(str(effort))
    for told, budget in ((7, 7), (0, 0), (-1, None), (True, None), ("7", None)):
        assert knows.budget({"thinking_budget": told}) == budget
    assert other.budget({"thinking_budget": 7, "enable_thinking": False}) is None


@pytest.fixture(scope="module")
def library() -> llguidance.LLTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={one: place for place, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*TOKENS, *(f"<|{place}|>" for place in range(7))])
    return llguidance.LLTokenizer(backend.to_str(), eos_token=[256])


def allowed(matcher: Any) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    found: list[int] = bits[:SIZE].nonzero()[0].tolist()
    return found


FAMILIES = {
    "Qwen": ((257,), (258,)),
    "gpt-oss": ((259, 5, 260), (261, 262, 6)),
    "Kimi K3": ((263, 7, 264), (265, 7, 264)),
    "muse": ((8, 9, 260), (261, 262, 6)),
}
"""The tokens of the marks, of which some are texts."""


@pytest.mark.parametrize("budget", [0, 1, 5, 40_000])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_thoughts_of_an_answer_have_one_budget(
    library: llguidance.LLTokenizer, name: str, thinks: bool, budget: int
) -> None:
    """Random tokens are sampled where the grammar leaves a choice, some are taken back as drafts are, and
    the thoughts end and begin again at random."""
    begin, end = FAMILIES[name]
    grammar = Budget(budget, begin, end).grammar(thinks=thinks)
    assert grammar.endswith(FREE)
    matcher = llguidance.LLMatcher(library, grammar)
    assert not matcher.get_error()
    chosen = random.Random(budget)

    def write(tokens: Iterable[int]) -> None:
        for token in tokens:
            assert token in allowed(matcher)
            assert matcher.consume_token(token)

    if not thinks:
        assert len(allowed(matcher)) == SIZE
        write([65, *begin[:-1], 65, *begin[:-1], *begin[:-1], *begin])
    for place in range(min(budget, 50)):
        assert len(allowed(matcher)) == SIZE, place
        write([chosen.randrange(10, 256)])
        if place % 2:
            matcher.rollback(1)
            write([chosen.choice([0, 256, *begin])])
        if place % 7 == 3:
            write([*end, 66, *begin[:-1], 67, *begin[:1], *begin] if len(begin) > 1 else [*end, 66, *begin])
    if budget <= 50:
        assert allowed(matcher) == [end[0]]
    write(end)
    for _ in range(2):
        assert len(allowed(matcher)) == SIZE
        assert matcher.is_accepting()
        write([65, *begin])
        if budget <= 50:
            assert allowed(matcher) == [end[0]]
        write(end)


def test_an_answer_without_thoughts_is_free(library: llguidance.LLTokenizer) -> None:
    matcher = llguidance.LLMatcher(library, BUDGET.grammar(thinks=False))
    for token in (65, 66, 67, TOKENS["<end>"]):
        assert matcher.is_accepting()
        assert matcher.consume_token(token)


@pytest.mark.parametrize(("ids", "known"), [({END: [258]}, True), ({END: [60, 61]}, False)])
def test_a_number_that_cannot_be_held_is_refused_and_an_effort_is_left_to_the_template(
    ids: dict[str, list[int]], known: bool
) -> None:
    tokenizer: Any = SimpleNamespace(
        format=FORM, thinking=Thinking(), encode_markers=lambda text: ids.get(text, [257])
    )

    def asked(room: int = 99, **told: Any) -> Budget | None:
        chat = inference.Chat(template_arguments=json.dumps(told))
        return budget_of(tokenizer, chat, lambda: {258: END}, room)

    def unreadable() -> Any:
        raise FailedPrecondition("no", reason="NO_GRAMMARS")

    assert asked() == asked(thinking_budget=99) == asked(thinking_budget=7, enable_thinking=False) is None
    effort = inference.Chat(template_arguments='{"reasoning_effort": "low"}')
    assert budget_of(tokenizer, effort, unreadable, 9000) is None
    if known:
        assert asked(thinking_budget=7) == Budget(7, [257], [258])
        assert asked(room=9000, reasoning_effort="low") == Budget(BUDGETS["low"], [257], [258])
        return
    assert asked(room=9000, reasoning_effort="low") is None
    with pytest.raises(InvalidInput) as caught:
        asked(thinking_budget=7)
    assert caught.value.reason == "NO_THINKING_BUDGET"


def test_a_budget_holds_beside_a_schema(library: llguidance.LLTokenizer) -> None:
    prompt = inference.Prompt(schema=json.dumps({"type": "integer"}))
    names = {token: name for name, token in TOKENS.items()}
    made = grammar_of(prompt, FORM, lambda: names, BEGIN, budget=BUDGET)
    matcher = llguidance.LLMatcher(library, made)
    assert not matcher.get_error()
    assert matcher.consume_tokens([65, 66])
    assert allowed(matcher) == [TOKENS[END]]
    assert matcher.consume_tokens([TOKENS[END], ord("4") - ord("!")])
    assert matcher.is_accepting()
