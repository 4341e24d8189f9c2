"""A ring's time among its requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.edge.inference.timings import Timings
from sealring.gateway.rings.shares import RingShares
from sealring.testing import ManualClock


def test_requests_share_what_they_are_computed_in() -> None:
    clock = ManualClock(100.0)
    shares, first, second = RingShares(clock), Timings(), Timings()
    clock.now += 5  # idle
    shares.begin("first", first)
    clock.now += 4
    shares.begin("second", second)
    shares.begin("second", second)
    clock.now += 6
    shares.end("second")
    shares.end("second")
    clock.now += 1
    shares.end("first")
    clock.now += 50
    assert (first.ring, second.ring) == (8.0, 3.0)
    shares.begin("first", first)  # in the next epoch
    clock.now += 2
    shares.end_all()
    clock.now += 2
    assert first.ring == 10.0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 9)), max_size=40))
def test_all_shares_together_are_the_time_in_which_it_computed(events: list[tuple[int, bool, int]]) -> None:
    clock = ManualClock(0.0)
    shares, timings = RingShares(clock), [Timings() for _ in range(4)]
    running: set[int] = set()
    computed = 0.0
    for number, begins, seconds in events:
        if begins:
            shares.begin(str(number), timings[number])
            running.add(number)
        else:
            shares.end(str(number))
            running.discard(number)
        clock.now += seconds
        computed += seconds * bool(running)
    shares.end_all()
    assert sum(one.ring for one in timings) == pytest.approx(computed)
