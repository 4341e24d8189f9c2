"""The times of an epoch's last steps as spans: what the compute loop, the device and the link threads did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sealring.node.engine.threads import TRACE_LENGTH, StepTimes
from sealring.node.wire.timelog import TimeLog, process_trace, span
from sealring.v1 import trace_pb2
from sealring.v1.trace_pb2 import (
    ACTIVITY_BUILD,
    ACTIVITY_COMPUTE,
    ACTIVITY_COPY_IN,
    ACTIVITY_COPY_OUT,
    ACTIVITY_LAUNCH,
    ACTIVITY_WAIT,
)

_SECOND = 1_000_000_000


def engine_trace(
    steps: Sequence[StepTimes],
    copied: TimeLog | None,
    since: int,
    others: Mapping[trace_pb2.Activity.ValueType, TimeLog] | None = None,
) -> trace_pb2.ProcessTrace:
    """The activities since `since`, nanoseconds; `copied` has step, begin and end of each received record.

    `others` have begin and end of work that belongs to no step, and perhaps more."""
    arrivals, lost = copied.entries() if copied is not None else ([], False)
    recent = [times for times in steps if _nanoseconds(times.sent) >= since]
    spans = [
        *_step_spans(recent),
        *(span(ACTIVITY_COPY_IN, *arrival) for arrival in arrivals if arrival[2] >= since),
    ]
    kept_from = [arrivals[0][1]] if lost else []
    for activity, log in (others or {}).items():
        entries, lost = log.entries()
        spans += (span(activity, 0, begin, end) for begin, end, *_ in entries if end >= since)
        kept_from += [entries[0][0]] if lost else []
    if len(steps) == TRACE_LENGTH:
        # a step may start before the results of those before it have been sent, but is ready afterwards
        kept_from.append(_nanoseconds(steps[0].ready))
    return process_trace(spans, since, kept_from)


def _step_spans(steps: Sequence[StepTimes]) -> Iterator[trace_pb2.Span]:
    """Spans of steps; the device begins a launch when the one before is ready."""
    free = 0
    for times in sorted(steps, key=lambda one: one.ready):
        step, ready = times.step, _nanoseconds(times.ready)
        if times.launched:
            yield from _loop_spans(times)
            begun = max(free, _nanoseconds(times.launched))
            yield span(ACTIVITY_COMPUTE, step, begun, max(begun, ready))
            free = ready
        if times.sent > times.ready:
            yield span(ACTIVITY_COPY_OUT, step, ready, _nanoseconds(times.sent))


def _loop_spans(times: StepTimes) -> Iterator[trace_pb2.Span]:
    """Spans of the compute loop: a graph is built before or after its input arrives, then launched."""
    step, started, built, fed, launched = (
        times.step,
        *map(_nanoseconds, (times.started, times.built, times.fed, times.launched)),
    )
    if built <= fed:
        yield span(ACTIVITY_BUILD, step, started, built)
        yield span(ACTIVITY_WAIT, step, built, fed)
    else:
        yield span(ACTIVITY_WAIT, step, started, fed)
        yield span(ACTIVITY_BUILD, step, fed, built)
    yield span(ACTIVITY_LAUNCH, step, max(built, fed), launched)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _SECOND)
