"""The clock as an argument: what depends on the time takes one of these, so that tests can set it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Returns seconds: since 1970 for a wall clock, from anywhere for a monotonic one."""

SKEW_SECONDS = 60
"""How far two machines' wall clocks may stand apart."""

wall_clock: Clock = time.time
monotonic_clock: Clock = time.monotonic


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


awake_clock = AwakeClock()
"""The process's own. For its event loop alone."""
