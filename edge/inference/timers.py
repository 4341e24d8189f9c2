"""Timers that count looks, not seconds: after a machine slept one look is due, not all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SEND_SECONDS = 60.0
"""How long a client may leave its connection's buffers full."""

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


class SendWatch:
    """Within the block, cancels its task, once, when a send takes `SEND_SECONDS`; `stuck` tells that it did.

    One timer watches all of a stream's sends: nearly all of them end before it looks.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sending = False
        self._looks = 0
        self.stuck = False

    def __enter__(self) -> SendWatch:
        self._task = asyncio.current_task()
        self._wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    @property
    def sending(self) -> bool:
        """Whether a send is under way."""
        return self._sending

    def begin(self) -> None:
        """A send begins."""
        self._sending, self._looks = True, 0

    def end(self) -> None:
        """The client, or a buffer on the way to it, took all."""
        self._sending = False

    def _wait(self) -> None:
        self._timer = self._loop.call_later(SEND_SECONDS / LOOKS, self.look)

    def look(self) -> None:
        self._looks += self._sending
        if self._looks <= LOOKS:
            self._wait()
        elif self._task is not None:
            self.stuck = True
            self._task.cancel()
