"""Segments of the time that one request takes to its first token, as the gateway measures them.

The segments follow each other without a gap, so that together they are the time to the first token:

| segment | from | to |
|---|---|---|
| parse | the body has been read | it is parsed and validated |
| route | | a ring is chosen |
| queue_wait | | it has a turn, a row, KV memory on every member, and its place in the line of prefills |
| dispatch | it has a turn | its envelope is on its way to the head |
| open | | the head has opened and tokenized it |
| reserve | there is room for it | its memory is reserved and its first step announced to every member |
| first_token | | its first token is back: prefill in all stages, and sampling |

(The wait for a turn is before `dispatch`, that for memory and the line after `open`; both are `queue_wait`.)
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

HEADER = "server-timing"
"""The response header, or trailing metadata, of the segments; W3C Server Timing, durations in ms."""


@dataclass(slots=True)
class Timings:
    """Moments of one request, in seconds of `time.perf_counter`; 0 before they come."""

    arrived: float = field(default_factory=time.perf_counter)
    parsed: float = 0.0
    routed: float = 0.0
    loaded: float = 0.0
    opened: float = 0.0
    sent: float = 0.0
    answered: float = 0.0
    room: float = 0.0
    announced: float = 0.0
    first: float = 0.0

    @property
    def load_ms(self) -> int:
        """Milliseconds for which the request waited until its ring served; 0 if it served already."""
        return round(max(0.0, self.loaded - self.routed) * 1000)

    def send(self) -> None:
        """The envelope is on its way to the head."""
        self.sent = time.perf_counter()

    def announce(self, event: float) -> None:
        """The first chunk is announced; the event at `event` made room for it."""
        self.room = max(event, self.answered)
        self.announced = time.perf_counter()

    def segments(self) -> dict[str, float]:
        """Seconds by segment, of those that have ended."""
        found = {}
        if self.parsed:
            found["parse"] = self.parsed - self.arrived
        if self.routed:
            found["route"] = self.routed - self.parsed
        if self.opened:
            found["queue_wait"] = self.opened - self.routed
        if self.sent:
            found["dispatch"] = self.sent - self.opened
        if self.answered:
            found["open"] = self.answered - (self.sent or self.opened)
        if self.announced:
            found["queue_wait"] = found.get("queue_wait", 0.0) + self.room - self.answered
            found["reserve"] = self.announced - self.room
        if self.first and self.announced:
            found["first_token"] = self.first - self.announced
        return found

    def header(self) -> str:
        """The segments as a Server-Timing header."""
        return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in self.segments().items())


CURRENT: ContextVar[Timings | None] = ContextVar("timings", default=None)
"""The timings of the request that is being served, set by the edge that took it."""
