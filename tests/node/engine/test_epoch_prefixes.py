"""Rows that begin with what was kept of others generate what they would have generated alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import check_prefixes, check_prefixes_over_epochs
from stagering import CHUNK, Prompts, Ring, combinations, expected, prompt_of, run_on, stages_of

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import Adopting, Keeping, Origin
from sealring.node.engine import Prefixes, RowParameters, params
from sealring.v1 import control_pb2 as control

PREFIX_FAMILIES = ["llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3", "mamba2", "qwen3:4"]
OF_MLX_VLM = ["deepseek_v4", "ernie4_5_moe_vl", "glm5_next", "hunyuan_vl", "hy_v4", "inkling_mm_model"]
OF_MLX_VLM += ["longcat_flash_sparse:ngram", "qwen4_exp", "z1t"]
"""One or more with each kind of cache that text models of mlx-vlm have."""


@pytest.mark.parametrize(
    ("family", "size"),
    combinations(
        PREFIX_FAMILIES + OF_MLX_VLM,
        [1, 2, 3],
        always=[("llama", 3), *((each, 1) for each in ("deepseek_v3", "mamba2", "qwen3:4"))],
    ),
)
def test_kept_prefixes_are_reused(family: str, size: int) -> None:
    tails = [(0, 3), (0, 2), (1, 4), (0, 1), (2, 1), (0, 6), (1, 2), (0, 2)]
    reused = check_prefixes(family, tails, random.Random(7), size)
    assert reused >= 10


@pytest.mark.parametrize(("family", "size"), [("llama", 3), ("gemma3_text", 2), ("mamba2", 1)])
def test_what_is_kept_is_as_good_in_the_next_epoch(family: str, size: int) -> None:
    assert check_prefixes_over_epochs(family, size) == [CHUNK]


MARKED = [("gemma3_text", 2), ("mamba2", 1), ("kimi_k3", 2), ("deepseek_v41", 2), ("llama4", 2)]


@pytest.mark.parametrize(
    ("family", "size"), [*MARKED, *(pytest.param(each, 2, marks=pytest.mark.sweep) for each in OF_MLX_VLM)]
)
def test_a_row_begins_at_a_mark_of_a_longer_prefix_whose_caches_cannot_be_cut(family: str, size: int) -> None:
    """The window of the mark has slid out of the longer prefix long since."""
    whole = prompt_of(family, 0, 30)
    other = whole[:11] + prompt_of(family, 1, 6)
    rows = {1: (whole, RowParameters()), 2: (other, RowParameters())}
    steps = [control.Step(number=number) for number in range(1, 10)]
    for step, (start, end) in zip(steps, [(0, 7), (7, 9), (9, 17), (17, 25), (25, 30)], strict=False):
        step.prefill.chunks.add(
            row=1, start=start, end=end, prompt_tokens=30, params_bytes=0 if start else params.BLOCK
        )
    steps[2].changes.add().keep.CopyFrom(control.Keep(prefix=1, row=1, tokens=9))
    steps[4].changes.add().drop.prefix = 1
    steps[4].changes.add().keep.CopyFrom(control.Keep(prefix=2, row=1, tokens=25, marks=[9]))
    steps[5].prefill.chunks.add(row=2, start=9, end=17, prompt_tokens=17, params_bytes=params.BLOCK, prefix=2)
    steps[6].changes.add().admit.row = 2
    for step in steps[6:]:
        step.decode.lane = 0
    done = run_on(stages_of(family, size), steps, rows)
    assert done.reused == [9]
    assert done.answers[2] == expected(family, tuple(other), 4)


@pytest.mark.parametrize(("family", "size"), [("gemma3_text", 2), ("mamba2", 1), ("kimi_k3", 2)])
def test_a_row_goes_on_with_a_kept_answer_or_at_a_mark_of_its_prompt_in_the_next_epoch(
    family: str, size: int
) -> None:
    """The answer is kept while its row is in a lane with another one and has computed one token more."""
    asked, beside = prompt_of(family, 0, 12), prompt_of(family, 3, 9)
    said = expected(family, (*asked,), 6)
    follow = asked + said + prompt_of(family, 1, 5)
    otherwise = asked[:8] + prompt_of(family, 2, 7)
    rows = {1: asked, 2: beside, 3: follow, 4: otherwise}
    known = {row: (text, RowParameters()) for row, text in rows.items()}
    first = Ring(stages_of(family, size), Prompts(known))
    steps = [control.Step(number=number) for number in range(1, 11)]
    for step, (row, start, end) in zip(steps, [(1, 0, 8), (1, 8, 12), (2, 0, 8), (2, 8, 9)], strict=False):
        size_of = 0 if start else params.BLOCK
        total = len(rows[row])
        step.prefill.chunks.add(row=row, start=start, end=end, prompt_tokens=total, params_bytes=size_of)
    steps[1].changes.add().mark.CopyFrom(control.Mark(row=1, tokens=8))
    for step in steps[4:9]:
        step.decode.lane = 0
    for row in (1, 2):
        steps[4].changes.add().admit.CopyFrom(control.Admit(row=row, lane=0))
    steps[9].changes.add().keep.CopyFrom(control.Keep(prefix=1, row=1, tokens=17, marks=[8]))
    steps[9].changes.add().evict.row = 1
    steps[9].decode.lane = 0
    try:
        for step in steps:
            first.announce(step)
        first.wait_for(10)
        first.break_off()
    finally:
        first.close()
    assert [each.turn_over("") for each in first.prefixes] == [{Origin(1, 1, 17): (8,)}] * size
    second = Ring(stages_of(family, size), Prompts(known), number=2, prefixes=first.prefixes)
    begin, other = control.Step(number=1), control.Step(number=2)
    adopt = control.Adopt(prefix=1, epoch=1, row=1, tokens=17, marks=[8])
    begin.changes.add().adopt.CopyFrom(adopt)
    for step, row, start in ((begin, 3, 17), (other, 4, 8)):
        step.prefill.chunks.add(
            row=row,
            start=start,
            end=len(rows[row]),
            prompt_tokens=len(rows[row]),
            params_bytes=params.BLOCK,
            prefix=1,
        )
    decode = [control.Step(number=number, decode=control.Decode(lane=0)) for number in range(3, 7)]
    for row in (3, 4):
        decode[0].changes.add().admit.CopyFrom(control.Admit(row=row, lane=0))
    try:
        for step in (begin, other, *decode):
            second.announce(step)
        second.wait_for(6)
    finally:
        second.close()
    assert second.prompts.reused == [17, 8]
    assert second.prompts.answers[3] == expected(family, (*follow,), 5)
    assert second.prompts.answers[4] == expected(family, (*otherwise,), 5)


def test_a_mark_that_a_row_does_not_have_ends_the_epoch() -> None:
    ring = Ring(stages_of("mamba2", 1), Prompts({1: ([1, 2, 3], RowParameters())}))
    try:
        begin = control.Step(number=1)
        begin.prefill.chunks.add(row=1, end=2, prompt_tokens=3, params_bytes=params.BLOCK)
        keep = control.Step(number=2)
        keep.changes.add().keep.CopyFrom(control.Keep(prefix=1, row=1, tokens=2, marks=[1]))
        ring.announce(begin)
        ring.announce(keep)
        ring.wait_for_fault()
    finally:
        ring.close()
    assert getattr(ring.faults[0], "reason", "") == "BAD_STEP"


KEPT = Keeping(prefix=1, origin=Origin(1, 1, 1), held=1, lane=None, index=0)


def test_a_stage_that_failed_keeps_nothing() -> None:
    stages = stages_of("llama", 1)
    ring = Ring(stages, Prompts({}))
    ring.prefixes[0].turn_over("")
    ring.prefixes[0].keep(KEPT, [])
    ring.epochs[0].fail(RuntimeError("the device is gone"))
    ring.close()
    assert ring.prefixes[0].turn_over("") == {}


def test_another_ring_finds_nothing() -> None:
    prefixes = Prefixes(control.PREFIX_SUPPORT_ANY)
    prefixes.turn_over("one")
    prefixes.keep(KEPT, [])
    assert prefixes.turn_over("one") == {KEPT.origin: ()}
    assert prefixes.turn_over("one") == {KEPT.origin: ()}, "nothing was computed yet"
    assert prefixes.turn_over("two") == {}
    with pytest.raises(InvalidInput):
        prefixes.adopt(Adopting(1, KEPT.origin))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each == "gemma3_text" else pytest.mark.sweep)
        for each in PREFIX_FAMILIES
    ],
)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    tails=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=4, max_size=8),
    choices=st.randoms(use_true_random=False),
    size=st.integers(1, 3),
)
def test_a_row_that_begins_with_a_kept_prefix_gives_the_same_tokens(
    family: str, tails: list[tuple[int, int]], choices: random.Random, size: int
) -> None:
    check_prefixes(family, tails, choices, size)
