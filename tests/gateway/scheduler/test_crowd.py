"""Crowds of short prompts: who waits for whom, and that nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulatedring import FAST, SLOW, Costs, WatchedRing

from sealring.gateway.scheduler.budget import SHARE
from sealring.gateway.scheduler.crowd import (
    CROWD,
    IMPATIENCE,
    MOST,
    PATIENCE,
    RUSH_SECONDS,
    RUSH_SHARE,
    Crowd,
)


@pytest.mark.parametrize(("stages", "count"), [(1, 16), (2, 16), (3, 24)])
def test_a_crowd_on_an_idle_ring_has_its_first_tokens_early(stages: int, count: int) -> None:
    """The last first token comes little later than prefill alone would take, and the mean in about half."""
    ring = WatchedRing(stages, SLOW)
    for number in range(count):
        ring.ask(f"r{number}", 28, 16)
    ring.run()
    prefill = count * (21 + 28 * 13.5) / 1e3 / stages
    waits = ring.first_tokens()
    assert len(waits) == count
    assert waits[-1] <= 2.2 * prefill + RUSH_SECONDS / 3
    assert sum(waits) / count <= 1.3 * prefill


def test_rows_of_a_rush_wait_for_the_others_and_no_longer_than_it_lasts() -> None:
    ring = WatchedRing(3, SLOW)
    for number in range(64):
        ring.ask(f"r{number}", 60, 8)
    ring.run()
    round_seconds = 64 * 22 / 1e3 / 3
    for name in ring.arrivals:
        assert ring.gaps(0.0, ring.now, name)[-1] <= RUSH_SECONDS + (1 + MOST) * round_seconds * 2


def test_a_long_prompt_that_ends_with_a_rush_is_not_ahead_of_rows_that_were_held() -> None:
    ring = WatchedRing(2, SLOW)
    for name, prompt in (("long", 1300), ("r0", 20), ("r1", 20)):
        ring.ask(name, prompt, 4)
    ring.run()
    assert max(ring.arrivals["r0"][1], ring.arrivals["r1"][1]) < ring.arrivals["long"][1]


def test_one_short_prompt_does_not_wait_long_beside_streams() -> None:
    ring = WatchedRing(3, SLOW)
    ring.stream(4)
    ring.ask("short", 200, 2)
    ring.run(until=lambda: "short" in ring.arrivals)
    alone = (21 + 200 * 13.5) / 1e3
    assert ring.now - ring.asked["short"] <= IMPATIENCE + 1.5 * alone


@pytest.mark.parametrize(("stages", "rows", "costs"), [(3, 8, SLOW), (2, 32, FAST)])
def test_streams_go_on_beside_a_crowd(stages: int, rows: int, costs: Costs) -> None:
    """Less than a rush's worth of prompts for every row: rounds stay within what short prompts may take."""
    ring = WatchedRing(stages, costs)
    ring.stream(rows)
    begun = ring.now
    usual = ring.gaps(begun / 2, begun)[-1]
    for number in range(rows // 2):
        ring.ask(f"r{number}", 28, 2)
    ring.run(until=lambda: len(ring.arrivals) == rows + rows // 2)
    late = ring.gaps(begun, ring.now)
    assert late[len(late) // 2] <= (1 + MOST) * 1.5 * usual
    assert late[-1] <= 4 * (1 + MOST) * usual


def test_a_long_prompt_gets_on_while_short_ones_keep_coming() -> None:
    """It has every other step, so a stream of short prompts does not hold it up for ever."""
    ring = WatchedRing(2, FAST, rows=8)
    ring.ask("long", 4096, 2)
    for number in range(300):
        ring.ask(f"r{number}", 200, 4)
    ring.run(until=lambda: "long" in ring.arrivals)
    assert sum(name.startswith("r") for name in ring.ends) <= 150


waits = st.lists(
    st.tuples(st.floats(0, 5), st.booleans(), st.floats(0, 100), st.integers(1, 50)), max_size=40
)


@given(waits)
def test_shares_are_bounded_and_a_rush_ends(events: list[tuple[float, bool, float, int]]) -> None:
    crowd, now = Crowd(), 0.0
    since: float | None = None
    for seconds, short, waiting, running in events:
        now += seconds
        crowd.tick(now, short)
        since = (now if since is None else since) if short else None
        share = crowd.share(waiting, running, short)
        rushing = crowd.rush(waiting, running) and short
        assert SHARE <= share <= max(MOST, RUSH_SHARE * rushing)
        if since is not None and now - since >= RUSH_SECONDS:
            assert share <= MOST
            assert now - since < IMPATIENCE or share == MOST
        if waiting >= CROWD * running:
            assert share >= MOST


def test_a_few_prompts_are_no_crowd() -> None:
    crowd = Crowd()
    crowd.tick(10.0, False)
    assert crowd.share(0.0, 4, False) == SHARE
    crowd.tick(10.0, True)
    assert crowd.share(0.0, 4, True) == SHARE
    crowd.tick(10.0 + PATIENCE, True)
    assert crowd.share(0.0, 4, True) == SHARE
    crowd.tick(10.0 + IMPATIENCE, True)
    assert crowd.share(0.0, 4, True) == MOST
    crowd.tick(20.0, False)
    assert crowd.share(0.0, 4, True) == SHARE


@settings(max_examples=25, deadline=None)
@given(
    stages=st.integers(1, 3),
    costs=st.sampled_from([SLOW, FAST]),
    arrivals=st.lists(
        st.tuples(st.floats(0, 1.0), st.sampled_from([1, 30, 200, 257, 900]), st.integers(1, 12)),
        min_size=1,
        max_size=25,
    ),
)
def test_everybody_is_served_whatever_comes(
    stages: int, costs: Costs, arrivals: list[tuple[float, int, int]]
) -> None:
    """And no row, once it has begun, waits longer for a token than a rush and the rounds after it allow."""
    ring = WatchedRing(stages, costs, rows=8)
    for number, (later, prompt, answer) in enumerate(arrivals):
        at = ring.now + later
        ring.run(until=lambda at=at: not ring._events or ring._events[0][0] > at)
        ring.now = max(ring.now, at)
        ring.ask(f"r{number}", prompt, answer)
    ring.run()
    assert len(ring.ends) == len(arrivals)
    assert all(len(ring.arrivals[f"r{number}"]) == each[2] for number, each in enumerate(arrivals))
    longest = (costs.token_us * 256 / 1e6 + costs.prefill_ms / 1e3) * 8
    for name, times in ring.arrivals.items():
        if len(times) > 1:
            assert ring.gaps(0.0, ring.now, name)[-1] <= RUSH_SECONDS + longest


@pytest.mark.parametrize("count", [2, 4, 16])
def test_the_first_of_many_does_not_decode_while_others_are_still_read(count: int) -> None:
    """The others are opened a moment after it; steps of one row would be between all of their chunks."""
    ring, alone = WatchedRing(2, FAST), WatchedRing(2, FAST)
    for number in range(count):
        ring.ask(f"r{number}", 100, 50)
    alone.ask("r0", 100, 50)
    ring.run()
    alone.run()
    step = (FAST.prefill_ms + 100 * FAST.token_us / 1e3) / 2e3
    assert ring.first_tokens()[-1] <= alone.first_tokens()[0] + count * step + 0.01
