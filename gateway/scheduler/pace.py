"""How fast a ring finishes requests, to tell a refused client when to come back."""

from __future__ import annotations

_WEIGHT = 0.1
_LONGEST = 60


class Pace:
    """An exponentially weighted mean of the seconds between finished requests."""

    def __init__(self) -> None:
        self._interval = 0.0
        self._last: float | None = None

    def finished(self, now: float) -> None:
        if self._last is not None:
            interval = min(max(0.0, now - self._last), _LONGEST)
            self._interval += _WEIGHT * (interval - self._interval) if self._interval else interval
        self._last = now

    def seconds_for(self, requests: int, now: float) -> int:
        """Whole seconds, 1 to 60, in which half of so many requests may be finished."""
        since = 0.0 if self._last is None else max(0.0, now - self._last)
        return round(min(max(1.0, max(self._interval, since / 10) * requests / 2), _LONGEST))
