"""What running rows feel of a prefill, in simulated time, and that prompts get on whatever steps cost."""

from __future__ import annotations

import argparse
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate import SimulatedRing
from gateway.scheduler import Action, Deliver, Request
from gateway.scheduler.budget import _FIRST_ROUNDS, SHARE, SPREAD, PrefillBudget
from sealring.v1 import inference_pb2 as inference


class Streams(SimulatedRing):
    """Remembers when tokens came; a prompt is as long as the request's name says."""

    def __init__(self, stages: int, **costs: float) -> None:
        names = ("step_ms", "row_ms", "prefill_ms", "token_us", "change_ms")
        options = dict.fromkeys(names, 0.0) | {"link_ms": 0.5, **costs}
        super().__init__(stages, 128, 100, argparse.Namespace(**options))
        self.arrivals: dict[str, list[float]] = {}

    def prompt_tokens(self, request: Request) -> int:
        return int(request.id.split("-")[1])

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                for request, *_ in action.pieces:
                    self.arrivals.setdefault(request.id, []).append(self.now)
        super()._do(actions)

    def ask(self, name: str, tokens: int) -> None:
        self.submit(Request(name, "key", tokens, inference.Envelope()))

    def gaps(self, begin: float, end: float) -> list[float]:
        found: list[float] = []
        for name, times in self.arrivals.items():
            inside = [time for time in times if begin <= time <= end]
            found += [b - a for a, b in itertools.pairwise(inside) if name.startswith("stream")]
        return sorted(found)


LINEAR = {"row_ms": 20.0, "prefill_ms": 1.0, "token_us": 15_000.0}  # the CPU build
BOUND_BY_MEMORY = {"step_ms": 20.0, "prefill_ms": 20.0, "token_us": 80.0}  # a GPU
BETWEEN = {"step_ms": 5.0, "row_ms": 5.0, "prefill_ms": 5.0, "token_us": 2000.0}


@pytest.mark.parametrize("prompt", [1025, 4096])
@pytest.mark.parametrize(
    ("stages", "rows", "costs"),
    [
        (1, 4, LINEAR), (3, 4, LINEAR), (3, 4, BETWEEN),
        (1, 64, BOUND_BY_MEMORY), (2, 64, BOUND_BY_MEMORY), (4, 64, BOUND_BY_MEMORY),
    ],
)  # fmt: skip
def test_streams_are_little_later_beside_a_long_prompt(
    stages: int, rows: int, costs: dict[str, float], prompt: int
) -> None:
    ring = Streams(stages, **costs)
    for number in range(rows):
        ring.ask(f"stream{number}-16", 100_000)
    ring.run(until=lambda: len(ring.arrivals.get("stream0-16", ())) > 100)
    quiet_from, begun = ring.now / 2, ring.now
    ring.ask(f"long-{prompt}", 2)
    ring.run(until=lambda: f"long-{prompt}" in ring.arrivals)
    quiet, busy = ring.gaps(quiet_from, begun), ring.gaps(begun, ring.now)
    p95 = [gaps[len(gaps) * 95 // 100] for gaps in (quiet, busy)]
    assert p95[1] <= 1.5 * p95[0]
    assert sum(busy) / len(busy) <= (1 + 1.5 * SHARE) * sum(quiet) / len(quiet)
    alone = prompt * costs["token_us"] / 1e6
    assert ring.now - begun <= 20 * alone + 100 * p95[0]


def test_a_prompt_alone_is_not_held_up() -> None:
    ring = Streams(2, **LINEAR)
    ring.ask("long-4096", 2)
    ring.run()
    assert len(ring.arrivals["long-4096"]) == 2
    assert ring.now < 4096 * 0.015 / 2 * 1.2


def test_a_crowd_is_not_held_up_by_one_stream() -> None:
    """Sixteen prompts beside one row take little longer than without it."""
    times = []
    for streams in (0, 1):
        ring = Streams(1, **LINEAR)
        if streams:
            ring.ask("stream0-16", 100_000)
            ring.run(until=lambda ring=ring: len(ring.arrivals.get("stream0-16", ())) > 20)
        begun = ring.now
        for number in range(16):
            ring.ask(f"prompt{number}-30", 1)
        ring.run(until=lambda ring=ring: sum(name.startswith("prompt") for name in ring.arrivals) == 16)
        times.append(ring.now - begun)
    assert times[1] < 2.5 * times[0]


@settings(max_examples=200, deadline=None)
@given(
    largest=st.sampled_from([1, 3, 8, 64, 256, 8192]),
    seconds=st.lists(
        st.tuples(
            st.floats(-1.0, 100.0), st.integers(0, 3), st.integers(1, 8192), st.floats(0.0, 20.0)
        ),
        min_size=1,
        max_size=80,
    ),
)  # fmt: skip
def test_prefill_goes_on_whatever_steps_take(
    largest: int, seconds: list[tuple[float, int, int, float]]
) -> None:
    budget = PrefillBudget(largest)
    rounds = last = 0.0
    for duration, steps, tokens, crowd in seconds * 3:
        budget.measure(duration, steps, tokens if steps else 0)
        rounds += 1
        given_tokens = budget.tokens(rounds, crowd)
        assert 0 <= given_tokens <= largest
        if given_tokens:
            budget.spend(given_tokens)
            last = rounds
        assert rounds - last <= SPREAD + _FIRST_ROUNDS + 1


def test_nothing_goes_twice_on_one_allowance() -> None:
    budget = PrefillBudget(256)
    for _ in range(5):
        budget.measure(0.1, 0, 0)
    assert budget.tokens(10.0, 0.0) == 4
    budget.spend(4)
    assert budget.tokens(10.0, 0.0) == 0
    assert budget.tokens(10.5, 0.0) == 0
    assert budget.tokens(11.0, 0.0) == 4


def test_dear_chunks_are_saved_up_for() -> None:
    budget = PrefillBudget(256)
    for _ in range(5):
        budget.measure(0.1, 0, 0)
    for size in (4, 8, 16, 32, 64, 128, 256):
        budget.measure(0.2, 1, size)
    size = budget.tokens(10.0, 0.0)
    assert size == 256
    steps = 0
    while budget.tokens(10.0, 0.0):
        budget.spend(256)
        steps += 1
    assert steps == int(SHARE * SPREAD)
    assert budget.tokens(10.0 + SPREAD - 1, 0.0) == 0
    assert budget.tokens(10.0 + SPREAD, 0.0) == 256
