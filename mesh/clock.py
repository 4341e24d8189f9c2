"""The clock as an argument: what depends on the time takes one of these, so that tests can set it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import structlog

Clock: TypeAlias = Callable[[], float]
"""Returns seconds: since 1970 for a wall clock, from anywhere for a monotonic one."""

SKEW_SECONDS = 60
"""How far two machines' wall clocks may stand apart."""

STEP_SECONDS = 10.0
"""A wall clock that moves by more at once was set. Less is drift."""

BELIEVED_SECONDS = 60.0
"""A wall clock that was set and stayed so for as long is taken for right."""

monotonic_clock: Clock = time.monotonic

_BOOT = time.CLOCK_MONOTONIC_RAW if sys.platform == "darwin" else time.CLOCK_MONOTONIC
"""On macOS the one that goes on while the machine sleeps."""

log = structlog.get_logger()


def boot_clock() -> float:
    """Seconds since the machine was started, those included in which a Mac slept. Nobody can set it."""
    return time.clock_gettime(_BOOT)


class SteadyClock:
    """A wall clock that does not follow at once where it is set (decision 24).

    It counts on from what it showed before until the other time has held for a minute: a clock that is wrong
    for seconds makes nothing expire. Safe to use from several threads.
    """

    def __init__(self, wall: Clock = time.time, boot: Clock = boot_clock) -> None:
        self._wall = wall
        self._boot = boot
        self._lock = threading.Lock()
        self._zero = wall() - boot()
        self._stepped_at: float | None = None

    def __call__(self) -> float:
        with self._lock:
            now, wall = self._boot(), self._wall()
            step = wall - now - self._zero
            if abs(step) > STEP_SECONDS and not self._lasted(now, step):
                return now + self._zero
            if self._stepped_at is not None:
                self._stepped_at = None
                log.warning("clock_step_over", believed_seconds=round(step))
            self._zero += step
            return wall

    def _lasted(self, now: float, step: float) -> bool:
        """Whether the clock has long been as it was set."""
        if self._stepped_at is None:
            self._stepped_at = now
            hint = f"this machine's clock was set; if it stays so for {BELIEVED_SECONDS:g} s it is believed"
            log.warning("clock_stepped", seconds=round(step), hint=hint)
        return now - self._stepped_at >= BELIEVED_SECONDS


wall_clock: Clock = SteadyClock()


class AwakeClock:
    """Seconds in which this process could listen: of the time between two looks it counts `step` at most.

    For how long others have been silent. Where this process itself was held up, by a heavy request, by a
    machine that swaps or was asleep, what they said meanwhile lies unread, and nobody was silent for it.
    Whoever judges silence looks at least every `step` seconds.
    """

    def __init__(self, clock: Clock = monotonic_clock, *, step: float = 2.0) -> None:
        self._clock = clock
        self._step = step
        self._looked = clock()
        self._awake = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._awake += min(now - self._looked, self._step)
        self._looked = now
        return self._awake


class PausableClock:
    """Counts the seconds of another clock while it runs; it stands still at first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._counted = 0.0

    def __call__(self) -> float:
        return self._counted + (0.0 if self._since is None else self._clock() - self._since)

    def run(self) -> None:
        """Goes on. Changes nothing while it runs."""
        if self._since is None:
            self._since = self._clock()

    def pause(self) -> None:
        """Stands still. Changes nothing while it does."""
        self._counted, self._since = self(), None


awake_clock = AwakeClock()
"""The process's own. For its event loop alone."""
