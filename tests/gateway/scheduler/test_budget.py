"""What running rows feel of a prefill, in simulated time, and that prompts get on whatever steps cost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulatedring import BETWEEN, FAST, LINEAR, SLOW, Costs, SimulatedRing

from bench.summaries import percentile
from sealring.gateway.scheduler import StepCosts
from sealring.gateway.scheduler.budget import MANY, PrefillBudget

GPU = Costs(step_ms=11.4, row_ms=0.1, prefill_ms=12.0, token_us=24.0, link_ms=1.0)
"""An 8B model on H200s."""


MACS = Costs(
    step_ms=36.0,
    link_ms=0.65,
    past_us=24.0,
    first_chunk=((1, 0.036), (8, 0.06), (32, 0.09), (64, 0.13), (256, 0.34), (512, 0.6), (2048, 2.15)),
)
"""A 4-bit model of 27B on M5 Max, by figures that others published
(docs/decisions/0046-chunks-by-device-and-table.md)."""


def beside(ring: SimulatedRing, rows: int, prompts: list[int]) -> tuple[list[float], list[float], float]:
    """Gaps of `rows` streams without the prompts and beside them, and the seconds until all are prefilled."""
    ring.stream(rows)
    begun = ring.now
    for number, prompt in enumerate(prompts):
        ring.ask(f"long{number}", prompt, 2)
    ring.run(until=lambda: all(f"long{number}" in ring.arrivals for number in range(len(prompts))))
    return ring.gaps("stream", begun / 2, begun), ring.gaps("stream", begun, ring.now), ring.now - begun


def alone(stages: int, costs: Costs, prompts: list[int]) -> float:
    ring = SimulatedRing(stages, costs)
    for number, prompt in enumerate(prompts):
        ring.ask(f"long{number}", prompt, 2)
    ring.run()
    return max(ring.firsts("long"))


@pytest.mark.parametrize(
    ("stages", "rows", "costs", "prompts", "most", "times"),
    [
        (2, 4, LINEAR, [1025], 1.6, 3.0),
        (3, 16, LINEAR, [300] * 3, 1.7, 3.0),
        (2, 4, SLOW, [1025], 1.7, 3.6),
        (3, 16, SLOW, [600], 1.6, 3.4),
        (2, 4, GPU, [4096], 2.1, 3.0),
        (3, 16, GPU, [4096], 2.2, 3.0),
        (2, 32, FAST, [4096], 2.0, 3.5),
        (1, 4, FAST, [4096], 2.6, 4.5),
        (2, 4, BETWEEN, [13_000, 7000], 2.2, 4.0),
    ],
)
def test_streams_keep_their_pace_beside_prompts_that_get_on(
    stages: int, rows: int, costs: Costs, prompts: list[int], most: float, times: float
) -> None:
    """How much at most the 95th percentile of gaps grows, and how many times as long as alone prompts take.

    A chunk's fixed cost is why not all of it comes within one and a half and three."""
    quiet, busy, seconds = beside(SimulatedRing(stages, costs), rows, prompts)
    assert percentile(busy, 0.95) <= most * percentile(quiet, 0.95)
    assert percentile(busy, 0.99) <= 3.0 * percentile(quiet, 0.99)
    assert seconds <= times * alone(stages, costs, prompts)


@pytest.mark.parametrize("costs", [GPU, MACS, BETWEEN])
def test_a_short_prompt_has_pauses_of_a_second_and_is_there_as_soon_as_alone(costs: Costs) -> None:
    ring = SimulatedRing(2, costs)
    quiet, busy, seconds = beside(ring, 4, [300])
    assert seconds <= 1.4 * alone(2, costs, [300]) + 2 * max(quiet)
    assert max(busy) <= 1.3 + max(quiet)
    assert sum(gap > 1.5 * max(quiet) for gap in busy) <= 2 * 4, "one or two tokens of each row are late"


def test_prompts_that_come_all_the_time_go_by_plans() -> None:
    """As soon as no pauses are left, rounds keep their length but for one in SELDOM."""
    ring = SimulatedRing(2, GPU)
    ring.stream(4)
    quiet = max(ring.gaps("stream", ring.now / 2, ring.now))
    begun = 0.0
    for number in range(200):
        until = len(ring.arrivals["stream0"]) + 8
        ring.ask(f"short{number}", 3000, 1)
        ring.run(until=lambda until=until: len(ring.arrivals["stream0"]) >= until)  # type: ignore[misc]
        begun = ring.now if number == 99 else begun
    gaps = ring.gaps("stream", begun, ring.now)
    assert percentile(gaps, 0.95) <= 2.4 * quiet
    assert len(ring.firsts("short")) > 190


def test_a_short_prompt_passes_a_long_one() -> None:
    """It comes while 20,000 tokens are prefilled beside four rows, and they do not hold it up."""
    ring = SimulatedRing(2, MACS)
    ring.stream(4)
    ring.ask("long", 20_000, 1)
    ring.run(until=lambda: sum(ring.chunks) > 4000)
    asked = ring.now
    ring.ask("short", 300, 1)
    ring.run(until=lambda: "short" in ring.arrivals)
    assert ring.arrivals["short"][0] - asked <= 3 * alone(2, MACS, [300])
    assert "long" not in ring.arrivals


@pytest.mark.parametrize("costs", [SLOW, GPU])
@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_wrong_table_and_noise_are_made_up_for(costs: Costs, wrong: float) -> None:
    noise = random.Random(1)
    ring = SimulatedRing(2, costs)
    exact = ring.takes
    ring.takes = lambda stage, work: (  # type: ignore[method-assign]
        exact(stage, work) * noise.lognormvariate(0, 0.15) * (wrong if work.step.prefill.chunks else 1.0)
    )
    quiet, busy, seconds = beside(ring, 4, [1500])
    assert percentile(busy, 0.95) <= 3.2 * percentile(quiet, 0.95)
    assert seconds <= 10 * max(1.0, wrong) * alone(2, costs, [1500])


@pytest.mark.parametrize(("stages", "prompt", "times"), [(2, 1041, 1.6), (3, 1041, 2.2), (3, 4112, 2.6)])
def test_a_prompt_alone_fills_the_pipeline(stages: int, prompt: int, times: float) -> None:
    """On `stages` stages it is prefilled at least `times` times as fast as on one."""
    assert alone(1, SLOW, [prompt]) >= times * alone(stages, SLOW, [prompt])


def test_a_crowd_is_not_held_up_by_one_stream() -> None:
    """Sixteen prompts beside one row take little longer than without it."""
    times = []
    for streams in (0, 1):
        ring = SimulatedRing(1, LINEAR)
        if streams:
            ring.stream(1, tokens=20)
        begun = ring.now
        for number in range(16):
            ring.ask(f"prompt{number}", 30, 1)
        ring.run(until=lambda ring=ring: len(ring.firsts("prompt")) == 16)
        times.append(ring.now - begun)
    assert times[1] < 2.0 * times[0]


@settings(max_examples=100, deadline=None)
@given(
    longest=st.sampled_from([1, 3, 64, 256, 8192]),
    stages=st.integers(1, 5),
    seen=st.lists(
        st.tuples(st.floats(0, 100.0), st.integers(0, 3), st.integers(1, 99), st.integers(1, 9)), max_size=40
    ),
    prompts=st.integers(1, 50),
    tokens=st.integers(1, 100_000),
)  # fmt: skip
def test_a_prompt_gets_a_chunk_in_every_round(
    longest: int,
    stages: int,
    seen: list[tuple[float, int, int, int]],
    prompts: int,
    tokens: int,
) -> None:
    budget = PrefillBudget(StepCosts(), longest, stages)
    assert 1 <= budget.alone(prompts, tokens) <= longest
    for rounds, (seconds, steps, rows, lanes) in enumerate(seen * 2):
        sizes = [rows] * lanes
        budget.measure(seconds, steps, steps * 0.01, sizes)
        load = sizes, prompts, tokens, steps
        chunks = list(iter(lambda rounds=rounds, load=load: budget.take(float(rounds), *load), 0))
        assert 1 <= len(chunks) <= MANY
        assert all(1 <= chunk <= longest for chunk in chunks)


def test_lanes_are_parts_of_a_round() -> None:
    """A round's steps go with its first lane, also where prompts come after a while."""
    costs = StepCosts(rows=((1, 0.01),), tokens=((1, 0.001), (256, 0.001)))
    budget, load = PrefillBudget(costs, 256, 3), ([1, 1, 1], 1, 100_000, 0)
    thirds = [7 + step / 3 for step in range(9)]
    counts = [len(list(iter(lambda rounds=rounds: budget.take(rounds, *load), 0))) for rounds in thirds]
    assert counts == [MANY, 0, 0] * 3


COSTS = StepCosts(rows=((1, 0.01), (16, 0.02)), tokens=((1, 0.01), (64, 0.02), (256, 0.08)))


def test_what_rounds_take_corrects_the_table_a_little_each() -> None:
    budget = PrefillBudget(COSTS, 256, 2)
    assert budget.round_seconds([1, 1]) == pytest.approx(0.02)
    assert budget.round_seconds([2]) == pytest.approx(2 * COSTS.decode(2))
    assert budget.round_seconds([9, 2, 1]) == pytest.approx(sum(map(COSTS.decode, (9, 2, 1))))
    assert budget.round_seconds([9, 1]) == pytest.approx(2 * COSTS.decode(9)), (
        "the largest passes both stages"
    )
    budget.measure(0.04, 0, 0.0, [1, 1])
    assert budget.decode_factor == pytest.approx(1.1)
    budget.measure(1e9, 0, 0.0, [1, 1])
    assert budget.decode_factor == pytest.approx(1.1 + 0.1 * (10 - 1.1)), (
        "one slow moment is ten times at most"
    )
    for _ in range(99):
        budget.measure(0.0, 0, 0.0, [1, 1])
    assert budget.decode_factor == 0.1
    assert budget.chunk_factor == 1.0
    budget = PrefillBudget(COSTS, 256, 2)
    budget.measure(0.10, 2, 0.04, [1, 1])  # 0.08 s more instead of 0.04
    assert (budget.chunk_factor, budget.decode_factor) == (pytest.approx(1.1), 1.0)
    assert budget.cuts(1, 1) == [(1, 1, pytest.approx(0.011))]
    for _ in range(9):
        budget.measure(0.0, 2, 0.04, [1, 1])
    assert budget.chunk_factor == 1.0, "what idle stages hide is not counted on"


def test_a_round_has_its_steps_and_the_next_begins_where_it_ends() -> None:
    class Twice(PrefillBudget):
        def best(self, lanes: Sequence[int], prompts: int, tokens: int, waiting: int) -> tuple[int, int]:
            return 7, 2

    budget, load = Twice(COSTS, 256, 1), ([1], 1, 9, 0)

    def taken(rounds: float) -> list[int]:
        return [budget.take(rounds, *load) for _ in range(3)]

    assert taken(0.0) == [7, 7, 0]
    assert taken(0.9) == [0, 0, 0]
    assert taken(1 - 1e-7) == [7, 7, 0], "it is summed up from parts"
    assert taken(1.5) == [0, 0, 0]
    assert taken(2.9) == [7, 7, 0]
    assert taken(2.99) == [0, 0, 0], "it was late, and the next is not"
    assert taken(3.0) == [7, 7, 0]
    assert taken(9.5) == [7, 7, 0]
    assert taken(10.4) == [0, 0, 0], "nothing is made up for"
    assert taken(10.5) == [7, 7, 0]


def test_a_crowd_is_so_many_prompts_for_each_row_that_runs() -> None:
    budget = PrefillBudget(StepCosts(rows=((1, 0.01),), tokens=((1, 0.05), (256, 0.05))), 256, 1)

    def steps(rows: int, prompts: int, waiting: int) -> int:
        size, steps = budget.best([rows], prompts, 4096, waiting)
        assert size == 256
        return steps

    quiet = steps(1, 1, 0)
    changes = [next(n for n in range(99) if steps(rows, 1, n) > quiet) for rows in (1, 2, 3, 4, 5)]
    assert changes == [4, 7, 10, 14, 17], "ten thirds for each row"
    assert steps(1, 1, 30) == MANY
    assert steps(1, 9, 22) == steps(1, 30, 1) == MANY, "it is all one whether they have begun"


STAGED = StepCosts(tokens=((1, 0.01), (512, 0.522), (2048, 2.058)))
"""A token takes a millisecond, and a chunk ten more."""


def test_a_prompt_alone_has_chunks_as_short_as_is_nearly_the_best() -> None:
    whole, staged = PrefillBudget(STAGED, 2048, 1), PrefillBudget(STAGED, 2048, 4)
    for budget in (whole, staged):
        best = min(budget.alone_seconds(cut) for cut in budget.cuts(1, 50_000))
        taken = next(cut for cut in budget.cuts(1, 50_000) if cut.size == budget.alone(1, 50_000))
        assert best < budget.alone_seconds(taken) <= 1.05 * best
        assert all(
            budget.alone_seconds(cut) > 1.05 * best for cut in budget.cuts(1, 50_000) if cut.size < taken.size
        )
    assert 10_000 > 50_000 / staged.alone(1, 50_000) > 27, (
        "of four stages three are not at work at either end"
    )


def test_no_chunk_takes_a_second_by_what_was_timed() -> None:
    flat = StepCosts(tokens=((1, 0.4), (16, 0.4)))
    assert PrefillBudget(flat, 2048, 1).sizes[-1] == 32, "beyond the table each token takes as long as in it"
    slow = StepCosts(tokens=((1, 0.4), (64, 3.0)))
    assert PrefillBudget(slow, 2048, 1).sizes[-1] == 64
    assert PrefillBudget(STAGED, 2048, 1).sizes[-1] == 2048
    assert PrefillBudget(STAGED, 300, 1).sizes[-1] == 300


def test_on_stairs_chunks_have_lengths_that_were_timed() -> None:
    """Twelve tokens take as long as sixteen there, though they lie between eight and sixteen."""
    stairs = StepCosts(tokens=((1, 1.0), (4, 1.28), (8, 2.5), (16, 3.95), (32, 3.95)))
    assert PrefillBudget(stairs, 32, 1).sizes == [1, 4, 8, 16, 32]
    assert {96, 192} <= set(PrefillBudget(STAGED, 2048, 1).sizes), "above tiles are many"
    in_turn = StepCosts(tokens=((1, 1.0), (4, 4.0), (8, 8.0), (16, 16.0)))
    assert {6, 12} <= set(PrefillBudget(in_turn, 16, 1).sizes)


def test_a_prompt_that_comes_waits_for_few_chunks_and_its_answer_for_short_ones() -> None:
    """A short prompt beside one of 50,000 tokens that has two Macs to itself."""
    ring = SimulatedRing(2, MACS)
    ring.ask("long", 50_000, 2)
    ring.run(until=lambda: len(ring.chunks) > 8)
    longest = MACS.chunk(50_000, max(ring.chunks)) / 2
    ring.ask("short", 200, 16)
    ring.run(until=lambda: "short" in ring.ended)
    assert ring.first("short") <= 6 * longest
    assert max(ring.gaps("short")) <= 2 * longest


@pytest.mark.parametrize("stages", [2, 4])
def test_a_long_prompt_alone_uses_all_stages(stages: int) -> None:
    assert alone(1, MACS, [50_000]) >= 0.9 * stages * alone(stages, MACS, [50_000])
