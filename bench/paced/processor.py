"""A device that is a core of this machine, for the instrument's check: work is seconds of a processor.

What else runs on the machine stretches a real CPU stage's steps and those of this device alike, and both keep
a core from the product's other processes.
"""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

_MOST_AT_ONCE = 0.05
"""Seconds that are burnt before anything else is looked at: each look has to wait for Python's lock."""
_ROUNDING = 1e-6
_ZEROS = bytes(16 << 20)
_BLOCK = _ZEROS[: 1 << 18]


def native_seconds() -> float:
    """Processors' seconds until now of this process's threads that are not Python's: MLX's. Linux only."""
    own = {one.native_id for one in threading.enumerate()}
    spent = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) not in own:
            try:
                spent += int((task / "schedstat").read_text().split()[0])
            except OSError:  # the thread has ended
                continue
    return spent / 1e9


class BusyDevice:
    """As `PacedDevice`, with moments that are the work done until then. For any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._built = 0.0
        self._done = 0.0
        self._awaited: list[float] = []
        self._marks: list[float] = []
        self.busy = 0.0
        """Seconds of all work that was launched."""
        self._per_second = len(_BLOCK) / _least(_hash)
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def build(self, seconds: float) -> None:
        """Adds work to what the next launch starts."""
        with self._changed:
            self._built += seconds

    def launch(self, held: float = 0.0) -> float:
        """Starts what was built; the work after which everything launched is done. The part `held` of it is
        going to be waited for."""
        with self._changed:
            if self._built > 0:
                self._marks.append(self.busy + held * self._built)
            self.busy += max(0.0, self._built)
            self._built = min(0.0, self._built)  # more was done already than was asked for
            self._changed.notify_all()
            return self.busy

    def wait(self, until: float) -> float:
        """Blocks until that work is done. Never late: returns 0."""
        with self._changed:
            until = min(until, self.busy)
            self._awaited.append(until)
            self._changed.wait_for(lambda: self._done + _ROUNDING >= until)
            self._awaited.remove(until)
        return 0.0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.busy > self._done + _ROUNDING)
                self._marks = [one for one in self._marks if one > self._done + _ROUNDING]
                ahead = [
                    one for one in (*self._awaited, *self._marks, self.busy) if one > self._done + _ROUNDING
                ]
            left = min(min(ahead) - self._done, _MOST_AT_ONCE)
            begun = time.thread_time()
            hashlib.sha256(
                memoryview(_ZEROS)[: max(4096, int(left * self._per_second))]
            ).digest()  # without Python's lock
            with self._changed:
                self._done += time.thread_time() - begun
                if any(one <= self._done + _ROUNDING for one in self._awaited):
                    self._changed.notify_all()


def _hash() -> None:
    hashlib.sha256(_BLOCK).digest()


def _least(work: object) -> float:
    times = []
    for _ in range(5):
        begun = time.thread_time()
        work()  # type: ignore[operator]
        times.append(time.thread_time() - begun)
    return max(min(times), 1e-6)
