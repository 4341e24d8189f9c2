"""A ring's trace as shares of time, and in the Trace Event Format that Perfetto and chrome://tracing load.

The format: "Trace Event Format" by N. Duca and D. Sinclair, phases X (complete), M (metadata), s and f.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sealring.cli.terminal.output import enum_word
from sealring.v1 import admin_pb2, trace_pb2

SHOWN = (
    *("wait", "copy_in", "build", "launch", "compute", "copy_out", "seal", "send", "receive", "open"),
    *("recall", "store"),
)
"""Activities in the order of a record's way through a member, and those of its disk."""

_THREADS = {
    "compute loop": ("wait", "build", "launch"),
    "device": ("compute",),
    "records out": ("copy_out",),
    "records in": ("copy_in",),
    "carrier out": ("seal", "send"),
    "carrier in": ("receive", "open"),
    "prefixes ahead": ("recall",),
    "prefixes behind": ("store",),
}
_THREAD_OF = {
    activity: number for number, activities in enumerate(_THREADS.values(), 1) for activity in activities
}
_MICROSECOND = 1000


@dataclass(frozen=True)
class MemberShares:
    """One member's shares of the time traced, in percent, by activity. They run beside each other."""

    rank: int
    name: str
    shares: dict[str, float]
    idle: float
    """Nothing of all that went on."""
    steps: int
    seconds: float
    """The part of the traced time that the member still had in its buffer."""
    clock_error: float
    """Milliseconds by which its times may be wrong against those of others."""
    drafted: int
    """Tokens that it guessed, as the head does, and of them those `accepted`, in the time traced."""
    accepted: int
    modelled: int
    """Guesses of the draft model or the MTP head among those tokens; the others it looked up."""
    recalled: int
    """Tokens of prefixes that it read from its disk, and those that it `stored` there."""
    stored: int


def _word(number: int) -> str:
    """`ACTIVITY_COPY_IN` as `copy_in`."""
    return enum_word(trace_pb2.Activity.DESCRIPTOR, number)


def member_shares(trace: admin_pb2.TraceRingResponse) -> list[MemberShares]:
    """The shares of each member's time by activity, of the members that sent a trace."""
    return [_shares(member, trace) for member in trace.members if not member.HasField("problem")]


def _shares(member: admin_pb2.MemberTrace, trace: admin_pb2.TraceRingResponse) -> MemberShares:
    end = trace.start + trace.duration
    begin = min(max(trace.start, member.since), end)
    length = max(1, end - begin)
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in SHOWN}
    steps = set()
    for span in member.spans:
        first, last = max(begin, span.start), min(end, span.start + span.duration)
        if last > first or begin <= span.start < end:
            spans.setdefault(_word(span.activity), []).append((first, last))
            steps.update([span.step] if span.step else [])  # the disk's work is of no step
    busy = _covered([one for several in spans.values() for one in several])
    return MemberShares(
        rank=member.rank,
        name=member.name,
        shares={name: 100 * _covered(several) / length for name, several in spans.items()},
        idle=100 * (length - busy) / length,
        steps=len(steps),
        seconds=length / 1e9,
        clock_error=member.clock_error / 1e6,
        drafted=member.drafted,
        accepted=member.accepted,
        modelled=member.modelled,
        recalled=member.recalled,
        stored=member.stored,
    )


def _covered(spans: Sequence[tuple[int, int]]) -> int:
    """Time that at least one of the spans covers."""
    total = reached = 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, reached))
        reached = max(reached, last)
    return total


def chrome_trace(trace: admin_pb2.TraceRingResponse) -> dict[str, Any]:
    """The JSON object form: a process per member, a thread per part of it, an arrow per record on a link."""
    events: list[dict[str, Any]] = []
    for member in trace.members:
        events += _names(member)
        events += (_complete(member.rank, span, trace.start) for span in member.spans)
        events += _arrows(member, trace)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "ring": trace.ring,
            "epoch": trace.epoch,
            "clock_error_ns": {member.name: member.clock_error for member in trace.members},
        },
    }


def _names(member: admin_pb2.MemberTrace) -> Iterator[dict[str, Any]]:
    def note(what: str, thread: int, **arguments: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": member.rank, "tid": thread, "args": arguments}

    yield note("process_name", 0, name=f"{member.rank}: {member.name or member.member}")
    yield note("process_sort_index", 0, sort_index=member.rank)
    for number, name in enumerate(_THREADS, 1):
        yield note("thread_name", number, name=name)
        yield note("thread_sort_index", number, sort_index=number)


def _complete(rank: int, span: trace_pb2.Span, start: int) -> dict[str, Any]:
    name = _word(span.activity)
    details = {"step": span.step} | ({"record": span.record} if span.record else {})
    return {
        "ph": "X",
        "name": name,
        "cat": "step",
        "pid": rank,
        "tid": _THREAD_OF.get(name, 0),
        "ts": (span.start - start) / _MICROSECOND,
        "dur": span.duration / _MICROSECOND,
        "args": details,
    }


def _arrows(member: admin_pb2.MemberTrace, trace: admin_pb2.TraceRingResponse) -> Iterator[dict[str, Any]]:
    """Arrows from each send to the receive of the same record at the next member, if both were recorded."""
    following = next(
        (one for one in trace.members if one.rank == (member.rank + 1) % len(trace.members)), None
    )
    if following is None or following is member:
        return
    received = _by_record(following.spans, trace_pb2.ACTIVITY_RECEIVE)
    for record, sent in _by_record(member.spans, trace_pb2.ACTIVITY_SEND).items():
        if record not in received:
            continue
        for phase, rank, span in (("s", member.rank, sent), ("f", following.rank, received[record])):
            arrow = {
                "ph": phase,
                "name": "record",
                "cat": "record",
                "id": f"{member.rank}.{record}",
                "pid": rank,
                "tid": _THREAD_OF[_word(span.activity)],
                "ts": (span.start - trace.start) / _MICROSECOND,
            }
            yield arrow | ({"bp": "e"} if phase == "f" else {})


def _by_record(
    spans: Iterable[trace_pb2.Span], activity: trace_pb2.Activity.ValueType
) -> dict[int, trace_pb2.Span]:
    return {span.record: span for span in spans if span.activity == activity}
