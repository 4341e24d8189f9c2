"""Start and end of the last pieces of work of one thread, in memory of a fixed size.

It is always on, as an entry costs about a microsecond (docs/performance.md), and can be read afterwards.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable

from sealring.mesh.ring.limits import MAX_SPANS
from sealring.v1 import trace_pb2

LENGTH = 4096
"""Entries of a log."""

now = time.perf_counter_ns
"""The machine's monotonic clock, the same in all its processes, in nanoseconds."""


class TimeLog:
    """The last entries of a few whole numbers each. One thread adds, any thread reads."""

    def __init__(self, numbers: int, length: int = LENGTH) -> None:
        self._entry = struct.Struct(f"<{numbers}Q")
        self._memory = bytearray(self._entry.size * length)
        self._length = length
        self._count = 0

    def add(self, *numbers: int) -> None:
        self._entry.pack_into(self._memory, self._count % self._length * self._entry.size, *numbers)
        self._count += 1

    def entries(self) -> tuple[list[tuple[int, ...]], bool]:
        """The entries, oldest first, and whether older ones were lost."""
        known = self._count
        memory = bytes(self._memory)
        oldest = max(0, self._count + 1 - self._length)  # `add` may be writing one now
        size = self._entry.size
        return [
            self._entry.unpack_from(memory, index % self._length * size) for index in range(oldest, known)
        ], oldest > 0


def span(
    activity: trace_pb2.Activity.ValueType, step: int, start: int, end: int, record: int = 0
) -> trace_pb2.Span:
    """One piece of work; times in nanoseconds on the machine's monotonic clock."""
    return trace_pb2.Span(
        activity=activity, step=step, start=start, duration=max(0, end - start), record=record
    )


def process_trace(
    spans: Iterable[trace_pb2.Span], since: int, kept_from: Iterable[int]
) -> trace_pb2.ProcessTrace:
    """The spans that end at or after `since`. `kept_from` has the oldest time of each log with lost
    entries."""
    recent = [one for one in spans if one.start + one.duration >= since]
    if len(recent) > MAX_SPANS:
        recent = sorted(recent, key=lambda one: one.start)[-MAX_SPANS:]
        kept_from = [*kept_from, recent[0].start]
    return trace_pb2.ProcessTrace(spans=recent, since=max([since, *kept_from]))
