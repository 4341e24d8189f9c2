"""A clock that a test turns."""

from __future__ import annotations


class ManualClock:
    """Stands still until it is turned; of the type `sealring.mesh.clock.Clock`.

    `now` is in seconds: since 1970 where it is a wall clock, from anywhere where it is a monotonic one.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Turns it on, or back with a negative number."""
        self.now += seconds
