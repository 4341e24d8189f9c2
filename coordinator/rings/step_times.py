"""Finds the member of a ring that has become slow: throttled, swapping, or in a low power mode.

Every member executes the same steps. The time of a member's steps, compared with the other members', depends
neither on the load nor on the lengths of prompts. It changes when a machine does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

READINGS = 12
"""Heartbeats with steps in one measurement: about a minute of work."""

SLOW = 2.0
"""A member is slow if its steps take this many times as long as before, compared with the other members'.

Policy: well above the effect of other programs and other kinds of prompts for a while."""


class StepTimes:
    """The step times of one ring's members, from the start of the ring: layers do not change in between."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._usual: dict[str, float] = {}
        self._shares: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=READINGS))

    def beaten(self, member: str, step_us: int, members: int) -> None:
        """Takes a member's step time in microseconds; 0 stands for too few steps."""
        changed = bool(step_us) and self._newest.get(member) != step_us
        self._newest[member] = step_us
        others = [took for other, took in self._newest.items() if other != member and took]
        if not changed or not others or len(others) < members - 1:
            return
        shares = self._shares[member]
        shares.append(step_us / median(others))
        if member not in self._usual and len(shares) == READINGS:
            self._usual[member] = median(shares)
            shares.clear()

    def slow(self, member: str) -> float:
        """How many times longer a member's steps take than before, against the others'; 0 below SLOW."""
        shares = self._shares.get(member, ())
        if len(shares) < READINGS:  # the first READINGS became the usual share
            return 0.0
        factor = median(shares) / self._usual[member]
        return factor if factor >= SLOW else 0.0
