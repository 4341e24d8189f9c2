"""Rows that are moved between lanes, on modelled stages that take time for every row."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulatedring import Costs, SimulatedRing

from sealring.gateway.scheduler import MemberMemory, Request, RingFacts
from sealring.gateway.scheduler.balance import LEAST_LEFT, PATIENCE, Balance
from sealring.gateway.scheduler.changes import LONGEST, SHORTEST, UNKNOWN, ChangeCost
from sealring.gateway.scheduler.lane import Lane
from sealring.gateway.scheduler.memory import Ledger
from sealring.gateway.scheduler.row import Phase, Row
from sealring.v1 import inference_pb2 as inference


def ring_with(lengths: list[int], stages: int, **values: float) -> SimulatedRing:
    ring = SimulatedRing(stages, len(lengths), len(lengths), Costs(step_ms=20.0, token_us=500.0, **values))
    for number, length in enumerate(lengths):
        ring.submit(Request(f"r{number}", "k", length, inference.Envelope()))
    return ring


def lanes(ring: SimulatedRing) -> list[int]:
    ledger = ring.planner.ledger
    return [ledger.lane_rows(lane) for lane in range(ledger.regular)]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_lanes_that_drifted_apart_are_even_again(stages: int) -> None:
    """Rows of all lanes but the first end early."""
    lengths = [600 if number % stages == 0 else 30 for number in range(4 * stages)]
    ring = ring_with(lengths, stages, row_ms=10.0)
    ring.run(lambda: ring.finished == 4 * stages - 4)
    assert max(lanes(ring)) == 4
    steps = ring.steps
    ring.run(lambda: ring.steps > steps + stages * (3 * PATIENCE + 16))
    assert max(lanes(ring)) - min(lanes(ring)) <= 1
    assert 0 < ring.moved <= 4
    ring.run()
    assert ring.finished == 4 * stages


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([3, 40, 90, 200, 400]), min_size=1, max_size=20),
    st.integers(1, 5),
    st.sampled_from([0.0, 1.0, 20.0]),
    st.sampled_from([0.0, 10.0, 500.0]),
)
def test_moves_come_to_an_end(lengths: list[int], stages: int, row_ms: float, change_ms: float) -> None:
    """There are no more of them than rows that came and went, and everybody is served."""
    ring = ring_with(lengths, stages, row_ms=row_ms, change_ms=change_ms)
    ring.run()
    assert ring.finished == len(lengths)
    assert ring.sampled == sum(lengths)
    assert ring.moved <= 2 * len(lengths)
    assert stages > 1 or not ring.moved


def test_even_lanes_and_rows_near_their_limit_are_left_alone() -> None:
    even = ring_with([300] * 8, 4, row_ms=10.0)
    even.run()
    assert even.moved == 0
    short = ring_with([PATIENCE + LEAST_LEFT if number % 2 else 4 for number in range(8)], 2, row_ms=10.0)
    short.run()
    assert short.moved == 0


def test_moves_gain_where_rows_cost_time_and_copies_do_not_cost_more() -> None:
    def rate(moves: bool, row_ms: float, change_ms: float) -> float:
        """Two of four lanes are left without rows by answers that end early, and nobody comes."""
        lengths = [512 if number % 4 < 2 else 64 for number in range(32)]
        ring = ring_with(lengths, 4, row_ms=row_ms, change_ms=change_ms)
        if not moves:
            ring.planner._balance.moving = lambda *_: []  # type: ignore[method-assign]
        ring.run()
        return ring.sampled / ring.now

    assert rate(True, 10.0, 20.0) > 1.3 * rate(False, 10.0, 20.0)
    for row_ms, change_ms in ((0.0, 20.0), (2.0, 500.0), (10.0, 2000.0), (1.0, 1000.0)):
        # one move at most is made before it is known what a copy costs
        assert rate(True, row_ms, change_ms) > 0.88 * rate(False, row_ms, change_ms)


def test_what_rows_cost_is_seen_in_the_rounds() -> None:
    cost = ChangeCost()
    assert cost.saved(4, 2) == 0 == cost.seconds
    cost.measure(0.4, 0, 4)
    assert cost.seconds == UNKNOWN * 0.4
    assert cost.saved(4, 2) == pytest.approx(0.05)  # a guess
    for _ in range(4):
        assert cost.saved(4, 3) == pytest.approx(0.4 / 16, abs=0.01)
        cost.measure(0.3, 0, 2)
    assert cost.saved(4, 3) == pytest.approx(0.05)
    cost.measure(0.9, 2)
    assert cost.seconds == pytest.approx((0.9 - 0.3) / 2)


class Uneven:
    """Two lanes with so many rows each, and what copies of 0.4 s a round's rows cost."""

    def __init__(self, *sizes: int, limit: int = 1000, copy: float = 0.01) -> None:
        self.ledger = Ledger(RingFacts((MemberMemory(1, 0, 1 << 40),) * 2, 64, 256))
        self.lanes = [Lane(number) for number in range(2)]
        for lane, size in zip(self.lanes, sizes, strict=True):
            lane.change([], [self.row(lane, limit) for _ in range(size)])
        cost = ChangeCost()
        cost.measure(0.4, 0, max(sizes))
        cost.measure(0.4 + copy, 1)
        self.balance = Balance(self.ledger, cost)

    def row(self, lane: Lane, limit: int) -> Row:
        number = self.ledger.rows + 1
        row = Row(number, Request(f"r{number}", "k", limit, inference.Envelope()), phase=Phase.DECODING)
        row.limit = row.ceiling = limit
        self.ledger.reserve(number, lane.number, 10 + limit)
        return row

    def moving(self, lane: int = 0, leaving: int = 0, steps: int = 0) -> list[int]:
        """The rows that had better leave a lane, asked again after so many steps of it."""
        asked = self.lanes[lane]
        found = self.balance.moving(asked, leaving, 2)
        for _ in range(steps):
            assert not found
            asked.count_step()
            found = self.balance.moving(asked, leaving, 2)
        return [row.number for row in found]


def test_half_of_the_difference_is_moved_after_a_while() -> None:
    lanes = Uneven(6, 2)
    assert lanes.moving(steps=PATIENCE - 1) == []
    assert lanes.moving(lane=1, steps=2 * PATIENCE) == []
    assert lanes.moving(steps=1) == [1, 2]
    assert Uneven(7, 2).moving(steps=PATIENCE) == [1, 2]
    assert Uneven(6, 2).moving(leaving=2, steps=PATIENCE) == [1]
    assert Uneven(2, 0).moving(steps=PATIENCE) == [1]
    assert Uneven(9, 6).moving(steps=PATIENCE) == [1]
    assert Uneven(8, 6).moving(steps=PATIENCE) == [1]


@pytest.mark.parametrize(("sizes", "leaving"), [((3, 2), 0), ((9, 7), 0), ((6, 2), 3), ((2, 2), 0)])
def test_small_differences_are_left_alone(sizes: tuple[int, int], leaving: int) -> None:
    assert Uneven(*sizes).moving(leaving=leaving, steps=2 * PATIENCE) == []


def test_lanes_that_were_even_in_between_are_given_time_anew() -> None:
    lanes = Uneven(6, 2)
    lanes.moving(steps=PATIENCE - 1)
    assert lanes.moving(leaving=4) == []
    assert lanes.moving(steps=PATIENCE - 1) == []
    assert lanes.moving(steps=1) == [1, 2]


def test_a_lane_that_has_just_changed_is_left_alone() -> None:
    lanes = Uneven(6, 2)
    lanes.moving(steps=PATIENCE - 1)
    lanes.lanes[0].change([], [lanes.row(lanes.lanes[0], 1000)])
    assert lanes.moving(steps=SHORTEST - 1) == []
    assert lanes.moving(steps=1) == [9, 1]


def test_rows_that_were_moved_arrive_before_others_are() -> None:
    lanes = Uneven(9, 1)
    rows = [lanes.lanes[0].rows[number] for number in lanes.moving(steps=PATIENCE)]
    assert len(rows) == 4
    rows[1].phase = Phase.PREFILLED
    assert lanes.moving(steps=2 * PATIENCE) == []
    rows[1].phase = Phase.READY
    assert len(lanes.moving()) == 4
    assert lanes.moving(steps=PATIENCE - 1) == []


@pytest.mark.parametrize(("limit", "rounds"), [(100, 100 - 1 - LONGEST), (1000, 256)])
def test_a_copy_has_to_pay_before_the_rows_end(limit: int, rounds: int) -> None:
    """A round gets shorter by a third of the quarter of it that rows are taken for; two lanes are copied."""
    gained = rounds * 0.4 / 4 / 3
    assert Uneven(6, 2, limit=limit, copy=gained / 1.99).moving(steps=LONGEST) == []
    assert Uneven(6, 2, limit=limit, copy=gained / 2.01).moving(steps=LONGEST) == [1, 2]
