"""The pace at which a ring starts waiting requests, by which the wait of a new one is estimated."""

from __future__ import annotations

from collections import deque

WINDOW = 128
"""Requests that the estimate looks back at: twice the rows of most rings or more, because all may become free
at once."""

_LEAST = 4
"""Intervals below which there is no estimate: one long prompt is no pace."""

_LONGEST = 60
"""Longest `retry-after` in seconds: common clients ignore more."""


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
        """Nothing waits, or no epoch runs: the time until the next start does not count."""
        self._last = None

    def wait(self, requests: int, now: float) -> float:
        """Seconds until `requests` requests have started, by estimate; 0 while too few have."""
        count = len(self._intervals)
        if count < _LEAST:
            return 0.0
        total = sum(self._intervals)
        standing = 0.0 if self._last is None else max(0.0, now - self._last)
        return requests * max(total / count, (total + standing) / (count + 1))


def retry_after(seconds: float) -> int:
    """The `retry-after` of a refusal: whole seconds, 1 to 60."""
    return round(min(max(1.0, seconds), _LONGEST))
