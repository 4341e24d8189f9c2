"""Words for bytes on their way: the share that is there, how fast more comes, and how long the rest takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sealring.mesh.units import size

_WINDOW_SECONDS = 20.0
_LEAST_SECONDS = 2.0
"""Shorter than that nothing is said of a rate."""


class Pace:
    """Bytes that come. The share that it tells never falls while the total is the same or grows."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        self._share = 0.0

    def words(self, done: int, total: int) -> str:
        """For example "40 % of 2.0 GiB, 85.0 MiB/s, 15 s left"; empty before the total is known."""
        if total <= 0:
            return ""
        now = self._clock()
        self._seen.append((now, done))
        while self._seen[0][0] < now - _WINDOW_SECONDS and len(self._seen) > 2:
            self._seen.popleft()
        self._share = max(self._share, min(1.0, done / total))
        told = f"{int(100 * self._share)} % of {size(total)}"
        began, before = self._seen[0]
        if now - began < _LEAST_SECONDS or done <= before:
            return told
        rate = (done - before) / (now - began)
        return f"{told}, {size(round(rate))}/s, {_left((1 - self._share) * total / rate)} left"


def _left(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
