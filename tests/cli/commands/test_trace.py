"""`sealring trace`: what it asks for, shows and writes."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.v1 import admin_pb2, membership_pb2, trace_pb2

PROBLEM = membership_pb2.Problem(reason="MEMBER_OFFLINE", message="node-1 is not connected")


def traced(*, told: bool = True, problem: bool = False) -> admin_pb2.TraceRingResponse:
    """The trace of a ring in which one member reported its activities and one could not."""
    span = trace_pb2.Span(activity=trace_pb2.ACTIVITY_COMPUTE, step=1, start=0, duration=250_000_000)
    members = []
    if told:
        members.append(admin_pb2.MemberTrace(name="node-0", spans=[span], clock_error=1_500_000))
    if problem:
        members.append(admin_pb2.MemberTrace(name="node-1", rank=1, problem=PROBLEM))
    return admin_pb2.TraceRingResponse(ring="demo-0", epoch=3, duration=1_000_000_000, members=members)


def test_shares_are_shown_in_percent_of_the_time(here: Any, coordinator: Any) -> None:
    coordinator.answers["TraceRing"] = traced()
    done = here("trace")
    title, heading, row = done.out.splitlines()
    assert title.startswith("ring demo-0: percent of the time")
    shown = dict(zip(heading.replace("copy in", "copy_in").replace("copy out", "copy_out").split()[:-2],
                     row.split(), strict=False))  # fmt: skip
    assert (shown["node"], shown["compute"], shown["idle"], shown["steps"]) == (
        "node-0",
        "25.00",
        "75.00",
        "1",
    )
    assert row.split()[-2:] == ["1.00", "1.50"]
    assert done.err == "watching for 5s\n", "nothing is said of members that told all, nor of a file"


def test_what_members_read_from_their_disks_is_said(here: Any, coordinator: Any) -> None:
    coordinator.answers["TraceRing"] = found = traced()
    found.members[0].recalled, found.members[0].stored = 20_480, 512
    assert "node-0 read 20,480 tokens of prefixes from its disk and wrote 512\n" in here("trace").out
    (member,) = here("trace", "--json").data["members"]
    assert (member["recalled"], member["stored"]) == (20_480, 512)


def test_where_guesses_came_from_is_said(here: Any, coordinator: Any) -> None:
    coordinator.answers["TraceRing"] = found = traced()
    found.members[0].drafted, found.members[0].accepted, found.members[0].modelled = 20, 12, 15
    said = "of 20 tokens that node-0 guessed 12 were right; 15 came from a model, 5 were looked up\n"
    assert said in here("trace").out


def test_who_gave_no_trace_is_named_with_the_reason(here: Any, coordinator: Any) -> None:
    coordinator.answers["TraceRing"] = traced(problem=True)
    done = here("trace")
    assert done.status == 0
    assert "no trace of node-1: node-1 is not connected" in done.err
    assert "node-0" not in done.err
    coordinator.answers["TraceRing"] = traced(told=False, problem=True)
    failed = here("trace")
    assert failed.status != 0
    assert failed.out == ""
    assert "MEMBER_OFFLINE" in failed.err


@pytest.mark.parametrize(
    ("duration", "milliseconds"), [("0.001s", 1), ("0.0014s", 1), ("2s", 2000), ("60s", 60_000)]
)
def test_it_waits_for_as_long_as_it_watches_and_the_answer_takes(
    here: Any, coordinator: Any, duration: str, milliseconds: int
) -> None:
    coordinator.answers["TraceRing"] = traced()
    assert here("trace", "--duration", duration, "--ring", "demo-0").status == 0
    ((_, asked),) = coordinator.asked
    assert (asked.ring, asked.milliseconds) == ("demo-0", milliseconds)
    assert coordinator.seconds > milliseconds / 1000 + 10


@pytest.mark.parametrize("duration", ["0.0009s", "61s"])
def test_nobody_watches_for_longer_than_members_remember(here: Any, coordinator: Any, duration: str) -> None:
    assert here("trace", "--duration", duration).status == 2
    assert not coordinator.asked
