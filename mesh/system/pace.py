"""How far work is that takes long: its bytes, how fast more come, and how long the rest takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sealring.mesh.units import size

STARTING = "starting its engine"
FETCHING = "fetching"
LOADING = "loading"
WARMING = "compiling and timing its steps"

_WINDOW_SECONDS = 20.0
_WINDOW_SHARE = 4
"""The rate is that of the last 20 s, and later that of the last quarter, so that a pause does not end it."""

_SAMPLES = 64
"""The most that are kept of one window."""

_LEAST_SECONDS = 5.0
_LEAST_SHARE = 1000
"""Rate and time left are those since a thousandth of the rest has come: connections begin slowly. They are
said after 5 s, while the window too has a thousandth of the rest: what takes 1,000 windows is a guess."""

MOST_LEFT = 30 * 86400
"""Seconds: a longer rest is not told."""


@dataclass(frozen=True)
class Reached:
    """How far `what` is: bytes `done` of `total`, `rate` in bytes a second, `seconds_left`; each 0 while
    unknown."""

    what: str
    done: int = 0
    total: int = 0
    rate: int = 0
    seconds_left: int = 0

    @property
    def share(self) -> float:
        """The part of its bytes that is done, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def words(self) -> str:
        """For example "fetching 1.2 of 2.0 GiB at 85.0 MiB/s, 15 s left"; `what` alone without bytes."""
        return f"{self.what} {self.figures}".strip()

    @property
    def figures(self) -> str:
        """The words for its bytes; "" before there are any."""
        if not self.total:
            return size(self.done) if self.done else ""
        done, total = size(min(self.done, self.total)), size(self.total)
        number, _, unit = done.partition(" ")
        alike = not self.done or total.endswith(f" {unit}")
        told = f"{number if alike else done} of {total}"
        if not self.rate:
            return told
        return f"{told} at {size(self.rate)}/s, {_span(self.seconds_left)} left"


def together(parts: Sequence[Reached]) -> Reached:
    """Parts that are worked on side by side, as one: it has a total once all have, and as long as the slowest
    to go once that is known of each."""
    done, total = sum(one.done for one in parts), sum(one.total for one in parts)
    if not parts or not all(one.total for one in parts):
        return Reached("", done)
    if not all(one.rate for one in parts if one.done < one.total):
        return Reached("", done, total)
    return Reached("", done, total, sum(one.rate for one in parts), max(one.seconds_left for one in parts))


class Pace:
    """Bytes that come, or tokens of a prompt, one kind of work after the other. Within one of the same total
    they never fall."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = Reached("")
        self._seen: deque[tuple[float, int]] = deque()
        self._began, self._base = clock(), 0

    def at(self, what: str, done: int, total: int) -> Reached:
        """How far the work is, with `done` bytes of `total` (0: not known) now."""
        now = self._clock()
        if (self._last.what, self._last.total) != (what, total):
            self._base, begins = done, True
        else:
            done = max(done, self._last.done)
            begins = (done - self._base) * _LEAST_SHARE < total - done
        if begins:
            self._seen.clear()
            self._began = now
        window = max(_WINDOW_SECONDS, (now - self._began) / _WINDOW_SHARE)
        if len(self._seen) > 1 and now < self._seen[-2][0] + window / _SAMPLES:
            self._seen.pop()
        self._seen.append((now, done))
        while self._seen[0][0] < now - window and len(self._seen) > 2:
            self._seen.popleft()
        began, before = self._seen[0]
        self._last = Reached(what, done, total, *_left(now - began, done - before, total - done))
        return self._last


def _left(seconds: float, came: int, rest: int) -> tuple[int, int]:
    """The rate by what came in these seconds, and the seconds of the rest at it; both 0 if that says too
    little."""
    if seconds < _LEAST_SECONDS or came <= 0 or came * _LEAST_SHARE < rest:
        return 0, 0
    left = max(0, math.ceil(rest * seconds / came))
    return (round(came / seconds), left) if left < MOST_LEFT else (0, 0)


def _span(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
