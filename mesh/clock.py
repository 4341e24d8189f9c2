"""Clocks as arguments: code that depends on the time takes one of these, and tests can set it.

Those of a machine (`MachineClocks`) belong to a context, so that a simulation can run several in one process.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import structlog

Clock: TypeAlias = Callable[[], float]
"""Returns seconds: since 1970 for a wall clock, from anywhere for a monotonic one."""

SKEW_SECONDS = 60
"""How far two machines' wall clocks may stand apart."""

STEP_SECONDS = 10.0
"""A wall clock that jumps by more was set; less is drift."""

BELIEVED_SECONDS = 60.0
"""A wall clock that was set counts as right after this time."""

_BOOT = time.CLOCK_MONOTONIC_RAW if sys.platform == "darwin" else time.CLOCK_MONOTONIC
"""On macOS the clock that goes on while the machine sleeps."""

log = structlog.get_logger()


def monotonic_clock() -> float:
    """Seconds in which the machine was awake."""
    return machine_clocks.get().monotonic()


def boot_clock() -> float:
    """Seconds since the machine was started, including those in which a Mac slept. No program can set it."""
    return machine_clocks.get().boot()


def system_clock() -> float:
    """Seconds since 1970, as the machine says now; somebody may have set it wrong (`wall_clock`)."""
    return machine_clocks.get().system()


def wall_clock() -> float:
    """Seconds since 1970, by a SteadyClock."""
    return machine_clocks.get().wall()


def awake_clock() -> float:
    """This process's AwakeClock, for its event loop alone."""
    return machine_clocks.get().awake()


class SteadyClock:
    """A wall clock that follows a change of the system's clock only after a minute (decision 24).

    Until then it counts on from the previous time, so a clock that is wrong for seconds makes nothing expire.
    A clock that comes back to the time that it had shown before is followed at once. Safe to use from several
    threads.
    """

    def __init__(self, wall: Clock = system_clock, boot: Clock = boot_clock) -> None:
        self._wall = wall
        self._boot = boot
        self._lock = threading.Lock()
        self._zero = wall() - boot()
        self._former = math.nan  # `_zero` before the last step that was believed
        self._stepped_at = self._stepped_to = math.nan  # when the clock was set, and its zero since

    def __call__(self) -> float:
        with self._lock:
            now, wall = self._boot(), self._wall()
            zero = wall - now
            step = zero - self._zero
            if abs(step) > STEP_SECONDS:
                back = abs(zero - self._former) <= STEP_SECONDS
                if not back and not self._lasted(now, zero):
                    return now + self._zero
                self._former = math.nan if back else self._zero
            if not math.isnan(self._stepped_at):
                self._stepped_at = self._stepped_to = math.nan
                log.warning("clock_step_over", believed_seconds=round(step))
            self._zero = zero
            return wall

    def _lasted(self, now: float, zero: float) -> bool:
        """Whether the clock has shown the new time for BELIEVED_SECONDS."""
        if not abs(zero - self._stepped_to) <= STEP_SECONDS:  # set for the first time, or once more
            self._stepped_at, step = now, round(zero - self._zero)
            hint = f"this machine's clock was set; if it stays so for {BELIEVED_SECONDS:g} s it is believed"
            log.warning("clock_stepped", seconds=step, hint=hint)
        self._stepped_to = zero  # which drifts
        return now - self._stepped_at >= BELIEVED_SECONDS


class AwakeClock:
    """Seconds in which this process could receive: it counts at most `step` seconds between two calls.

    It measures how long a peer has been silent. While a heavy request, swapping or sleep holds this process
    up, messages of its peers lie unread, and this time must not count as their silence. Code that measures
    silence calls it at least every `step` seconds.
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
        """Starts or continues to count. Has no effect while it runs."""
        if self._since is None:
            self._since = self._clock()

    def pause(self) -> None:
        """Stops counting. Has no effect while it stands still."""
        self._counted, self._since = self(), None


def _boot() -> float:
    return time.clock_gettime(_BOOT)


@dataclass(frozen=True)
class MachineClocks:
    """The clocks of one process on one machine."""

    system: Clock
    monotonic: Clock
    boot: Clock
    wall: SteadyClock
    awake: AwakeClock

    @classmethod
    def of(cls, system: Clock, monotonic: Clock, boot: Clock) -> MachineClocks:
        """`system` can be set, `monotonic` stands still while the machine sleeps, `boot` does neither."""
        return cls(system, monotonic, boot, SteadyClock(system, boot), AwakeClock(monotonic))


# one for all contexts, on purpose: its clocks have a state, and a process runs on one machine
machine_clocks: ContextVar[MachineClocks] = ContextVar(
    "machine_clocks",
    default=MachineClocks.of(time.time, time.monotonic, _boot),  # noqa: B039
)
