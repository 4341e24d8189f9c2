"""A timer that counts looks, not seconds: after a machine slept one of them is due, not all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOKS = 30
"""Parts of a timer's time: sleep counts as one of them at most."""


class AwakeTimer:
    """Calls once, after `seconds` in which this process could run, unless it is cancelled before."""

    def __init__(self, seconds: float, call: Callable[[], object]) -> None:
        self._seconds = seconds
        self._call = call
        self._looks = 0
        self._wait()

    @property
    def left(self) -> float:
        """Seconds until the call, to within a look."""
        return self._seconds * (1 - self._looks / LOOKS)

    def cancelled(self) -> bool:
        return self._handle.cancelled()

    def cancel(self) -> None:
        """There is no call any more. Once more does nothing, nor does it after the call."""
        self._handle.cancel()

    def look(self) -> None:
        """A part of the time has passed."""
        self._looks += 1
        if self._looks < LOOKS:
            self._wait()
        else:
            self._call()

    def _wait(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self._seconds / LOOKS, self.look)
