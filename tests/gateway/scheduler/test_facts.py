"""The cost table, made from the times of stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.gateway.scheduler.facts import MAX_TIMES, StepCosts


def test_the_slowest_stage_counts_and_slow_moments_do_not() -> None:
    fast = [(1, 1, 0.001), (16, 1, 0.004), (1, 32, 0.09), (1, 128, 0.02)]
    slow = [(1, 1, 0.002), (16, 1, 0.003), (1, 32, 0.01), (1, 128, 0.03)]
    costs = StepCosts.of([fast, slow])
    assert (costs.decode(1), costs.decode(16)) == (0.002, 0.004)
    assert (costs.chunk(1), costs.chunk(32), costs.chunk(128)) == (0.002, 0.03, 0.03)
    assert costs.decode(8.5) == pytest.approx(0.003)
    assert costs.decode(31) == pytest.approx(0.006), "on the line through the last two"


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9999), st.floats()), max_size=9),
    st.integers(1, 8192),
)
def test_whatever_is_reported_steps_cost_something_and_larger_ones_no_less(
    timed: list[tuple[int, int, float]], size: int
) -> None:
    costs = StepCosts.of([timed])
    for cost in (costs.decode, costs.chunk):
        assert 0 < cost(size) <= cost(size + 1)


def test_a_member_that_tells_of_many_sizes_keeps_no_gateway_busy() -> None:
    costs = StepCosts.of([[(1, size, 0.01) for size in range(1, 100_000)]])
    assert len(costs.tokens) == MAX_TIMES
