"""Waiting for what comes at even intervals, as records do while rows are decoded: awake when it is due.

A core that sleeps takes 50 to 150 us to wake, and a record wakes three threads on its way to the next stage,
four on its way back to the head. So a thread that waits sleeps until shortly before the next record is due by
the last two, looks for it without sleeping for some tenths of a millisecond, and sleeps on. It does so only
after a record that came as expected, which ends with the last row; only where cores are plenty; and never on
battery or in Low Power Mode (docs/decisions/0044-awake-when-it-is-due.md).
"""

from __future__ import annotations

import math
import os
import select
import sys
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.system.power import power
from sealring.mesh.system.sysctl import sysctl

AWAKE_SECONDS = 0.0005
"""Seconds before and after a record is due. Four wake-ups cost about as much."""

LONGEST_SECONDS = 0.25
"""Intervals that are longer are not those of decode steps."""

PLENTY = 8
"""Cores at full speed: twice as many as the threads of a ring's processes that may be awake at once."""

_GRAIN = 0.001
"""`select.poll` counts in milliseconds, and macOS lets a timer be a millisecond late."""

T = TypeVar("T")


class Rhythm:
    """The waits of one thread for one kind of event."""

    def __init__(self, awake: Callable[[], bool] | None = None, clock: Clock = monotonic_clock) -> None:
        self._awake, self._clock = awake or may_be_awake, clock
        self._last = self._due = -math.inf
        self._even = False

    def wait(self, sleep: Callable[[float | None], T], timeout: float | None = None) -> T:
        """What `sleep` returns, false after `timeout` seconds.

        `sleep` waits for the event for some seconds, 0 for a look, None for ever. It returns something true
        if the event is there.
        """
        begun = self._clock()
        until = math.inf if timeout is None else begun + timeout
        found: T | None = None
        if self._even and begun <= self._due + AWAKE_SECONDS < until and self._awake():
            early = int((self._due - AWAKE_SECONDS - begun) / _GRAIN)
            if early > 0:
                found = sleep(early * _GRAIN)
            while not found and self._clock() < self._due + AWAKE_SECONDS:
                found = sleep(0)
        if not found:
            found = sleep(None if timeout is None else max(0.0, until - self._clock()))
        if found:
            self._note(self._clock())
        return found

    def _note(self, now: float) -> None:
        interval = now - self._last
        self._even = abs(now - self._due) <= AWAKE_SECONDS and interval <= LONGEST_SECONDS
        self._last, self._due = now, now + interval


def polled(poll: select.poll, seconds: float | None) -> list[tuple[int, int]]:
    """The ready descriptors of `poll`, none after `seconds`; None waits for ever."""
    return poll.poll(None if seconds is None else round(seconds * 1000, 6))


def may_be_awake(clock: Clock = monotonic_clock) -> bool:
    """Whether this process may wait awake now: cores are plenty, and the machine saves no power."""
    return full_speed_cores() >= PLENTY and not power(clock).saved


@cache
def full_speed_cores() -> int:
    """Cores that this process may use, on a Mac the performance cores."""
    if sys.platform == "darwin":
        return int.from_bytes(sysctl("hw.perflevel0.logicalcpu"), sys.byteorder)  # 0 on an Intel Mac
    else:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
