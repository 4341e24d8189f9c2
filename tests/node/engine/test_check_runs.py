"""The schedule that `check` follows: which rows compute together, and what two runs are compared by."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from sealring.node.engine import check_runs
from sealring.node.engine.check_runs import (
    Run,
    comparable,
    follow_alone,
    follow_long,
    follow_schedule,
    largest_difference,
    long_prompt,
    random_prompts,
)


class Machine:
    """A machine whose caches hold a row's number, which is also the token that it makes."""

    def __init__(self, stages: int = 1) -> None:
        self.stages = stages
        self.made = 0
        self.advanced: list[int] = []
        self.calls: list[tuple[list[int], tuple[int, ...]]] = []

    def new_cache(self) -> list[list[ArraysCache]]:
        made = []
        for _ in range(self.stages):
            cache = ArraysCache(1)
            cache[0] = mx.array([[self.made]])
            made.append([cache])
        self.made += 1
        return made

    def advance(self, tokens: mx.array, own: list[list[ArraysCache]]) -> None:
        self.advanced.append(tokens.shape[1])

    def __call__(self, tokens: mx.array, own: list[list[ArraysCache]]) -> mx.array:
        rows, *others = (stage[0][0][:, 0].tolist() for stage in own)
        assert all(stage == rows for stage in others)
        self.calls.append((rows, tokens.shape))
        chosen = mx.array(rows)[:, None, None] == mx.arange(8)[None, None, :]
        return mx.broadcast_to(chosen.astype(mx.float32), (*tokens.shape, 8))


@pytest.mark.parametrize(
    ("count", "before", "between", "after"),
    [(3, [0, 1], [0, 1, 2], [1, 2]), (2, [0], [0, 1], [1]), (1, [0], [0], [0])],
)
def test_rows_come_late_leave_early_and_are_taken_out_and_put_back(
    count: int, before: list[int], between: list[int], after: list[int]
) -> None:
    machine: Any = Machine(stages=2)
    prompts = [mx.zeros((1, length), dtype=mx.uint32) for length in (30, 1, 31)[:count]]
    run = follow_schedule(prompts, machine)
    decoded = [rows for rows, shape in machine.calls if shape[1] == 1][-check_runs.DECODE_STEPS :]
    steps = range(check_runs.DECODE_STEPS)
    assert decoded == [
        before if step < check_runs.ADMIT_AT else between if step < check_runs.EVICT_AT else after
        for step in steps
    ]
    assert all(set(tokens) == {row} for row, tokens in run.tokens.items())
    prefilled = [2 if prompt.shape[1] > check_runs.FIRST_CHUNK else 1 for prompt in prompts]
    together = [sum(row in rows for rows in decoded) for row in range(count)]
    assert [len(run.tokens[row]) for row in range(count)] == [
        mine + more for mine, more in zip(prefilled, together, strict=True)
    ]


def test_each_row_by_itself_makes_as_many_tokens() -> None:
    machine: Any = Machine()
    run = follow_alone([mx.zeros((1, 1), dtype=mx.uint32)] * 2, machine, [3, 1])
    assert {row: len(tokens) for row, tokens in run.tokens.items()} == {0: 3, 1: 1}
    assert [rows for rows, _ in machine.calls] == [[0], [0], [0], [1]]


@pytest.mark.parametrize("reach", [0, 40, 189, 1024, 2048, 5000])
def test_a_long_prompt_has_logits_of_few_tokens_and_of_the_token_behind_each_chunk(reach: int) -> None:
    """The product with a large vocabulary takes as long as hundreds of layers."""
    machine: Any = Machine()
    prompt, chunks = long_prompt(reach, 9, seed=1)
    found, computed = follow_long(prompt, machine, chunks)
    assert computed == chunks
    assert sum(chunks) == prompt.shape[1] > reach + check_runs.LONG_CHUNK // 2
    lengths = [shape[1] for _, shape in machine.calls]
    assert [one.shape[1] for one in found] == lengths
    assert max(lengths) <= check_runs.COMPARED
    assert lengths[-check_runs.LONG_STEPS :] == [1] * check_runs.LONG_STEPS
    assert all(after == 1 for chunk, after in pairwise(chunks) if chunk > check_runs.COMPARED)
    assert sum(machine.advanced) + sum(lengths) == sum(chunks)


def test_prompts_are_of_different_lengths_and_one_is_a_single_token() -> None:
    prompts = random_prompts(4, 9, seed=1)
    lengths = [prompt.shape[1] for prompt in prompts]
    chunk = check_runs.FIRST_CHUNK
    assert lengths == [chunk + 3, 1, chunk + 2, chunk + 7]
    assert all(int(mx.min(one).item()) >= 0 and int(mx.max(one).item()) < 9 for one in prompts)
    again = random_prompts(4, 9, seed=1)
    assert all(bool(mx.all(one == other).item()) for one, other in zip(prompts, again, strict=True))


def test_the_largest_difference_is_found_unless_something_is_no_number() -> None:
    one, two = [mx.array([1.0, 2.0]), mx.array([5.0])], [mx.array([1.5, 2.0]), mx.array([2.0])]
    assert largest_difference(one, two) == 3
    assert largest_difference(two, one) == 3
    assert largest_difference([], []) == 0
    assert largest_difference(one, [*two[:1], mx.array([float("nan")])]) is None


def noted(*tokens: int) -> Run:
    run = Run()
    for token in tokens:
        run.note([4], (mx.arange(8) == token)[None, None].astype(mx.float32))
    return run


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [((1, 2, 3), (1, 2, 3), 3), ((1, 2, 3), (1, 5, 3), 2), ((1, 2, 3), (7, 2, 3), 1)],
)
def test_runs_are_compared_up_to_where_they_part(
    first: tuple[int, ...], second: tuple[int, ...], count: int
) -> None:
    one, two = noted(*first), noted(*second)
    assert one.tokens == {4: list(first)}
    assert [len(logits) for logits in comparable(one, two)] == [count, count]
