"""A lane: who leaves it, when it may change, who needs more memory."""

from __future__ import annotations

import pytest

from sealring.gateway.scheduler.lane import EXTEND_AHEAD, GATHERED, Lane
from sealring.gateway.scheduler.planner import Announced
from sealring.gateway.scheduler.request import Request, Row
from sealring.v1 import inference_pb2 as inference


def row(number: int, limit: int = 100, ceiling: int = 100) -> Row:
    made = Row(number, Request(f"r{number}", "k", 0, inference.Envelope()))
    made.limit, made.ceiling = limit, ceiling
    return made


def lane_of(*rows: Row) -> Lane:
    lane = Lane(0)
    lane.change([], list(rows))
    return lane


def steps(lane: Lane, count: int) -> None:
    lane.steps += count
    lane.outstanding += count


def test_a_row_leaves_when_it_is_closed() -> None:
    one, two, three = rows = row(1, 3), row(2), row(3)
    lane = lane_of(*rows)
    assert lane.leaving() == []
    assert [lane.left(each) for each in rows] == [2, 99, 99]
    three.closed = True
    assert lane.leaving() == [three]
    one.closed = True
    assert lane.leaving() == [one, three]
    lane.change([one, three], [])
    assert lane.leaving() == []
    assert list(lane.rows) == [2]
    assert lane.running
    assert not lane.spent
    two.closed = True
    assert not lane.running
    assert lane.spent
    lane.ready.append(row(4))
    assert lane.running
    assert not lane.spent


def test_a_row_at_its_limit_takes_part_in_one_more_step_only_beside_others() -> None:
    one, two = row(1, 3), row(2)
    lane = lane_of(one, two)
    steps(lane, 2)
    assert lane.left(one) == 0
    assert lane.running
    steps(lane, 1)
    assert lane.leaving() == [], "its last token may still be on the way"
    two.closed = True
    assert not lane.running
    assert not lane.spent
    one.closed = True
    assert lane.spent


@pytest.mark.parametrize("pressed", [False, True])
@pytest.mark.parametrize(("rows", "gathered"), [(3, 3), (40, GATHERED)])
def test_changes_are_gathered_unless_somebody_presses(pressed: bool, rows: int, gathered: int) -> None:
    lane = lane_of(*(row(number) for number in range(1, rows + 1)))
    leaving = [lane.rows[1]]
    assert lane.must_change(list(lane.rows.values()), pressed)
    for _ in range(gathered):
        assert not lane.must_change([], pressed)
        assert lane.must_change(leaving, pressed) is pressed
        steps(lane, 1)
    assert lane.must_change(leaving, pressed)
    assert not lane.must_change([], pressed)
    lane.ready.append(row(rows + 1))
    assert lane.must_change([], pressed)


def test_a_row_at_its_limit_does_not_wait_for_others() -> None:
    lane = lane_of(row(1, 2), row(2), row(3))
    assert not lane.must_change([lane.rows[2]], False)
    steps(lane, 1)
    assert lane.must_change([lane.rows[1]], False)
    assert lane.must_change([lane.rows[2], lane.rows[1]], False)
    assert not lane.must_change([], True)


def test_rows_near_their_limit_ask_for_more() -> None:
    near = row(1, EXTEND_AHEAD + 3, 10_000)
    closed = row(2, EXTEND_AHEAD + 3, 10_000)
    whole = row(3, EXTEND_AHEAD + 3, EXTEND_AHEAD + 3)
    lane = lane_of(near, closed, whole)
    steps(lane, 1)
    assert lane.wanting() == []
    steps(lane, 1)
    closed.closed = True
    assert lane.wanting() == [near]
    lane.extend(near, 2 * EXTEND_AHEAD)
    assert lane.left(near) == 2 * EXTEND_AHEAD - 3
    assert lane.wanting() == []


def test_a_lanes_step_brings_tokens_and_a_prefill_step_only_a_prompts_last() -> None:
    """A planner that confuses them takes steps as done out of order."""
    lane, first = lane_of(row(1)), [row(2)]
    steps = [Announced(1, which, first=began) for which in (lane, None) for began in ([], first)]
    assert [step.sampled for step in steps] == [True, True, False, True]
