"""What running rows feel of a prefill, in simulated time, and that prompts get on whatever steps cost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulatedring import BETWEEN, FAST, LINEAR, SLOW, Costs, WatchedRing

from bench.summaries import percentile
from sealring.gateway.scheduler.budget import (
    CAUTIOUS,
    CLEAN_EVERY,
    FIRST_ROUNDS,
    SAVED,
    SHARE,
    SPREAD,
    TRIED_EVERY,
    PrefillBudget,
)
from sealring.gateway.scheduler.chunkcost import GUESS, ChunkCost, LonePrefill

MACHINES = [
    (1, 4, LINEAR), (3, 4, LINEAR), (3, 6, BETWEEN), (1, 16, BETWEEN),
    (1, 4, SLOW), (2, 4, SLOW), (3, 4, SLOW), (3, 16, SLOW),
    (3, 64, FAST), (4, 64, FAST), (8, 64, FAST),
]  # fmt: skip
"""Stages, streams and costs where rounds bear a little prefill."""

PROMPTS = [[1025], [4096], [1300] * 4]


def machines_and_prompts() -> list[Any]:
    """Every machine beside every kind of prompts; on every run one kind for each."""
    return [
        pytest.param(*machine, prompts, marks=[pytest.mark.sweep] * ((number + kind) % len(PROMPTS) > 0))
        for number, machine in enumerate(MACHINES)
        for kind, prompts in enumerate(PROMPTS)
    ]


def beside(ring: WatchedRing, rows: int, prompts: list[int]) -> tuple[list[float], list[float], float]:
    """Gaps of so many streams without the prompts and beside them, and the seconds until all are through."""
    ring.stream(rows)
    begun = ring.now
    for number, prompt in enumerate(prompts):
        ring.ask(f"long{number}", prompt, 2)
    ring.run(until=lambda: all(f"long{number}" in ring.arrivals for number in range(len(prompts))))
    return ring.gaps(begun / 2, begun), ring.gaps(begun, ring.now), ring.now - begun


@pytest.mark.parametrize(("stages", "rows", "costs", "prompts"), machines_and_prompts())
def test_no_stream_is_stalled_by_long_prompts(
    stages: int, rows: int, costs: Costs, prompts: list[int]
) -> None:
    """Nineteen of twenty tokens within 1.5 of undisturbed, and 99 of 100 within twice."""
    ring = WatchedRing(stages, costs, rows_in_turn=costs is SLOW)
    quiet, busy, seconds = beside(ring, rows, prompts)
    assert percentile(busy, 0.95) <= 1.5 * percentile(quiet, 0.95)
    assert percentile(busy, 0.99) <= 2.0 * percentile(quiet, 0.99)
    alone = WatchedRing(stages, costs, rows_in_turn=costs is SLOW)
    for number, prompt in enumerate(prompts):
        alone.ask(f"long{number}", prompt, 2)
    alone.run()
    assert seconds <= 14 * alone.now


@pytest.mark.parametrize("prompt", [4096, 8192])
@pytest.mark.parametrize(("stages", "rows"), [(1, 64), (2, 64)])
def test_few_tokens_are_late_where_a_step_costs_as_much_as_a_round(
    stages: int, rows: int, prompt: int
) -> None:
    ring = WatchedRing(stages, FAST)
    ring.ask("first", 1000, 1)  # alone, which tells what steps cost
    ring.run()
    quiet, busy, seconds = beside(ring, rows, [prompt])
    assert percentile(busy, 0.95) <= 1.5 * percentile(quiet, 0.95)
    assert seconds <= 20 * prompt * FAST.token_us / 1e6 + 100 * percentile(quiet, 0.95)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, 2, 3))])
@pytest.mark.parametrize(("stages", "rows", "costs"), [(2, 4, SLOW), (3, 4, SLOW), (4, 16, BETWEEN)])
def test_noise_neither_stops_prefill_in_every_round_nor_lets_it_go_too_far(
    stages: int, rows: int, costs: Costs, seed: int
) -> None:
    noise = random.Random(seed)
    ring = WatchedRing(stages, costs, rows_in_turn=costs is SLOW)
    exact = ring._cost
    ring._cost = lambda step, tokens: exact(step, tokens) * noise.lognormvariate(0, 0.15)  # type: ignore[method-assign]
    quiet, busy, _ = beside(ring, rows, [2000])
    assert percentile(busy, 0.95) <= 1.5 * percentile(quiet, 0.95)
    assert percentile(busy, 0.99) <= 2.0 * percentile(quiet, 0.99)


def test_a_prompt_alone_is_not_held_up() -> None:
    ring = WatchedRing(2, LINEAR)
    ring.ask("long", 4096, 2)
    ring.run()
    assert len(ring.arrivals["long"]) == 2
    assert ring.now < 4096 * 0.015 / 2 * 1.1


@pytest.mark.parametrize(("stages", "prompt", "times"), [(2, 1041, 1.6), (3, 1041, 2.3), (3, 4112, 2.7)])
def test_a_prompt_alone_fills_the_pipeline(stages: int, prompt: int, times: float) -> None:
    """On so many stages it is through so many times as fast as on one, also before anything was measured."""
    seconds = []
    for each in (1, stages):
        ring = WatchedRing(each, SLOW)
        ring.ask("long", prompt, 2)
        ring.run()
        seconds.append(ring.first_tokens()[0])
    assert seconds[0] >= times * seconds[1]


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


@settings(max_examples=200, deadline=None)
@given(
    largest=st.sampled_from([1, 3, 8, 64, 256, 8192]),
    stages=st.integers(1, 5),
    lanes=st.integers(1, 9),
    seconds=st.lists(
        st.tuples(
            st.floats(-1.0, 100.0), st.integers(0, 3), st.integers(1, 8192), st.floats(SHARE, 20.0)
        ),
        min_size=1,
        max_size=80,
    ),
    todo=st.tuples(st.integers(1, 100_000), st.integers(1, 50)),
)  # fmt: skip
def test_prefill_goes_on_whatever_steps_take(
    largest: int,
    stages: int,
    lanes: int,
    seconds: list[tuple[float, int, int, float]],
    todo: tuple[int, int],
) -> None:
    budget = PrefillBudget(largest, stages)
    rounds = last = 0.0
    for duration, steps, tokens, share in seconds * 3:
        budget.measure(duration, steps, tokens if steps else 0)
        rounds += 1
        given_tokens = budget.tokens(rounds, share, todo)
        assert 0 <= given_tokens <= largest
        if given_tokens:
            budget.spend()
            last = rounds
        assert rounds - last <= SPREAD + FIRST_ROUNDS + 2


def measured(stages: int, round_seconds: float, rounds: int = 24) -> PrefillBudget:
    budget = PrefillBudget(256, stages)
    for _ in range(rounds):
        budget.measure(round_seconds, 0, 0)
    return budget


def test_nothing_goes_twice_on_one_allowance() -> None:
    budget = measured(1, 0.1)
    assert budget.tokens(10.0, SHARE, (1000, 1)) == 1
    budget.spend()
    assert budget.tokens(10.0, SHARE, (1000, 1)) == 0
    assert budget.tokens(9.5 + TRIED_EVERY, SHARE, (1000, 1)) == 0
    assert budget.tokens(10.0 + TRIED_EVERY, SHARE, (1000, 1)) == 1


def test_what_may_have_been_hidden_tells_nothing() -> None:
    """A step that makes a round longer by no more than a stage waits in it anyway."""
    budget = measured(4, 1.0)
    budget.measure(1.25, 1, 10)
    assert not budget.cost.known
    budget.measure(1.375, 1, 10)
    assert budget.cost.seconds(10) == pytest.approx((0.375 + 3 * 0.25) / 4)


def found_dear(budget: PrefillBudget, rounds: float = 10.0) -> float:
    """It is tried and seen that a token costs as much as a round; the round after that."""
    assert budget.tokens(rounds, SHARE, (10_000, 1)) == 1
    budget.spend()
    budget.measure(0.2, 1, 1)
    return rounds + TRIED_EVERY


def test_dear_steps_are_saved_up_for() -> None:
    budget = measured(1, 0.1)
    for size in (4, 8, 16, 32, 64, 128, 256):
        budget.cost.add(size, 0.1)
    begin = found_dear(budget)
    assert budget.tokens(begin, SHARE, (10_000, 1)) == 256
    steps = 0
    while budget.tokens(begin, SHARE, (10_000, 1)):
        budget.spend()
        steps += 1
    assert SAVED - 1 <= steps <= SAVED
    budget.measure(0.1, 0, 0)
    assert budget.tokens(begin + SPREAD - 1, SHARE, (10_000, 1)) == 0
    assert budget.tokens(begin + SPREAD, SHARE, (10_000, 1)) == 256


def test_a_larger_share_does_not_wait_for_what_is_saved_up() -> None:
    budget = measured(1, 0.1)
    for size in (4, 256):
        budget.cost.add(size, 0.1)
    begin = found_dear(budget)
    while budget.tokens(begin, SHARE, (10_000, 1)):
        budget.spend()
    budget.measure(0.1, 0, 0)
    assert budget.tokens(begin + 1, SHARE, (10_000, 1)) == 0
    assert budget.tokens(begin + 1, 3.0, (10_000, 1)) == 256


def test_a_share_that_is_not_enough_for_a_step_is_not_spent_on_tiny_ones() -> None:
    """A few more prompts than usual, where every step costs as much as a round: bursts, not single tokens."""
    budget = measured(1, 0.1)
    for size in (1, 4, 256):
        budget.cost.add(size, 0.1)
    begin = found_dear(budget)
    assert budget.tokens(begin, 1.5 * SHARE, (10_000, 1)) == 256


def test_cheap_tokens_go_in_every_round_and_become_as_many_as_fit() -> None:
    """A round of 0.1 s, a step of 5 ms and 2 ms a token: 19 tokens make it longer by 43 %."""
    budget = measured(1, 0.1)
    rounds, sizes = 10.0, []
    for _ in range(400):
        rounds += 1
        size = budget.tokens(rounds, SHARE, (100_000, 1))
        sizes.append(size)
        if size:
            budget.spend()
            budget.measure(0.105 + 0.002 * size, 1, size)
        else:
            budget.measure(0.1, 0, 0)
    late = [size for size in sizes if 0.005 + 0.002 * size > 0.5 * 0.1]
    assert len(late) <= len(sizes) // 25
    assert 15 <= sorted(sizes[200:])[100] <= 20
    assert sizes.count(0) >= 400 // (2 * CLEAN_EVERY)


def test_fewer_tokens_go_as_soon_as_they_are_too_many() -> None:
    budget = measured(1, 0.1)
    rounds, each = 10.0, 0.001
    for number in range(200):
        if number == 100:
            each = 0.0025
        rounds += 1
        size = budget.tokens(rounds, SHARE, (100_000, 1))
        if size:
            budget.spend()
            budget.measure(0.1 + each * size, 1, size)
        else:
            budget.measure(0.1, 0, 0)
        if number in (99, 150, 199):
            assert each * budget._even.tokens <= 0.1 * SHARE * 1.15
            assert each * budget._even.tokens >= 0.1 * SHARE * 0.5


@given(
    fixed=st.floats(0.001, 0.1), each=st.floats(0.00001, 0.05), tokens=st.integers(1, 100_000),
    rows=st.integers(1, 50), stages=st.integers(1, 6),
)  # fmt: skip
def test_steps_are_about_as_long_as_serves_best(
    fixed: float, each: float, tokens: int, rows: int, stages: int
) -> None:
    """No other length of steps is through much sooner, or brings first tokens much sooner in the mean."""
    budget = PrefillBudget(256, stages)
    for size in (1, 16, 64, 256):
        budget.cost.add(size, fixed + each * size)

    def seconds(size: int) -> float:
        size = min(size, tokens)
        steps, step = tokens / size, fixed + each * size
        return (steps + stages - 1) * step if rows == 1 else (steps / 2 + stages - 0.5) * step

    chosen = budget.alone(tokens, rows)
    assert 1 <= chosen <= 256
    best = min(seconds(size) for size in range(1, 257))
    if rows == 1:
        assert seconds(chosen) <= 1.6 * best
    elif chosen < 256:
        assert chosen >= tokens / rows  # whole prompts
        assert seconds(chosen) <= 1.6 * best or chosen <= tokens / rows + 1


def test_a_line_is_found_whatever_was_seen_first() -> None:
    cost = ChunkCost()
    assert cost.ratio == pytest.approx(GUESS)
    cost.add(32, 0.1)
    assert cost.ratio == pytest.approx(GUESS, rel=0.01)
    for size in (2, 3, 2, 3, 32, 64):
        cost.add(size, 0.01 + 0.002 * size)
    fixed, each = cost.line()
    assert fixed == pytest.approx(0.01, rel=0.3)
    assert each == pytest.approx(0.002, rel=0.3)
    assert cost.within(0.0131, 256) in (1, 2)
    assert cost.within(0.009, 256) == 0
    assert cost.within(0.1, 256) == pytest.approx(45, abs=8)


@given(
    st.lists(st.tuples(st.integers(1, 8192), st.floats(0.0001, 100.0)), max_size=40),
    st.floats(0.00001, 1000.0),
    st.integers(1, 8192),
)
def test_what_fits_is_believed_to_fit(seen: list[tuple[int, float]], seconds: float, most: int) -> None:
    cost = ChunkCost()
    for tokens, took in seen:
        cost.add(tokens, took)
    found = cost.within(seconds, most)
    assert 0 <= found <= most
    if found:
        assert cost.seconds(found) <= seconds * 1.001
    assert cost.ratio >= 0


def test_steps_on_an_idle_ring_tell_their_cost() -> None:
    """Three stages, 10 ms and 1 ms a token in each; the head says of silent steps that it has gone on."""
    cost = ChunkCost()
    lone = LonePrefill(cost, 3)
    for number in range(1, 5):
        lone.announced(number, 40)
    for number in range(1, 4):
        lone.done(number, False, 0.05 * number)
    lone.done(4, True, 0.05 * (4 + 2))
    assert cost.seconds(40) == pytest.approx(0.05)
    for number in (5, 6, 7):
        lone.announced(number, 10)
    for number in (5, 6, 7):
        lone.done(number, True, 1.0 + 0.02 * number)
    assert cost.seconds(10) == pytest.approx(0.02)


def test_nothing_is_told_of_steps_that_had_company() -> None:
    cost = ChunkCost()
    lone = LonePrefill(cost, 2)
    lone.announced(1, 40)
    lone.broken()
    lone.announced(3, 40)
    lone.done(1, True, 1.0)
    lone.done(3, True, 9.0)
    assert not cost.known
    lone.announced(4, 40)
    lone.done(4, True, 10.0)
    lone.announced(5, 40)  # the ring was idle in between
    lone.done(5, True, 20.0)
    assert not cost.known


def test_a_prompt_tells_its_cost_though_its_row_is_stepped_next() -> None:
    """The step after its last chunk is announced before that has come round; it comes behind."""
    cost = ChunkCost()
    lone = LonePrefill(cost, 2)
    for number in range(1, 5):
        lone.announced(number, 40)
    lone.broken()
    for number in range(1, 4):
        lone.done(number, False, 0.05 * number)
    lone.done(4, True, 0.05 * (4 + 1))
    assert cost.seconds(40) == pytest.approx(0.05)


def test_a_slow_moment_of_the_machine_is_not_held_against_prefill() -> None:
    """Everything takes twice as long for some seconds: streams are not stalled for it by bursts later on."""
    ring = WatchedRing(3, SLOW, rows_in_turn=True)
    exact = ring._cost
    ring._cost = lambda step, tokens: exact(step, tokens) * (2 if 20 < ring.now < 24 else 1)  # type: ignore[method-assign]
    quiet, busy, _ = beside(ring, 4, [3000])
    assert max(busy) <= 4 * percentile(quiet, 0.95)


def test_what_is_saved_up_is_more_than_one_step_that_was_cheaper_than_others_of_its_kind() -> None:
    """Steps of 512 tokens are believed to be too long, and those of 256 take a part of what may be spent."""
    budget = PrefillBudget(512, 2)
    for _ in range(64):
        budget.measure(0.018, 0, 0)
    for tokens, seconds in ((1, 0.008), (256, 0.02), (512, 0.4)):
        for _ in range(9):
            budget.cost.add(tokens, seconds)
    size, steps = budget._saved()
    assert size == 256
    assert steps * 0.02 >= 0.8 * SAVED * 0.018


def test_after_a_little_in_every_round_it_is_found_out_what_much_costs_now() -> None:
    """Tokens at the end of a long prompt cost several times what was measured at its beginning."""
    budget = PrefillBudget(256, 2, rows_in_turn=True)
    for _ in range(64):
        budget.measure(0.09, 0, 0)
    for tokens in (16, 64, 256):
        for _ in range(9):
            budget.cost.add(tokens, 0.005 + 0.002 * tokens)
    size, steps = budget._spent()
    usual = size * steps
    assert usual * 0.002 == pytest.approx(SAVED * 0.09, rel=0.2)
    budget._saving = 0.0
    spent = []
    for amiss in (1.0, 1.0, 6.0, 1.0):
        size, steps = budget._spent()
        spent.append(size * steps / usual)
        budget._amiss = amiss
    assert spent[0] <= 1.3 * CAUTIOUS
    assert spent[0] < spent[1] < spent[2]
    assert spent[3] <= 1.3 * CAUTIOUS


def test_what_rounds_take_is_told_by_the_last_ones() -> None:
    budget = measured(1, 1.0, rounds=100)
    for _ in range(32):
        budget.measure(1.2, 0, 0)
    assert budget._round == pytest.approx(1.1)
    slower = measured(1, 1.0, rounds=100)
    for _ in range(3):
        slower.measure(2.0, 0, 0)
    assert slower._round == 1.0
    slower.measure(2.0, 0, 0)
    assert slower._round == 1.5
    assert len(slower._own) == 8
