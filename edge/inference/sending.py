"""Clients that do not read their answers are given up."""

from __future__ import annotations

import asyncio

SEND_SECONDS = 60.0
"""How long a client may leave its connection's buffers full."""

_LOOKS = 30
"""In that time. Looks are counted, not seconds: after a machine slept one of them is due, not all."""


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
        self._timer = self._loop.call_later(SEND_SECONDS / _LOOKS, self.look)

    def look(self) -> None:
        self._looks += self._sending
        if self._looks <= _LOOKS:
            self._wait()
        elif self._task is not None:
            self.stuck = True
            self._task.cancel()
