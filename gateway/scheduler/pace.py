"""How fast a ring begins the requests that wait for it, to tell how long a new one would wait."""

from __future__ import annotations

from collections import deque

WINDOW = 128
"""Requests that are looked back at: twice the rows of most rings or more, for all may become free at once."""

_LEAST = 4
"""From fewer nothing is told: one long prompt is no pace."""

_LONGEST = 60
"""Seconds after which a refused client may come back at the latest: common clients believe no more."""


class Pace:
    """The seconds between two requests that were begun while others waited. Pure; time is an argument."""

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=WINDOW)
        self._last: float | None = None

    def begun(self, now: float) -> None:
        if self._last is not None:
            self._intervals.append(max(0.0, now - self._last))
        self._last = now

    def rest(self) -> None:
        """Nothing waits, or no ring is there: the time until the next one is begun is none of its pace."""
        self._last = None

    def wait(self, requests: int, now: float) -> float:
        """Seconds in which so many requests may be begun; 0 while too little is known."""
        count = len(self._intervals)
        if count < _LEAST:
            return 0.0
        total = sum(self._intervals)
        standing = 0.0 if self._last is None else max(0.0, now - self._last)
        return requests * max(total / count, (total + standing) / (count + 1))


def retry_after(seconds: float) -> int:
    """For a client that is refused: whole seconds, 1 to 60."""
    return round(min(max(1.0, seconds), _LONGEST))
