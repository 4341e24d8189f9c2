from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import ResolvedStep, Settling
from sealring.node.engine import Guesses, Lookup, Runs
from sealring.node.engine.drafts import CAUGHT_UP
from sealring.node.wire.timelog import now
from sealring.v1 import control_pb2 as control


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
        lookup.add(token)
    assert lookup.likely() == pytest.approx(reference(prompt, answer)[1])
    assert lookup.drafts((prompt + answer)[-1], count) == following(prompt, answer, count)
    assert first.drafts(prompt[-1], count) == following(prompt, [], count)


def test_after_a_changed_word_an_answer_goes_on_in_the_same_place() -> None:
    """Though the same two words occur again further on, and newer in the answer."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 3, 4, 9, 9]
    lookup = Lookup(np.array([*prompt, 3, 4, 8], np.uint32))
    for token in (1, 2, 99, 3, 4):  # one put in between
        lookup.add(token)
    assert lookup.drafts(4, 3) == [5, 6, 7]


def test_how_likely_a_guess_is_right_follows_from_those_before() -> None:
    text = list(range(100, 200))
    lookup = Lookup(np.array([*text, 7], np.uint32))
    assert lookup.likely() == 0
    for token in text[:40]:
        lookup.add(token)
    assert lookup.likely() > 0.9
    seen = []
    for place, token in enumerate(text[40:], start=1):
        lookup.add(1 if place % 6 == 0 else token)
        seen.append(lookup.likely())
    assert min(seen[:12]) < 0.5  # it had not been seen to go on in the same place behind another token
    assert min(seen[12:]) > 0.6
    for token in range(300, 400):
        lookup.add(token)
    assert lookup.likely() < 0.1


@pytest.mark.parametrize("prompt", [[3], [7, 8, 9, 50, 51, 7, 8, 9]])
def test_a_prediction_is_guessed_from_before_all_else_and_wherever_the_answer_comes_back(
    prompt: list[int],
) -> None:
    """Also where the prompt's last tokens occurred before."""
    predicted = list(range(100, 140))
    lookup = Lookup(np.array(prompt, np.uint32), predicted)
    assert lookup.likely() == 0.8
    assert lookup.drafts(prompt[-1], 4) == predicted[:4]
    for token in [*predicted[:10], 7777, *predicted[11:14]]:  # a word is another one
        lookup.add(token)
    assert lookup.drafts(predicted[13], 3) == predicted[14:17]
    assert lookup.likely() > 0.7


def test_a_prediction_that_is_wrong_is_soon_believed_no_more() -> None:
    lookup = Lookup(np.arange(5, dtype=np.uint32), list(range(100, 140)))
    for token in range(200, 212):
        lookup.add(token)
    assert lookup.likely() < 0.25


def test_what_nobody_asked_for_is_looked_up_in_parts() -> None:
    lookup = Lookup(np.array([1, 2, 3], np.uint32))
    for token in (1, 2, 3) * 256:
        lookup.add(token)
    assert [lookup.likely() > 0.9 for _ in range(4)] == [False, False, True, True]
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
            lookup.add(token)
            lookup.likely()
    finally:
        sys.settrace(before)
    assert lines < 700


def test_a_lookup_that_has_not_heard_the_last_token_guesses_nothing() -> None:
    lookup = Lookup(np.array([1, 2, 3, 1, 2], np.uint32))
    assert lookup.drafts(9, 3) == [9, 9, 9]


def run(
    number: int,
    *,
    continues: bool = False,
    source: control.DraftSource.ValueType = control.DRAFT_SOURCE_LOOKUP,
) -> ResolvedStep:
    return ResolvedStep(number, b"", (), (), 0, (1,), (1, 1), drafts=1, continues=continues, source=source)


def test_what_was_guessed_and_right_is_counted_as_the_gateway_counts_it() -> None:
    """The first run's first token is the row's last, all others are guesses; none counts of a broken one."""
    runs, begun = Runs(), now()
    assert runs.begin(run(1), 1, 5, [6, 7, 8, 9, 10]) == [5, 6]
    assert [runs.go_on(run(number, continues=True)) for number in (2, 3)] == [[7, 8], [9, 10]]
    assert runs.came(run(1), [6, 7]) == [0, 1]
    first = now()
    assert runs.came(run(2, continues=True), [8, 0]) == [0, 1]
    assert (runs.drafted, runs.accepted) == (3, 3)
    assert runs.came(run(3, continues=True), [10, 11]) == []
    assert (runs.drafted, runs.accepted) == (5, 3)
    runs.settle(Settling(1, 0, 4, 0))
    last = now()
    runs.begin(run(4, source=control.DRAFT_SOURCE_MODEL), 1, 5, [6])
    assert runs.came(run(4, source=control.DRAFT_SOURCE_MODEL), [7, 7]) == [0]
    assert runs.since(last) == (1, 0, 1)
    assert runs.since(begun) == (6, 3, 1)
    assert runs.since(first) == (5, 2, 1)
    assert runs.since(now() + 1) == (0, 0, 0)


def test_each_row_of_a_step_has_its_own_wrong_draft() -> None:
    runs, step = Runs(), ResolvedStep(1, b"", (), (), 0, (4, 9), (4, 4, 4, 9, 9, 9), drafts=2)
    assert runs.begin(step, 4, 1, [2, 3]) == [1, 2, 3]
    assert runs.begin(step, 9, 5, [6, 7]) == [5, 6, 7]
    assert runs.came(step, [2, 0, 4, 0, 7, 8]) == [0, 1, 3]
    assert (runs.drafted, runs.accepted) == (4, 1)
    runs.settle(Settling(9, 0, 1, 2))
    with pytest.raises(InvalidInput, match="not 1 tokens of row 4"):
        runs.settle(Settling(4, 0, 1, 2))


def test_runs_behind_a_refuted_guess_bring_nothing_though_all_drafts_before_were_right() -> None:
    runs = Runs()
    runs.begin(run(1), 1, 5, [6, 7, 8])
    runs.go_on(run(2, continues=True))
    assert not runs.broken(1)
    assert runs.came(run(1), [6, 9]) == [0, 1]
    assert runs.broken(1)
    assert runs.came(run(2, continues=True), [8, 9]) == []


def test_runs_behind_a_guess_that_came_too_late_to_be_refuted_bring_nothing() -> None:
    """A draft model's guess is taken for the next run after the tokens came, and before it has heard them."""
    runs = Runs()
    runs.begin(run(1), 1, 5, [6], lambda at, count: [7, 8])
    assert runs.came(run(1), [6, 9]) == [0, 1]
    assert not runs.broken(1)
    assert runs.go_on(run(2, continues=True)) == [7, 8]
    assert runs.came(run(2, continues=True), [8, 9]) == []
    assert runs.broken(1)
    runs.settle(Settling(1, 0, 2, 2))


def test_a_chain_takes_further_drafts_when_a_run_needs_them() -> None:
    asked = []

    def more(at: int, count: int) -> list[int]:
        asked.append((at, count))
        return [6, 7, 8, 9][at : at + count]

    runs = Runs()
    assert runs.begin(run(1), 1, 5, [], more) == [5, 6]
    assert runs.go_on(run(2, continues=True)) == [7, 8]
    assert asked == [(0, 1), (1, 2)]
    assert runs.at(1) == 3
    assert runs.came(run(1), [6, 7]) == [0, 1]
    assert not runs.broken(1)


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    acts=st.lists(
        st.sampled_from(["token", "token", "cut", "cut", "guess", "guess", "begin", "end", "take"]),
        min_size=20,
        max_size=60,
    ),
    choices=st.randoms(use_true_random=False),
)
def test_a_draft_model_computes_the_row_and_its_guesses_in_order(
    prompt: list[int], acts: list[str], choices: random.Random
) -> None:
    """Tokens may arrive while it computes, and between a cut of its cache and what it computes next. A wrong
    guess is cut from what it has computed."""

    def guess_of(tokens: list[int]) -> int:
        return sum(place * token for place, token in enumerate(tokens, start=1)) % 3

    guesses, text = Guesses(np.array(prompt, np.uint32)), list(prompt)
    cache: list[int] = []
    under_way = None
    for act in acts:
        if act == "token":
            token = choices.choice([choices.randrange(3), guess_of(text), guess_of(text)])
            guesses.add(token)
            text.append(token)
        elif act == "cut" and under_way is None:
            cache = cache[: guesses.held]
        elif act == "end" and under_way is not None:
            guesses.guess(under_way, guess_of(cache))
            under_way = None
        elif act in ("begin", "guess") and under_way is None:
            feed = guesses.feed(choices.randint(1, 4), len(cache))
            if not len(feed.tokens):
                assert feed.start < len(cache) or guesses.held == guesses.whole
                continue
            assert feed.start == len(cache)
            cache += feed.tokens.tolist()
            assert len(cache) == feed.end
            assert cache[: len(text)] == text[: len(cache)]
            if act == "begin":
                under_way = feed
            else:
                guesses.guess(feed, guess_of(cache))
        elif act == "take":
            ahead = guesses.taken(0, len(text) + 1)
            if ahead is not None:
                assert ahead == [*text, guess_of(text)]
            assert guesses.taken(0, len(text)) == text
    assert guesses.text.tolist() == text


def test_how_often_a_draft_model_is_right_is_known_from_guesses_that_came_late_too() -> None:
    guesses = Guesses(np.array([1, 2], np.uint32))
    assert guesses.likely() == 0
    for token in range(40):
        feed = guesses.feed(8)
        guesses.add(token)
        guesses.guess(feed, token)
    assert guesses.likely() > 0.9
    for token in range(40):
        guesses.guess(guesses.feed(8), token)
        guesses.add(token + 1)
    assert guesses.likely() < 0.1


def test_guesses_are_as_many_as_the_next_run_needs() -> None:
    guesses = Guesses(np.array([1, 2], np.uint32))

    def made() -> int:
        count = 0
        while guesses.wanting:
            guesses.guess(guesses.feed(8), 7)
            count += 1
        return count

    assert made() == 1
    guesses.step(2)
    assert made() == 2
    assert guesses.taken(2, 2) == [7, 7]
    assert made() == 0
    guesses.send(4)
    assert made() == 2
    guesses.add(7)
    assert made() == 0
    guesses.add(8)
    assert made() == 3


@pytest.mark.parametrize("right", [True, False])
def test_guesses_that_no_run_has_are_rare_though_they_are_right(right: bool) -> None:
    """They do not pay, or the gateway would ask for runs. A guess for each token cost an eighth of speed."""
    guesses, made = Guesses(np.array([1, 2], np.uint32)), 0
    for _ in range(96):
        while guesses.wanting:
            guesses.guess(guesses.feed(CAUGHT_UP), 7)
            made += 1
        guesses.add(7 if right else 8)
    assert made <= 5 + 96 / CAUGHT_UP
    assert (guesses.likely() > 0.5) is right
