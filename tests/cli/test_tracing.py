"""Shares of time, from traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.tracing import member_shares
from sealring.v1 import admin_pb2, membership_pb2, trace_pb2

START = 5_000_000_000
MILLISECOND = 1_000_000


def at(activity: int, begin: float, end: float, *, step: int = 1, record: int = 0) -> trace_pb2.Span:
    """A span between two times in milliseconds from the start."""
    start = START + round(begin * MILLISECOND)
    return trace_pb2.Span(
        activity=activity,  # type: ignore[arg-type]
        step=step,
        start=start,
        duration=round((end - begin) * MILLISECOND),
        record=record,
    )


def trace(*members: list[trace_pb2.Span], milliseconds: int = 100, **fields: Any) -> Any:
    return admin_pb2.TraceRingResponse(
        ring="demo-0",
        epoch=3,
        start=START,
        duration=milliseconds * MILLISECOND,
        members=[
            admin_pb2.MemberTrace(member=f"id-{rank}", name=f"node-{rank}", rank=rank, spans=spans, **fields)
            for rank, spans in enumerate(members)
        ],
    )


def test_what_overlaps_is_counted_once_and_what_lies_outside_not_at_all() -> None:
    spans = [
        at(trace_pb2.ACTIVITY_COMPUTE, -10, 10),
        at(trace_pb2.ACTIVITY_COMPUTE, 5, 20, step=2),
        at(trace_pb2.ACTIVITY_SEND, 15, 30, step=2),
        at(trace_pb2.ACTIVITY_SEND, 95, 300, step=3),
        at(trace_pb2.ACTIVITY_SEAL, 200, 300, step=4),
        at(trace_pb2.ACTIVITY_SEAL, -30, -20, step=5),
    ]
    (one,) = member_shares(trace(spans, clock_error=1_500_000))
    assert one.shares["compute"] == pytest.approx(20)
    assert one.shares["send"] == pytest.approx(20)
    assert one.shares["seal"] == 0
    assert one.idle == pytest.approx(65)
    assert one.steps == 3
    assert one.clock_error == 1.5
    assert one.seconds == pytest.approx(0.1)


def test_a_step_is_counted_where_some_of_it_was_seen() -> None:
    spans = [
        at(trace_pb2.ACTIVITY_SEND, 0, 0, step=1),
        at(trace_pb2.ACTIVITY_SEND, 100, 100, step=2),
        at(trace_pb2.ACTIVITY_SEND, -5, 0, step=3),
        at(trace_pb2.ACTIVITY_COMPUTE, 10, 20, step=4),
        at(trace_pb2.ACTIVITY_COMPUTE, 12, 13, step=4),
    ]
    (one,) = member_shares(trace(spans))
    assert (one.steps, one.shares["compute"], one.idle) == (2, 10.0, 90.0)
    (one,) = member_shares(trace([], since=START + 200 * MILLISECOND))
    assert (one.seconds, one.idle) == (1e-9, 100.0)


def test_members_without_a_trace_have_no_shares() -> None:
    found = trace([], [])
    found.members[1].problem.CopyFrom(membership_pb2.Problem(reason="MEMBER_OFFLINE"))
    assert [one.rank for one in member_shares(found)] == [0]
    assert member_shares(found)[0].idle == 100


def test_an_activity_of_a_newer_release_is_shown_by_its_number() -> None:
    (one,) = member_shares(trace([at(99, 0, 10)]))
    assert one.shares["99"] == pytest.approx(10)
