"""What copying caches may cost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sealring.gateway.scheduler.changes import LONGEST, SHORTEST, ChangeCost


def test_dear_changes_wait_longer_and_cheap_ones_do_not() -> None:
    cost = ChangeCost()
    assert cost.interval(1) == SHORTEST
    for _ in range(20):
        cost.measure(0.1, 0)
        cost.measure(0.3, 2)
    assert cost.interval(1) == math.ceil(0.1 / (0.1 * 0.1) - 1e-6)
    assert cost.interval(10) == LONGEST
    for _ in range(20):
        cost.measure(0.101, 1)
    assert cost.interval(1) == SHORTEST


@given(st.lists(st.tuples(st.floats(-1, 100), st.integers(0, 5))), st.integers(1, 512))
def test_changes_never_wait_for_ever(rounds: list[tuple[float, int]], lanes: int) -> None:
    cost = ChangeCost()
    for seconds, changes in rounds:
        cost.measure(seconds, changes)
    assert SHORTEST <= cost.interval(lanes) <= LONGEST
