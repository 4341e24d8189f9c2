"""The cost table, made from the times of stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.gateway.scheduler import MemberMemory, RingFacts, StepCosts, Timed
from sealring.gateway.scheduler.facts import MAX_TIMES


def test_the_slowest_stage_counts() -> None:
    fast = [Timed(1, 1, 0.001), Timed(16, 1, 0.004), Timed(1, 32, 0.02), Timed(1, 128, 0.02)]
    slow = [Timed(1, 1, 0.002), Timed(16, 1, 0.003), Timed(1, 32, 0.01), Timed(1, 128, 0.03)]
    costs = StepCosts.of([fast, slow])
    assert (costs.decode(1), costs.decode(16)) == (0.002, 0.004)
    assert (costs.chunk(1), costs.chunk(32), costs.chunk(128)) == (0.002, 0.02, 0.03)
    assert costs.decode(8.5) == pytest.approx(0.003)
    assert costs.decode(31) == pytest.approx(0.006), "on the line through the last two"


def test_a_slow_stage_that_timed_fewer_sizes_stays_slow() -> None:
    fast = [Timed(rows, 1, 0.001) for rows in (1, 2, 64)] + [Timed(1, tokens, 0.002) for tokens in (4, 2048)]
    slow = [Timed(1, 1, 0.1), Timed(2, 1, 0.2), Timed(1, 4, 0.4)]
    costs = StepCosts.of([fast, slow])
    assert [costs.decode(rows) for rows in (1, 2, 64)] == pytest.approx([0.1, 0.2, 6.4])
    assert costs.chunk(2048) == pytest.approx(204.8)
    assert StepCosts.of([fast, []]) == StepCosts.of([fast])


def test_behind_the_last_stair_rows_cost_what_they_did_in_the_mean() -> None:
    """And not what the row costs that begins it."""
    costs = StepCosts(rows=((1, 1.0), (16, 4.0), (32, 4.0), (33, 8.0)))
    assert costs.decode(32.5) == pytest.approx(6)
    assert 8 < costs.decode(64) <= 16


def test_long_caches_cost_what_they_add_to_a_row() -> None:
    short = [Timed(1, 1, 0.01), Timed(8, 1, 0.02), Timed(1, 64, 0.1)]
    costs = StepCosts.of([[*short, Timed(1, 1, 0.011, 1000), Timed(8, 1, 0.036, 1000)]])
    assert costs.decode(8) == pytest.approx(0.02)
    assert costs.decode(8, 1000) == pytest.approx(0.036)
    assert costs.decode(4, 500) == pytest.approx(costs.decode(4) + 0.004)
    faster = StepCosts.of([[*short, Timed(8, 1, 0.01, 1000)]])
    assert faster.decode(8, 1000) == faster.decode(8), "a slow moment"


@given(
    st.lists(
        st.builds(
            Timed, st.integers(0, 99), st.integers(0, 9999), st.floats(), st.sampled_from([0, 0, 9, -1])
        ),
        max_size=9,
    ),
    st.integers(1, 8192),
)
def test_whatever_is_reported_steps_cost_something_and_longer_caches_no_less(
    timed: list[Timed], size: int
) -> None:
    costs = StepCosts.of([timed])
    assert costs.chunk(size) > 0
    assert 0 < costs.decode(size) <= costs.decode(size, 99)


def test_a_step_of_more_rows_may_take_less() -> None:
    costs = StepCosts.of(
        [[Timed(rows, 1, took) for rows, took in ((1, 0.1), (8, 0.25), (16, 0.11))] + [Timed(1, 16, 0.11)]]
    )
    assert (costs.decode(8), costs.decode(16)) == (0.25, 0.11)


def test_a_member_that_tells_of_many_sizes_keeps_no_gateway_busy() -> None:
    costs = StepCosts.of([[Timed(1, size, 0.01) for size in range(1, 100_000)]])
    assert len(costs.tokens) == MAX_TIMES


def test_long_rows_have_the_lanes_of_rows_that_cost_what_they_hold() -> None:
    """A step of short ones takes the same for one as for four; of long ones it reads every cache."""
    flat = StepCosts(rows=((1, 0.1), (16, 0.1)), behind=1e-4)
    ring = RingFacts((MemberMemory(1, 0, 1),) * 3, 16, 64, costs=flat)
    assert len(ring.lanes(4)) < 4
    assert ring.lanes(4, 16_384) == (1, 1, 1, 1)
