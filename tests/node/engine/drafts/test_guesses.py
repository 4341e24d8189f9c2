from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.node.engine.drafts import CAUGHT_UP, Guesses, GuessesAhead, RowText, Tally


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
            guesses.heard(token)
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
    assert guesses.right() == 0
    for token in range(40):
        feed = guesses.feed(8)
        guesses.heard(token)
        guesses.guess(feed, token)
    assert guesses.right() > 0.9
    for token in range(40):
        guesses.guess(guesses.feed(8), token)
        guesses.heard(token + 1)
    assert guesses.right() < 0.4


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
    guesses.heard(7)
    assert made() == 0
    guesses.heard(8)
    assert made() == 3


@pytest.mark.parametrize("right", [True, False])
def test_guesses_that_no_run_has_are_rare_though_they_are_right(right: bool) -> None:
    """They do not pay, or the gateway would ask for runs. A guess for each token cost an eighth of speed."""
    guesses, made = Guesses(np.array([1, 2], np.uint32)), 0
    for _ in range(96):
        while guesses.wanting:
            guesses.guess(guesses.feed(CAUGHT_UP), 7)
            made += 1
        guesses.heard(7 if right else 8)
    assert made <= 5 + 96 / CAUGHT_UP
    assert (guesses.right() > 0.5) is right


@pytest.mark.parametrize("kind", [Guesses, GuessesAhead])
def test_a_row_begins_with_what_the_model_was_worth_in_the_rows_before(kind: type[Guesses]) -> None:
    model = Tally.of_all_rows()
    for right, least, most in ((True, 0.7, 1.0), (False, 0.0, 0.4)):
        for _ in range(6):
            guesses = kind(np.array([1, 2], np.uint32), model=model)
            for token in range(30):
                guesses.guess(guesses.feed(8), token)
                guesses.heard(token if right else token + 1)
        text = RowText(np.array([3], np.uint32), np.array([3], np.uint32), 1, model=model)
        fresh = kind.of(text)
        assert fresh is not None
        assert least < fresh.right() < most
        assert least < fresh.another(text).right() < most
    assert kind(np.array([3], np.uint32)).right() == 0, "nothing is known of another model"
