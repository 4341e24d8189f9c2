"""What a ring generates is what mlx-lm generates, whoever steps with whom, in which lane and when."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import make_steps
from stagering import FAMILIES, combinations, expected, prompt_of, run, stages_of

from sealring.node.engine import RowParameters, params
from sealring.node.engine.staging.interception import intercept_call
from sealring.v1 import control_pb2 as control

ALWAYS = [
    *((family, 3) for family in ("gemma3_text", "gpt_oss", "mamba2", "deepseek_v3", "dbrx", "qwen3:4")),
    *(("llama", size) for size in (1, 2)),
]
"""Those that differ by caches, by masks, or by when they evaluate. `any_schedule` has llama in three."""


@pytest.mark.parametrize(("family", "size"), combinations(FAMILIES, [1, 2, 3], always=ALWAYS))
def test_greedy_tokens_are_those_of_mlx_lm(family: str, size: int) -> None:
    lengths = {
        row: (length, tokens)
        for row, (length, tokens) in enumerate([(3, 6), (17, 4), (1, 5), (30, 6), (8, 1)], start=1)
    }
    rows = {row: (prompt_of(family, row, length), RowParameters()) for row, (length, _) in lengths.items()}
    steps = make_steps(random.Random(size), lengths, size)
    answers = run(family, size, steps, rows).answers
    for row, (_, tokens) in lengths.items():
        assert answers[row][:tokens] == expected(family, tuple(rows[row][0]), tokens), row


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_a_prompt_in_one_pass_of_the_tail_goes_on_as_in_two(
    family: str,
) -> None:
    """As on GPUs."""
    tail = stages_of(family, 2)[1]
    calls: list[int] = []

    def counted(own: Callable[..., mx.array], tokens: mx.array, **given: Any) -> mx.array:
        calls.append(tokens.shape[1])
        return own(tokens, **given)

    restore = intercept_call(tail.model, counted)
    prompt = prompt_of(family, 1, 13)
    passes = {}
    try:
        for tail.cuts in (False, True):
            calls.clear()
            steps = make_steps(random.Random(2), {1: (13, 4)}, 1)
            answers = run(family, 2, steps, {1: (prompt, RowParameters())}).answers
            assert answers[1][:4] == expected(family, tuple(prompt), 4)
            passes[tail.cuts] = [count for at, count in enumerate(calls) if sum(calls[:at]) < 13]
    finally:
        tail.cuts = False
        restore()
    *before, last = passes[True]
    assert last > 1
    assert passes[False] == [*before, last - 1, 1]


@pytest.mark.parametrize(
    ("family", "size"),
    combinations(
        ["llama", "gemma3_text", "gpt_oss", "mamba2", "qwen3:4"],
        [1, 3],
        always=[("gemma3_text", 1), ("mamba2", 3), ("qwen3:4", 1)],
    ),
)
def test_choices_are_what_rows_of_their_own_would_be(family: str, size: int) -> None:
    """Copies of a row are rows with seeds that follow on its own, wherever they are stepped."""
    prompt, tokens = prompt_of(family, 3, 13), 6
    one = RowParameters(temperature=1.3)
    if size > 1:
        one = RowParameters(
            temperature=1.3,
            repetition_penalty=1.5,
            repetition_context_size=9,
            prompt_tail=tuple(prompt[-9:]),
            presence_penalty=0.5,
            frequency_penalty=1.5,
        )
    seeds = ((1 << 64) - 2, (1 << 64) - 1, 0, 1)
    sampling = [dataclasses.replace(one, seed=seed) for seed in seeds]
    alone = {}
    for number, parameters in enumerate(sampling, start=1):
        steps = make_steps(random.Random(number), {1: (13, tokens)}, 1)
        alone[number] = run(family, size, steps, {1: (prompt, parameters)}).answers[1][:tokens]
    assert len({tuple(answer) for answer in alone.values()}) > 1

    steps = []
    for start, end in ((0, 8), (8, 13)):
        step = control.Step(number=len(steps) + 1)
        size_of, choices = (params.BLOCK, 4) if start == 0 else (0, 0)
        step.prefill.chunks.add(
            row=1, start=start, end=end, prompt_tokens=13, params_bytes=size_of, choices=choices
        )
        steps.append(step)
    for turn in range(2 * tokens):
        step = control.Step(number=len(steps) + 1)
        if turn < 2:
            for row in (1, 3) if turn == 0 else (4, 2):
                step.changes.add().admit.CopyFrom(control.Admit(row=row, lane=turn))
        step.decode.lane = turn % 2
        steps.append(step)
    rows = dict.fromkeys(range(1, 5), (prompt, sampling[0]))
    answers = run(family, size, steps, rows).answers
    assert {row: answer[:tokens] for row, answer in answers.items()} == alone


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    choices=st.randoms(use_true_random=False),
    size=st.integers(1, 3),
    lanes=st.integers(1, 4),
    family=st.sampled_from(["llama", "gpt_oss", "gemma3_text", "qwen3:8", "qwen3:4"]),
)
def test_any_schedule_gives_the_same_tokens(
    lengths: list[tuple[int, int]], choices: random.Random, size: int, lanes: int, family: str
) -> None:
    numbered = dict(enumerate(lengths, start=1))
    rows = {row: (prompt_of(family, row, length), RowParameters()) for row, (length, _) in numbered.items()}
    cancelled: set[int] = set()
    answers = run(family, size, make_steps(choices, numbered, lanes, cancelled), rows).answers
    for row, (_, tokens) in numbered.items():
        got = answers[row][:tokens]
        assert len(got) == tokens or row in cancelled
        assert got == expected(family, tuple(rows[row][0]))[: len(got)]


def sampled_rows(
    family: str, lengths: dict[int, tuple[int, int]]
) -> dict[int, tuple[list[int], RowParameters]]:
    rows = {}
    for row, (length, _) in lengths.items():
        parameters = RowParameters(temperature=1.0, top_p=0.95, top_k=40 * (row % 2), min_p=0.01, seed=row)
        rows[row] = (prompt_of(family, row, length), parameters)
    return rows


def test_a_seed_gives_the_same_tokens_in_any_batch_lane_and_ring() -> None:
    lengths = {1: (5, 9), 2: (12, 7), 3: (3, 11), 4: (20, 5)}
    rows = sampled_rows("llama", lengths)
    alone = {}
    for row, length in lengths.items():
        steps = make_steps(random.Random(0), {1: length}, 1)
        alone[row] = run("llama", 1, steps, {1: rows[row]}).answers[1][: length[1]]
    assert len({tuple(tokens[:5]) for tokens in alone.values()}) == len(alone)
    for size in (1, 2, 3):
        answers = run("llama", size, make_steps(random.Random(size + 5), lengths, 2), rows).answers
        for row, (_, tokens) in lengths.items():
            assert answers[row][:tokens] == alone[row], (size, row)
