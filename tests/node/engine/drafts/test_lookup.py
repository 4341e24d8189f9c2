from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.node.engine.drafts import Lookup


def ends(prompt: list[int], answer: list[int], near: int, length: int) -> int:
    """The place where the last `length` tokens ended before, -1 if they are new.

    Of places in the prompt and the newest in the answer it is the one next to `near`, the last if that is -1.
    """
    said = prompt + answer
    found = [
        end for end in range(length, len(said)) if said[end - length : end] == said[len(said) - length :]
    ]
    found = [end for end in found if end < len(prompt)] + [end for end in found if end >= len(prompt)][-1:]
    if not found:
        return -1
    return found[-1] if near < 0 else min(reversed(found), key=lambda end: abs(end - near))


def reference(prompt: list[int], answer: list[int]) -> tuple[int, float]:
    """The place from which drafts are taken, or -1, and the probability that they are right."""
    near, ways = -1, dict[int, int]()
    right, tried = [0.5, 0.5, 0.5], [2.0, 2.0, 2.0]
    for count in range(len(answer) + 1):
        said = prompt + answer[:count]
        if count:
            hits = {way: said[place] == said[-1] for way, place in ways.items()}
            for way, hit in hits.items():
                right[way], tried[way] = 0.93 * right[way] + hit, 0.93 * tried[way] + 1
            goes_on = [ways[way] for way, hit in hits.items() if hit or way == 0]
            near = goes_on[0] if goes_on else near
            near += near >= 0
        known, before, single = (ends(prompt, answer[:count], near, length) for length in (3, 2, 1))
        ways = {0: known if known >= 0 else before}
        if ways[0] < 0:
            ways = {1: near if near < len(said) else -1, 2: single}
            ways = {way: place for way, place in ways.items() if place >= 0}
    return max(
        ((place, right[way] / tried[way]) for way, place in ways.items()),
        key=lambda way: way[::-1],
        default=(-1, 0.0),
    )


def following(prompt: list[int], answer: list[int], count: int) -> list[int]:
    going = prompt + answer
    start, _ = reference(prompt, answer)
    if start < 0:
        return [going[-1]] * count
    for at in range(start, start + count):
        going.append(going[at])
    return going[-count:]


@given(
    prompt=st.lists(st.sampled_from([0, 1, 256, 65_536]), min_size=1, max_size=24),
    answer=st.lists(st.sampled_from([0, 1, 256, 65_536]), max_size=12),
    count=st.integers(1, 9),
)
def test_drafts_are_what_followed_the_same_tokens(prompt: list[int], answer: list[int], count: int) -> None:
    """Tokens whose bytes would also match between two tokens."""
    first = Lookup(np.array(prompt, np.uint32))
    lookup = first.copy()
    for token in answer:
        lookup.heard(token)
    assert lookup.right() == pytest.approx(reference(prompt, answer)[1])
    assert lookup.drafts((prompt + answer)[-1], count) == following(prompt, answer, count)
    assert first.drafts(prompt[-1], count) == following(prompt, [], count)


def test_after_a_changed_word_an_answer_goes_on_in_the_same_place() -> None:
    """Though the same two words occur again further on, and newer in the answer."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 3, 4, 9, 9]
    lookup = Lookup(np.array([*prompt, 3, 4, 8], np.uint32))
    for token in (1, 2, 99, 3, 4):  # one put in between
        lookup.heard(token)
    assert lookup.drafts(4, 3) == [5, 6, 7]


def test_how_likely_a_guess_is_right_follows_from_those_before() -> None:
    text = list(range(100, 200))
    lookup = Lookup(np.array([*text, 7], np.uint32))
    assert lookup.right() == 0
    for token in text[:40]:
        lookup.heard(token)
    assert lookup.right() > 0.9
    seen = []
    for place, token in enumerate(text[40:], start=1):
        lookup.heard(1 if place % 6 == 0 else token)
        seen.append(lookup.right())
    assert min(seen[:12]) < 0.5  # it had not been seen to go on in the same place behind another token
    assert min(seen[12:]) > 0.6
    for token in range(300, 400):
        lookup.heard(token)
    assert lookup.right() < 0.1


@pytest.mark.parametrize("prompt", [[3], [7, 8, 9, 50, 51, 7, 8, 9]])
def test_a_prediction_is_guessed_from_before_all_else_and_wherever_the_answer_comes_back(
    prompt: list[int],
) -> None:
    """Also where the prompt's last tokens occurred before."""
    predicted = list(range(100, 140))
    lookup = Lookup(np.array(prompt, np.uint32), predicted)
    assert lookup.right() == 0.8
    assert lookup.drafts(prompt[-1], 4) == predicted[:4]
    for token in [*predicted[:10], 7777, *predicted[11:14]]:  # a word is another one
        lookup.heard(token)
    assert lookup.drafts(predicted[13], 3) == predicted[14:17]
    assert lookup.right() > 0.7


def test_a_prediction_that_is_wrong_is_soon_believed_no_more() -> None:
    lookup = Lookup(np.arange(5, dtype=np.uint32), list(range(100, 140)))
    for token in range(200, 212):
        lookup.heard(token)
    assert lookup.right() < 0.25


def test_what_nobody_asked_for_is_looked_up_in_parts() -> None:
    lookup = Lookup(np.array([1, 2, 3], np.uint32))
    for token in (1, 2, 3) * 256:
        lookup.heard(token)
    assert [lookup.right() > 0.9 for _ in range(4)] == [False, False, True, True]
    assert lookup.drafts(3, 4) == [1, 2, 3, 1]


@pytest.mark.parametrize("many", [1 << 10, 1 << 14])
def test_a_token_takes_as_long_behind_a_long_prompt(many: int) -> None:
    """The number of lines run does not grow, for tokens whose bytes occur across any two of them."""
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
            lookup.heard(token)
            lookup.right()
    finally:
        sys.settrace(before)
    assert lines < 700


def test_a_lookup_that_has_not_heard_the_last_token_guesses_nothing() -> None:
    lookup = Lookup(np.array([1, 2, 3, 1, 2], np.uint32))
    assert lookup.drafts(9, 3) == [9, 9, 9]
