"""Switches for thinking by all of their names, and budgets that the answer's grammar enforces."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sealring.node.engine.text.constraints import grammar_of
from sealring.node.engine.text.families import THINK
from sealring.node.engine.text.sections import Format
from sealring.node.engine.text.thinking import BUDGETS, Thinking, limited, thinking_of_template
from sealring.v1 import inference_pb2 as inference

BEGIN, END = THINK[0]
FORM = Format((BEGIN, END))


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
    backend.add_special_tokens(["<end>", BEGIN, END])
    return llguidance.LLTokenizer(backend.to_str(), eos_token=[256])


TOKENS = {"<end>": 256, BEGIN: 257, END: 258}


def allowed(matcher: Any) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    found: list[int] = bits[:259].nonzero()[0].tolist()
    return found


@pytest.mark.parametrize("budget", [0, 1, 5, 40_000])
@pytest.mark.parametrize("said", ["", BEGIN])
def test_thoughts_end_at_their_budget_and_all_else_is_free(
    library: llguidance.LLTokenizer, budget: int, said: str
) -> None:
    """Random tokens are sampled where the grammar leaves a choice, and some are taken back as drafts are."""
    grammar = limited(budget, (BEGIN, END), TOKENS, said)
    matcher = llguidance.LLMatcher(library, grammar)
    assert not matcher.get_error()
    chosen = random.Random(budget)
    if not said:
        assert len(allowed(matcher)) == 259
        assert matcher.consume_token(TOKENS[BEGIN])
    for place in range(min(budget, 50)):
        assert len(allowed(matcher)) == 259, place
        assert matcher.consume_token(chosen.randrange(256))
        if place % 2:
            matcher.rollback(1)
            assert matcher.consume_token(chosen.randrange(256))
    if budget <= 50:
        assert allowed(matcher) == [TOKENS[END]]
    assert matcher.consume_token(TOKENS[END])
    for token in (65, TOKENS[BEGIN], 66, TOKENS[END]):
        assert len(allowed(matcher)) == 259
        assert matcher.is_accepting()
        assert matcher.consume_token(token)


def test_an_answer_without_thoughts_is_free(library: llguidance.LLTokenizer) -> None:
    matcher = llguidance.LLMatcher(library, limited(1, (BEGIN, END), TOKENS, f"{BEGIN}\n\n{END}\n\n"))
    assert matcher.is_accepting()
    for token in (65, 66, 67, TOKENS["<end>"]):
        assert matcher.consume_token(token)


def test_marks_that_are_no_tokens_have_no_budget() -> None:
    assert limited(5, (BEGIN, END), {}, BEGIN) == ""
    assert limited(5, (BEGIN, END), {END: 258}, "") == ""


def test_a_budget_holds_beside_a_schema(library: llguidance.LLTokenizer) -> None:
    prompt = inference.Prompt(schema=json.dumps({"type": "integer"}))
    names = {token: name for name, token in TOKENS.items()}
    made = grammar_of(prompt, FORM, lambda: names, BEGIN, budget=2)
    matcher = llguidance.LLMatcher(library, made)
    assert not matcher.get_error()
    assert matcher.consume_tokens([65, 66])
    assert allowed(matcher) == [TOKENS[END]]
    assert matcher.consume_tokens([TOKENS[END], ord("4") - ord("!")])
    assert matcher.is_accepting()
