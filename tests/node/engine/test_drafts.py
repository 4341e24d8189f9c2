from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.prompt.composition import ResolvedStep, Settling
from sealring.node.engine.drafts import Lookup, Runs


def place(prompt: list[int], answer: list[int]) -> int | None:
    """Where what followed the last 3 or 2 tokens before begins: of places in the prompt and the newest in the
    answer the one next to where the answer would be if it went on repeating."""
    near, found = -1, None
    for count in range(len(answer) + 1):
        said = prompt + answer[:count]
        if count:
            near = found + 1 if found is not None else near + (near >= 0)
        found = None
        for length in (3, 2):
            ends = [
                end
                for end in range(length, len(said))
                if said[end - length : end] == said[len(said) - length :]
            ]
            ends = [end for end in ends if end < len(prompt)] + [end for end in ends if end >= len(prompt)][
                -1:
            ]
            if ends:
                found = ends[-1] if near < 0 else min(reversed(ends), key=lambda end: abs(end - near))
                break
    return found


def reference(prompt: list[int], answer: list[int], count: int) -> list[int]:
    said = prompt + answer
    if (end := place(prompt, answer)) is None:
        return [said[-1]] * count
    going = list(said)
    for at in range(end, end + count):
        going.append(going[at])
    return going[len(said) :]


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
        lookup.add(token)
    said = prompt + answer
    assert lookup.drafts(said[-1], count) == reference(prompt, answer, count)
    assert lookup.knows() == (place(prompt, answer) is not None)
    assert first.drafts(prompt[-1], count) == reference(prompt, [], count)


def test_after_a_changed_word_an_answer_goes_on_in_the_same_place() -> None:
    """Though the same two words occur again further on, and newer in the answer."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 3, 4, 9, 9]
    lookup = Lookup(np.array([*prompt, 3, 4, 8], np.uint32))
    for token in (1, 2, 99, 3, 4):  # one put in between
        lookup.add(token)
    assert lookup.drafts(4, 3) == [5, 6, 7]


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
    assert lines < 400


def test_a_lookup_that_has_not_heard_the_last_token_guesses_nothing() -> None:
    lookup = Lookup(np.array([1, 2, 3, 1, 2], np.uint32))
    assert lookup.drafts(9, 3) == [9, 9, 9]


def run(number: int, *, continues: bool = False) -> ResolvedStep:
    return ResolvedStep(number, b"", (), (), 0, (1,), (1, 1), drafts=1, continues=continues)


def test_what_was_guessed_and_right_is_counted_as_the_gateway_counts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first run's first token is the row's last, all others are guesses; none counts of a broken one."""
    clock = iter(range(100))
    monkeypatch.setattr("sealring.node.engine.drafts.now", lambda: next(clock))
    runs = Runs()
    assert runs.begin(run(1), 5, [6, 7, 8, 9, 10]) == [5, 6]
    assert [runs.go_on(run(number, continues=True)) for number in (2, 3)] == [[7, 8], [9, 10]]
    assert runs.came(run(1), [6, 7]) == [6, 7]
    assert runs.came(run(2, continues=True), [8, 0]) == [8, 0]
    assert (runs.drafted, runs.accepted) == (3, 3)
    assert runs.came(run(3, continues=True), [10, 11]) == []
    assert (runs.drafted, runs.accepted) == (5, 3)
    runs.settle(Settling(1, 0, 4, 0))
    assert runs.since(0) == (5, 3)
    assert runs.since(1) == (4, 2)
    assert runs.since(3) == (0, 0)
