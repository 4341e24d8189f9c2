"""The draft model at the head: what it keeps, when it works, and what becomes of its failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stagering import SEED, compute_thread, config_of, expected, prompt_of, setting

from sealring.mesh.ring import Eviction
from sealring.node.engine import RowParameters, params
from sealring.node.engine.drafts import Drafter, Guesses, ModelAtHead
from sealring.node.engine.staging import Stage, random_stage
from sealring.node.engine.warm_up import warm_up
from sealring.v1 import control_pb2 as control

FAMILY, ROOM, MANY = "llama", 400, 100
PROMPT = prompt_of(FAMILY, 1, MANY)
MARKED = ["gemma3_text", "mamba2", "kimi_k3", "deepseek_v41"]
"""Families with windows, with states, and with states, latents and keys side by side."""


@cache
def stage(family: str) -> Stage:
    made = random_stage(config_of(family), 0, setting(family, "num_hidden_layers"), seed=SEED)
    warm_up(made, 64)
    return made


@pytest.fixture(autouse=True)
def on_the_compute_thread() -> Iterator[None]:
    """mlx's arrays belong to a thread: all of a test runs in one."""
    yield
    compute_thread(0).submit(mx.synchronize).result()


TIMES = [control.StepTime(rows=1, tokens=tokens, microseconds=1000 * tokens) for tokens in (1, 8, 64)]


def drafter(room: int = ROOM, family: str = FAMILY) -> Drafter:
    return Drafter(stage(family), setting(family, "vocab_size"), room, TIMES)


def row(tokens: list[int], scope: bytes = b"mine") -> Guesses:
    return Guesses(np.array(tokens, np.uint32), scope)


def follow(made: Drafter, number: int, guesses: Guesses, parameters: RowParameters | None = None) -> None:
    made.follow(number, guesses, lambda: params.encode(parameters or RowParameters()))


def run(made: Drafter, spare: float = 1.0) -> int:
    """How many parts it computes before it has nothing to do."""
    count = 0
    while made.work(spare):
        count += 1
    return count


@cache
def said(prompt: tuple[int, ...], tokens: int, family: str = FAMILY) -> list[int]:
    return expected(family, prompt, tokens)


def in_compute_thread(test: Any) -> None:
    compute_thread(0).submit(test).result()


def test_a_prompt_is_computed_in_parts_that_fit_and_then_guessed_on() -> None:
    def test() -> None:
        made, guesses, answer = drafter(), row(PROMPT), said(tuple(PROMPT), 8)
        follow(made, 1, guesses)
        assert not made.work(0.0005)  # no part of the prompt is as short
        assert made.work(0.01)
        assert guesses.held == 8
        run(made)
        assert guesses.held >= MANY
        guesses.step(3)
        run(made)
        assert guesses.taken(MANY, 4) == answer[:4]
        made.rest()
        guesses.heard(answer[0])
        assert not made.work()
        assert made.taken(1, MANY + 4, 3, lambda: True) == answer[4:7]
        assert made.taken(2, MANY, 2, lambda: True) == [0, 0]
        assert made.taken(1, MANY + 9, 2, lambda: False) == [0, 0]

    in_compute_thread(test)


def test_a_row_is_kept_up_with_though_the_head_is_never_idle() -> None:
    """Not the tokens of a long prompt: these would hold up the head's steps."""

    def test() -> None:
        made, prompt = drafter(), PROMPT[:4]
        guesses, answer = row(prompt), iter(said(tuple(prompt), 60))
        follow(made, 1, guesses)
        for _ in range(30):
            made.keep_up()
            guesses.heard(next(answer))
        assert guesses.right() > 0.5
        made.rest()
        for _ in range(20):
            made.keep_up()
            guesses.heard(next(answer))
        assert guesses.right() == 0
        follow(made, 1, guesses)
        made.keep_up()
        assert guesses.right() > 0.5
        made.leave()
        long = row(list(range(100)))
        follow(made, 2, long)
        made.keep_up()
        assert long.held == 0

    in_compute_thread(test)


def test_a_row_goes_on_from_what_was_computed_of_rows_before() -> None:
    """As far as it begins with the same tokens, and in the same scope only."""

    def test() -> None:
        made, first = drafter(), row(PROMPT)
        follow(made, 1, first)
        run(made)
        made.gone(1)
        turn = PROMPT + prompt_of(FAMILY, 2, 20)
        for scope, prompt, held in (
            (b"other", turn, 0),
            (b"", turn, 0),
            (b"mine", turn, MANY),
            (b"mine", [*PROMPT[:60], 5, 6], 60),
            (b"mine", turn, MANY + 20),
        ):
            guesses = row(prompt, scope)
            follow(made, 2, guesses)
            assert held - 1 <= guesses.held <= held
            run(made)
            guesses.step(1)
            run(made)
            found = guesses.taken(len(prompt), 2)
            made.leave()
            alone = row(prompt, b"")
            follow(made, 3, alone)
            run(made)
            alone.step(1)
            run(made)
            assert alone.taken(len(prompt), 2) == found
            made.leave()

    in_compute_thread(test)


runs = st.lists(st.tuples(st.integers(1, 24), st.integers(0, 24)), min_size=1, max_size=4)


@pytest.mark.parametrize(
    "family",
    [
        MARKED[1],
        *(pytest.param(each, marks=pytest.mark.sweep) for each in (FAMILY, *MARKED[:1], *MARKED[2:])),
    ],
)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(st.tuples(runs, st.integers(0, 20)), min_size=1, max_size=3))
def test_wrong_guesses_are_forgotten(family: str, rows: list[tuple[list[tuple[int, int]], int]]) -> None:
    """The next guesses are what the model says behind the true tokens, whatever was guessed ahead and
    wherever it was wrong, also in a row that begins with tokens of an earlier one.

    `rows` are guesses ahead with the number of right ones, and the tokens that the next row does not have.
    """

    def test() -> None:
        made, text = drafter(family=family), prompt_of(family, 1, 20)
        for number, (guessed, less) in enumerate(rows, 1):
            follow(made, number, guesses := row(text))
            run(made)
            for ahead, right in guessed:
                guesses.step(ahead)
                guesses.send(len(text))
                run(made)
                coming = guesses.taken(len(text), ahead)
                assert coming == said(tuple(text), ahead, family)
                answer = coming[:right] + [(coming[min(right, ahead - 1)] + 1) % words] * (right < ahead)
                for token in answer:
                    guesses.heard(token)
                text += answer
            run(made)
            made.gone(number)
            text = text[: max(20, len(text) - less)]
        assert not made.failed

    words = setting(family, "vocab_size")
    in_compute_thread(test)


class Noting(Stage):
    """A stage that notes the rows and tokens of each pass for guesses, on a stage that is there already."""

    def __init__(self, made: Stage) -> None:
        vars(self).update(vars(made))
        self.passes: list[tuple[int, ...]] = []

    def last_logits(self, inputs: list[mx.array], *rest: Any) -> mx.array:
        self.passes.append(inputs[0].shape)
        return super().last_logits(inputs, *rest)


steps = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(0, 7), min_size=3, max_size=3), st.integers(0, 6)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(lengths=st.lists(st.integers(1, 40), min_size=3, max_size=3), steps=steps)
def test_rows_of_a_lane_have_the_guesses_that_each_would_have_alone(
    lengths: list[int], steps: list[tuple[int, list[int], int]]
) -> None:
    """One pass makes a guess of each, wherever the last ones were wrong. `steps` are guesses ahead, those
    that are right in each row, and a row that leaves before and comes back; 0, 4 and more for none."""

    def test() -> None:
        made = Noting(stage(FAMILY))
        desks, texts = ModelAtHead(Drafter(made, words, ROOM, TIMES)), {}
        guessing: dict[int, Guesses] = {}

        def come(number: int) -> None:
            guessing[number] = row(texts[number])
            desks.follow(number, guessing[number], lambda: params.encode(RowParameters()))
            while desks.work(1.0):
                pass

        for number, length in enumerate(lengths, 1):
            texts[number] = prompt_of(FAMILY, number, length)
            come(number)
        for ahead, rights, leaves in steps:
            if leaves in guessing:
                desks.change(Eviction(leaves, 0, 0))
                come(leaves)
            desks.in_one_lane(list(guessing))
            desks.guess(list(guessing), ahead)
            made.passes.clear()
            desks.guess(list(guessing), 1 + ahead)
            assert [rows for rows, _ in made.passes] == [3]
            for (number, guesses), right in zip(guessing.items(), rights, strict=True):
                text = texts[number]
                coming = desks.taken(number, len(text), ahead, lambda: True)
                assert coming == said(tuple(text), ahead)
                answer = coming[:right]
                if right < ahead:
                    answer.append((coming[right] + 1) % words)
                for token in answer:
                    guesses.heard(token)
                text += answer

    words = setting(FAMILY, "vocab_size")
    in_compute_thread(test)


def test_rows_of_a_lane_are_guessed_for_now_and_then_in_one_pass() -> None:
    """Also rows whose turns would come one after the other."""

    def test() -> None:
        made = Noting(stage(FAMILY))
        desks = ModelAtHead(Drafter(made, setting(FAMILY, "vocab_size"), ROOM, TIMES))
        rows = {number: row(prompt_of(FAMILY, number, 20)) for number in (1, 2, 3)}
        for number, guesses in rows.items():
            desks.follow(number, guesses, lambda: params.encode(RowParameters()))
            for _ in range(5 * number):
                guesses.heard(1)
                while desks.work(1.0):
                    pass
        desks.in_one_lane(list(rows))
        made.passes.clear()
        for _ in range(64):
            for guesses in rows.values():
                guesses.heard(1)
            while desks.work(1.0):
                pass
        assert 4 <= len(made.passes) <= 6
        assert {count for count, _ in made.passes} == {3}

    in_compute_thread(test)


def test_a_row_that_shares_caches_goes_on_alone_is_kept_and_has_a_limit() -> None:
    """The rows of a batch are as long as the longest: two that have no room for that are computed one by
    one."""

    def test() -> None:
        made = Noting(stage(FAMILY))
        for room, passes in ((250, [1, 1]), (500, [2])):
            desks = ModelAtHead(Drafter(made, setting(FAMILY, "vocab_size"), room, TIMES))
            rows = {number: row(prompt_of(FAMILY, number, 10 if number == 1 else 130)) for number in (1, 2)}
            for number, guesses in rows.items():
                desks.follow(number, guesses, lambda: params.encode(RowParameters()))
                while desks.work(1.0):
                    pass
            desks.in_one_lane([1, 2])
            made.passes.clear()
            for guesses in rows.values():
                guesses.step(1)
            while desks.work(1.0):
                pass
            assert [count for count, _ in made.passes] == passes
            desks.change(Eviction(1, 0, 0))
            rows[2].step(3)
            while desks.work(1.0):
                pass
            assert rows[2].taken(130, 4) == said(tuple(prompt_of(FAMILY, 2, 130)), 4)
            turn = row([*prompt_of(FAMILY, 1, 10), 5])
            desks.follow(3, turn, lambda: params.encode(RowParameters()))
            assert turn.held == 10

    in_compute_thread(test)


@pytest.mark.parametrize("family", MARKED[:2])
def test_a_turn_goes_on_from_a_mark_and_marks_have_a_limit(family: str) -> None:
    """From near the end of the answer, or near the end of the prompt where the template leaves the thoughts
    out."""

    def test() -> None:
        made, answer = drafter(family=family), prompt_of(family, 2, 24)
        prompts = [prompt_of(family, number, MANY) for number in range(3, 7)]
        for number, prompt in enumerate(prompts, 1):
            follow(made, number, guesses := row(prompt))
            run(made)
            for at in range(0, len(answer), 4):
                for token in answer[at : at + 4]:
                    guesses.heard(token)
                guesses.step(8)
                run(made)
            made.gone(number)
        for turn, least in (
            (prompts[-1] + answer + [1, 2, 3], MANY + 24 - 8),
            (prompts[-2] + [1, 2, 3], MANY - 16),
            (prompts[0] + answer, 0),
        ):
            follow(made, 9, guesses := row(turn))
            assert least <= guesses.held <= least + 16
            made.leave()

    in_compute_thread(test)


def test_what_is_kept_and_what_is_computed_have_a_limit_together() -> None:
    def test() -> None:
        made = drafter(room=250)
        for number in range(1, 4):
            guesses = row(prompt_of(FAMILY, number, MANY))
            follow(made, number, guesses)
            run(made)
            made.leave()
        for number, held in ((1, 0), (3, MANY)):
            guesses = row(prompt_of(FAMILY, number, MANY))
            follow(made, 9 + number, guesses)
            assert held - 1 <= guesses.held <= held
            made.leave()
        long = row(prompt_of(FAMILY, 5, 300))
        follow(made, 20, long)
        run(made)
        assert long.held <= 250
        assert long.right() == 0

    in_compute_thread(test)


def test_guesses_are_drawn_as_the_tail_draws() -> None:
    """With the same random numbers: the same model guesses what is sampled."""
    drawn = RowParameters(temperature=1.0, seed=3, repetition_penalty=1.3, repetition_context_size=8)

    def test() -> None:
        made, guesses = drafter(), row(PROMPT)
        follow(made, 1, guesses, drawn)
        guesses.step(3)
        run(made)
        ahead = guesses.taken(MANY, 4)
        assert ahead is not None
        again = row([*PROMPT, *ahead[:2]])
        goes_on = dataclasses.replace(drawn, position=2, prompt_tail=tuple(ahead[:2]))
        follow(made, 2, again, goes_on)
        again.step(1)
        run(made)
        assert again.taken(MANY + 2, 2) == ahead[2:]

    in_compute_thread(test)


def test_a_draft_model_that_fails_guesses_no_more() -> None:
    """The epoch goes on: runs that wait for it get any tokens."""

    def test() -> None:
        made, guesses = drafter(), row([1, 2, 3])
        follow(made, 1, guesses)
        whole = stage(FAMILY).model
        stage(FAMILY).model = None  # type: ignore[assignment]
        try:
            assert not made.work()
        finally:
            stage(FAMILY).model = whole
        assert made.failed
        follow(made, 1, guesses)
        assert not made.work()
        assert made.taken(1, 3, 2, lambda: True) == [0, 0]

    in_compute_thread(test)
