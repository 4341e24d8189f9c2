"""Waiting for the next record. On a machine with many cores the first milliseconds are spent spinning.

An idle core sleeps, and waking it takes 50 to 150 us, more in a virtual machine. A record passes four waiting
threads between two members, so a decode step loses half a millisecond to that.
"""

from __future__ import annotations

import os
import select
import sys
import time

SPIN_SECONDS = 0.005
"""About a decode step. An idle ring sleeps."""

MANY_CORES = 16
"""Cores from which on a few may spin."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_spin_seconds() -> float:
    """0 on a Mac: some of its cores are efficiency cores, and its GPU shares their power limit."""
    return SPIN_SECONDS if sys.platform != "darwin" and cores() >= MANY_CORES else 0.0


spin_seconds = default_spin_seconds()


def wait(poll: select.poll, timeout: float | None = None) -> list[tuple[int, int]]:
    """The ready descriptors of `poll`; none after `timeout` seconds."""
    if spin_seconds:
        until = time.monotonic() + (spin_seconds if timeout is None else min(timeout, spin_seconds))
        while True:
            ready = poll.poll(0)
            if ready:
                return ready
            if time.monotonic() >= until:
                break
    return poll.poll(None if timeout is None else timeout * 1000)
