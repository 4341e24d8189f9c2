from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.node.engine.drafts import Lookup


def newest(said: list[int]) -> int | None:
    """Where what followed the last 3 or 2 tokens before begins."""
    for length in (3, 2):
        for end in range(len(said) - 1, length - 1, -1):
            if said[end - length : end] == said[-length:]:
                return end
    return None


def reference(said: list[int], count: int) -> list[int]:
    if (end := newest(said)) is None:
        return [said[-1]] * count
    going = list(said)
    for place in range(end, end + count):
        going.append(going[place])
    return going[len(said) :]


@given(
    prompt=st.lists(st.sampled_from([0, 1, 256, 65_536]), min_size=1, max_size=24),
    answer=st.lists(st.sampled_from([0, 1, 256, 65_536]), max_size=12),
    count=st.integers(1, 9),
)
def test_drafts_are_what_followed_the_newest_place(prompt: list[int], answer: list[int], count: int) -> None:
    """Tokens whose bytes would also match between two tokens."""
    first = Lookup(np.array(prompt, np.uint32))
    lookup = first.copy()
    for token in answer:
        lookup.add(token)
    said = prompt + answer
    assert lookup.drafts(said[-1], count) == reference(said, count)
    assert lookup.knows() == (newest(said) is not None)
    assert first.drafts(prompt[-1], count) == reference(prompt, count)


@pytest.mark.parametrize("many", [1 << 10, 1 << 14])
def test_a_token_takes_as_long_behind_a_long_prompt(many: int) -> None:
    """Of tokens whose bytes are found between any two of them: no more lines are run."""
    lookup = Lookup(np.full(many, 7 * 256, np.uint32))
    lines = 0

    def traced(frame: object, event: str, argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        for token in (7, 7, 9, 7, 8):
            lookup.add(token)
            lookup.knows()
    finally:
        sys.settrace(before)
    assert lines < 200


def test_a_lookup_that_has_not_heard_the_last_token_guesses_nothing() -> None:
    lookup = Lookup(np.array([1, 2, 3, 1, 2], np.uint32))
    assert lookup.drafts(9, 3) == [9, 9, 9]
