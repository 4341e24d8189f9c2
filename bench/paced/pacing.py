"""A device that takes as long as another: a queue of launched work, and a link that carries its results.

Launching returns at once; results are ready when all work launched before is done. Nothing here computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]


class PacedDevice:
    """A GPU that works off what is launched, in order. For any thread."""

    def __init__(self, clock: Clock = time.perf_counter, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._built = 0.0
        self._free = 0.0
        self.busy = 0.0
        """Seconds of all work that was launched."""

    def build(self, seconds: float) -> None:
        """Adds work to what the next launch starts."""
        with self._lock:
            self._built += seconds

    def launch(self) -> float:
        """Starts what was built as soon as the device is free; when everything launched is done."""
        with self._lock:
            if self._built:
                self._free = max(self._clock(), self._free) + self._built
                self.busy += self._built
                self._built = 0.0
            return self._free

    def wait(self, until: float) -> float:
        """Blocks until then. Returns the seconds by which it is late."""
        while (left := until - self._clock()) > 0:
            self._sleep(left)
        return -left


class PacedLink:
    """A link that carries one record after the other. For one thread."""

    def __init__(self, seconds: float, bytes_per_second: float) -> None:
        self._seconds = seconds
        self._bytes_per_second = bytes_per_second
        self._free = 0.0

    def arrival(self, ready: float, size: float) -> float:
        """The moment at which a record of `size` bytes that is ready at `ready` has arrived."""
        self._free = max(self._free, ready) + size / self._bytes_per_second
        return self._free + self._seconds
