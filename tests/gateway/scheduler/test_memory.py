"""Reservations against a model that adds everything up anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requestkit import request_of
from ringfacts import member_with, ring_of

from sealring.gateway.scheduler import Ledger, RingFacts, Row, StepCosts, rounded
from sealring.gateway.scheduler.memory import BLOCK, Kept
from sealring.mesh.ring import round_seconds
from sealring.v1 import control_pb2 as control

members = st.lists(
    st.builds(member_with, st.integers(0, 1_000_000), token=st.integers(0, 50), row=st.integers(0, 5000)),
    min_size=1,
    max_size=4,
)
operations = st.lists(
    st.tuples(st.sampled_from(["reserve", "reserve", "release", "grow"]), st.integers(1, 5000)),
    max_size=40,
)


def padded_bytes(ring: RingFacts, held: dict[int, tuple[int, int]]) -> list[int]:
    """A lane's rows are all as long as its longest."""
    lanes: dict[int, list[int]] = {}
    for lane, tokens in held.values():
        lanes.setdefault(lane, []).append(rounded(tokens))
    tokens = sum(len(sizes) * max(sizes) for sizes in lanes.values())
    return [each.kv_bytes_per_token * tokens + each.kv_bytes_per_row * len(held) for each in ring.members]


def member_bytes(ledger: Ledger) -> list[int]:
    """Reserved bytes per member, in the order of ranks."""
    return [
        member.kv_bytes_per_token * ledger.tokens + member.kv_bytes_per_row * ledger.rows
        for member in ledger.members
    ]


@given(members, operations)
def test_the_ledger_never_promises_what_is_not_there(
    figures: list[control.Attached], work: list[tuple[str, int]]
) -> None:
    ring = ring_of(*figures, rows=100)
    ledger = Ledger(ring)
    held: dict[int, tuple[int, int]] = {}
    for row, (operation, tokens) in enumerate(work):
        oldest = next(iter(held), None)
        if operation == "reserve":
            lane = ledger.choose_lane(tokens)
            if lane is None:
                assert held or tokens > ledger.capacity
            else:
                ledger.reserve(row, lane, tokens)
                held[row] = (lane, tokens)
        elif oldest is None:
            continue
        elif operation == "release":
            ledger.release(oldest)
            del held[oldest]
        elif ledger.grow(oldest, held[oldest][1] + tokens):
            held[oldest] = (held[oldest][0], held[oldest][1] + tokens)
        expected = padded_bytes(ring, held)
        assert member_bytes(ledger) == expected
        assert all(used <= each.kv_budget for used, each in zip(expected, figures, strict=True))
        assert ledger.rows == len(held)
    for row in held:
        ledger.release(row)
    assert member_bytes(ledger) == [0] * len(figures)


@given(members)
def test_what_fits_alone_is_what_capacity_says(figures: list[control.Attached]) -> None:
    ledger = Ledger(ring_of(*figures, rows=100))
    capacity = ledger.capacity
    assert capacity % BLOCK == 0
    assert capacity == 0 or ledger.choose_lane(capacity) is not None
    assert capacity >= 1 << 40 or ledger.choose_lane(capacity + 1) is None


def test_rows_go_to_the_emptiest_lane_where_they_fit() -> None:
    ledger = Ledger(ring_of(*[member_with(16 * BLOCK)] * 2, rows=100))
    for row in range(5):
        lane = ledger.choose_lane(BLOCK)
        assert lane == row % 2
        ledger.reserve(row, lane, BLOCK)
    assert ledger.choose_lane(4 * BLOCK) == 1
    ledger.reserve(9, 1, 4 * BLOCK)
    assert ledger.choose_lane(2 * BLOCK) is None
    assert ledger.choose_lane(BLOCK) == 0


def test_a_single_lane_has_another_beside_it_for_rows_that_would_make_its_own_too_long() -> None:
    ledger = Ledger(ring_of(member_with(16 * BLOCK), rows=100))
    for row in range(5):
        assert ledger.choose_lane(BLOCK) == 0
        ledger.reserve(row, 0, BLOCK)
    assert ledger.choose_lane(4 * BLOCK) == 1
    assert ledger.choose_lane(2 * BLOCK) == 0


STAIRS = StepCosts(
    rows=((1, 1.0), (2, 1.0), (4, 1.28), (6, 2.04), (8, 2.5), (9, 3.14), (10, 3.95), (32, 3.95), (33, 7.8))
)


def ledger_of(costs: StepCosts, stages: int, room: int = 1 << 20) -> Ledger:
    return Ledger(ring_of(*[member_with(room * BLOCK)] * stages, rows=100, costs=costs))


def seconds_of(facts: RingFacts, lanes: Sequence[int]) -> float:
    return round_seconds(lanes, facts.costs.decode, facts.stages, facts.hop)


def rows_in(places: dict[int, int]) -> list[int]:
    """Rows of each lane, most first."""
    return sorted(Counter(places.values()).values(), reverse=True)


def come(ledger: Ledger, rows: Sequence[int]) -> dict[int, int]:
    places = {}
    for place, row in enumerate(rows):
        lane = ledger.choose_lane(BLOCK, len(rows) - place)
        assert lane is not None
        ledger.reserve(row, lane, BLOCK)
        places[row] = lane
    return places


@pytest.mark.parametrize(("rows", "lanes"), [(4, [2, 2]), (12, [4, 4, 4]), (20, [8, 8, 4])])
def test_rows_that_come_make_the_lanes_that_the_table_wants(rows: int, lanes: list[int]) -> None:
    places = come(ledger_of(STAIRS, 2), range(rows))
    assert rows_in(places) == lanes
    assert set(places.values()) == set(range(len(lanes)))


@given(st.integers(1, 3), st.lists(st.integers(0, 199), min_size=200, max_size=200))
def test_lanes_come_back_to_what_the_table_wants_as_rows_come_and_go(stages: int, leave: list[int]) -> None:
    """With as many rows as before, once every row has been replaced some times."""
    ledger = ledger_of(STAIRS, stages)
    places = come(ledger, range(16))
    for number, choice in enumerate(leave, start=16):
        row = sorted(places)[choice % 2]  # one of the two that came first
        ledger.release(row)
        del places[row]
        places |= come(ledger, [number])
    facts = ring_of(*[member_with(1)] * stages, rows=100, costs=STAIRS)
    assert seconds_of(facts, rows_in(places)) <= 1.1 * seconds_of(facts, facts.lanes(16))


def test_a_lane_that_is_empty_ends_and_its_number_is_used_again() -> None:
    ledger = ledger_of(STAIRS, 2)
    come(ledger, range(2))
    assert [ledger.release(0)[0], ledger.release(1)[0]] == [0, 1]
    assert ledger.choose_lane(BLOCK) == 0


@pytest.mark.parametrize("stages", [1, 2])
def test_memory_makes_no_more_lanes_than_two_or_than_wanted(stages: int) -> None:
    ledger = ledger_of(StepCosts(), stages, room=40)
    come(ledger, range(16))
    ledger.reserve(99, ledger.choose_lane(8 * BLOCK) or 0, 8 * BLOCK)
    lanes = {ledger.lane_of(row) for row in (*range(16), 99)}
    assert lanes <= {0, 1}


def test_no_more_rows_are_reserved_for_than_a_ring_takes_and_all_of_a_request_or_none() -> None:
    ledger = Ledger(ring_of(rows=3))
    one, two, three, four = (Row(number, request_of("r", 1, "k")) for number in range(4))
    assert ledger.reserve_all([one, two], BLOCK)
    assert not ledger.reserve_all([three, four], BLOCK)
    assert [row in ledger for row in range(4)] == [True, True, False, False]
    assert ledger.reserve_all([four], BLOCK)


def test_a_prefix_costs_its_tokens_and_windows_and_states_in_marks_or_as_a_row() -> None:
    ledger = Ledger(ring_of(member_with(1000, token=2, row=10), member_with(1000), rows=100))
    assert ledger.kept_bytes(Kept(2, 192)) == [404, 192]
    assert ledger.kept_bytes(Kept(1, 64)) == [138, 64]
    marked = Ledger(ring_of(member_with(1000, token=2, row=10, mark=30)))
    assert marked.kept_bytes(Kept(2, 192, 3)) == [474]
    assert marked.has_room(Kept(2, 455, 3))
    assert not marked.has_room(Kept(2, 456, 3))
