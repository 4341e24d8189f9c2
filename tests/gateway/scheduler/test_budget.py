"""What running rows feel of a prefill, in simulated time, and that prompts get on whatever steps cost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulatedring import BETWEEN, FAST, LINEAR, SLOW, Costs, WatchedRing

from bench.summaries import percentile
from sealring.gateway.scheduler.budget import MANY, Load, PrefillBudget
from sealring.gateway.scheduler.costs import StepCosts

GPU = Costs(step_ms=11.4, row_ms=0.1, prefill_ms=12.0, token_us=24.0, link_ms=1.0)
"""An 8B model on H200s."""


def beside(ring: WatchedRing, rows: int, prompts: list[int]) -> tuple[list[float], list[float], float]:
    """Gaps of so many streams without the prompts and beside them, and the seconds until all are through."""
    ring.stream(rows)
    begun = ring.now
    for number, prompt in enumerate(prompts):
        ring.ask(f"long{number}", prompt, 2)
    ring.run(until=lambda: all(f"long{number}" in ring.arrivals for number in range(len(prompts))))
    return ring.gaps(begun / 2, begun), ring.gaps(begun, ring.now), ring.now - begun


def alone(stages: int, costs: Costs, prompts: list[int], in_turn: bool) -> float:
    ring = WatchedRing(stages, costs, rows_in_turn=in_turn)
    for number, prompt in enumerate(prompts):
        ring.ask(f"long{number}", prompt, 2)
    ring.run()
    return max(ring.first_tokens())


@pytest.mark.parametrize(
    ("stages", "rows", "costs", "prompts", "most", "times"),
    [
        (2, 4, LINEAR, [1025], 1.6, 3.0),
        (3, 16, LINEAR, [300] * 3, 1.7, 3.0),
        (2, 4, SLOW, [1025], 1.7, 3.6),
        (3, 16, SLOW, [600], 1.6, 3.4),
        (2, 4, GPU, [4096], 1.8, 3.0),
        (3, 16, GPU, [4096], 1.8, 3.0),
        (2, 32, FAST, [4096], 2.0, 3.5),
        (1, 4, FAST, [4096], 2.6, 3.0),
        (2, 4, BETWEEN, [1300, 700], 2.2, 4.0),
    ],
)
def test_streams_keep_their_pace_beside_prompts_that_get_on(
    stages: int, rows: int, costs: Costs, prompts: list[int], most: float, times: float
) -> None:
    """How much at most the 95th percentile of gaps grows, and how many times as long as alone prompts take.

    A chunk's fixed cost is why not all of it comes within one and a half and three."""
    in_turn = costs in (SLOW, LINEAR)
    quiet, busy, seconds = beside(WatchedRing(stages, costs, rows_in_turn=in_turn), rows, prompts)
    assert percentile(busy, 0.95) <= most * percentile(quiet, 0.95)
    assert percentile(busy, 0.99) <= 3.0 * percentile(quiet, 0.99)
    assert seconds <= times * alone(stages, costs, prompts, in_turn)


@pytest.mark.parametrize("costs", [SLOW, GPU])
@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_wrong_table_and_noise_are_made_up_for(costs: Costs, wrong: float) -> None:
    noise = random.Random(1)
    ring = WatchedRing(2, costs, rows_in_turn=costs is SLOW)
    exact = ring._cost
    ring._cost = lambda step, tokens: (  # type: ignore[method-assign]
        exact(step, tokens) * noise.lognormvariate(0, 0.15) * (wrong if tokens else 1.0)
    )
    quiet, busy, seconds = beside(ring, 4, [1500])
    assert percentile(busy, 0.95) <= 3.2 * percentile(quiet, 0.95)
    assert seconds <= 10 * max(1.0, wrong) * alone(2, costs, [1500], costs is SLOW)


@pytest.mark.parametrize(("stages", "prompt", "times"), [(2, 1041, 1.6), (3, 1041, 2.2), (3, 4112, 2.6)])
def test_a_prompt_alone_fills_the_pipeline(stages: int, prompt: int, times: float) -> None:
    """On so many stages it is through so many times as fast as on one."""
    assert alone(1, SLOW, [prompt], True) >= times * alone(stages, SLOW, [prompt], True)


def test_a_crowd_is_not_held_up_by_one_stream() -> None:
    """Sixteen prompts beside one row take little longer than without it."""
    times = []
    for streams in (0, 1):
        ring = WatchedRing(1, LINEAR)
        if streams:
            ring.stream(1, tokens=20)
        begun = ring.now
        for number in range(16):
            ring.ask(f"prompt{number}", 30, 1)
        ring.run(until=lambda ring=ring: len(ring.first_tokens()) == 16)
        times.append(ring.now - begun)
    assert times[1] < 2.0 * times[0]


@settings(max_examples=100, deadline=None)
@given(
    largest=st.sampled_from([1, 3, 64, 256, 8192]),
    stages=st.integers(1, 5),
    fine=st.booleans(),
    seen=st.lists(
        st.tuples(st.floats(0, 100.0), st.integers(0, 3), st.integers(1, 99), st.integers(1, 9)), max_size=40
    ),
    prompts=st.integers(1, 50),
    tokens=st.integers(1, 100_000),
)  # fmt: skip
def test_a_prompt_gets_a_chunk_in_every_round(
    largest: int,
    stages: int,
    fine: bool,
    seen: list[tuple[float, int, int, int]],
    prompts: int,
    tokens: int,
) -> None:
    budget = PrefillBudget(StepCosts(), largest, stages, fine)
    assert 1 <= budget.alone(prompts, tokens) <= largest
    for rounds, (seconds, steps, rows, lanes) in enumerate(seen * 2):
        budget.measure(seconds, steps, steps * 0.01, rows, lanes)
        load = Load(rows, lanes, prompts, tokens, steps)
        chunks = list(iter(lambda rounds=rounds, load=load: budget.take(float(rounds), load), 0))
        assert 1 <= len(chunks) <= MANY
        assert all(1 <= chunk <= largest for chunk in chunks)


def test_lanes_are_parts_of_a_round() -> None:
    """A round's steps go with its first lane, also where prompts come after a while."""
    costs = StepCosts(rows=((1, 0.01),), tokens=((1, 0.001), (256, 0.001)))
    budget, load = PrefillBudget(costs, 256, 3), Load(3, 3, 1, 100_000)
    thirds = [7 + step / 3 for step in range(9)]
    counts = [len(list(iter(lambda rounds=rounds: budget.take(rounds, load), 0))) for rounds in thirds]
    assert counts == [MANY, 0, 0] * 3
