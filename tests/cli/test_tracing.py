"""Shares and the Trace Event Format, from traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.tracing import chrome_trace, member_shares
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
    assert chrome_trace(trace([at(99, 0, 10)]))["traceEvents"][-1]["tid"] == 0


def test_a_process_for_each_member_and_a_thread_for_each_part_of_it() -> None:
    found = trace([], [at(trace_pb2.ACTIVITY_SEAL, 1, 2, step=4, record=7)], clock_error=5)
    found.members[1].name = ""
    made = chrome_trace(found)
    assert made["otherData"] == {"ring": "demo-0", "epoch": 3, "clock_error_ns": {"node-0": 5, "": 5}}
    of_second = [event for event in made["traceEvents"] if event["pid"] == 1]
    *notes, span = of_second
    threads = ["compute loop", "device", "records out", "records in", "carrier out", "carrier in"]
    threads += ["prefixes ahead", "prefixes behind"]
    assert [(one["name"], one["tid"], one["args"]) for one in notes] == [
        ("process_name", 0, {"name": "1: id-1"}),
        ("process_sort_index", 0, {"sort_index": 1}),
        *(
            note
            for number, name in enumerate(threads, 1)
            for note in (
                ("thread_name", number, {"name": name}),
                ("thread_sort_index", number, {"sort_index": number}),
            )
        ),
    ]
    assert span == {
        "ph": "X", "name": "seal", "cat": "step", "pid": 1, "tid": 5, "ts": 1000.0, "dur": 1000.0,
        "args": {"step": 4, "record": 7},
    }  # fmt: skip


def test_arrows_go_round_a_ring_of_three_and_only_where_both_ends_were_seen() -> None:
    spans = [
        [at(trace_pb2.ACTIVITY_SEND, 1, 2, record=1), at(trace_pb2.ACTIVITY_RECEIVE, 5, 6, record=9)],
        [at(trace_pb2.ACTIVITY_RECEIVE, 2, 3, record=1), at(trace_pb2.ACTIVITY_SEND, 3, 4, record=2)],
        [at(trace_pb2.ACTIVITY_SEND, 4, 5, record=9), at(trace_pb2.ACTIVITY_RECEIVE, 8, 9, record=3)],
    ]
    events = chrome_trace(trace(*spans))["traceEvents"]
    arrows = [(one["ph"], one["id"], one["pid"], one["tid"]) for one in events if one["ph"] in "sf"]
    assert arrows == [("s", "0.1", 0, 5), ("f", "0.1", 1, 6), ("s", "2.9", 2, 5), ("f", "2.9", 0, 6)]
    assert [one.get("bp") for one in events if one["ph"] in "sf"] == [None, "e"] * 2
