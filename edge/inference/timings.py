"""When a request came to its ring, when its prompt began to be computed, and the ring's time that it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timings:
    """Moments of one request, in seconds of `time.perf_counter`; 0 before they come."""

    routed: float = 0.0
    loaded: float = 0.0
    computed: float = 0.0
    ring: float = 0.0
    """Seconds of the ring's time so far, which is shared evenly by the requests that it computes at once."""

    @property
    def load_ms(self) -> int:
        """Milliseconds for which the request waited until its ring served; 0 if it served already."""
        return round(max(0.0, self.loaded - self.routed) * 1000)

    @property
    def queued(self) -> float | None:
        """Seconds from the ring to the first step; None while it has not come, or another gateway has it."""
        return self.computed - self.routed if self.computed else None
