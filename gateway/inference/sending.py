"""Clients that do not read their answers are given up."""

from __future__ import annotations

import asyncio

SEND_SECONDS = 60.0
"""How long a client may leave its connection's buffers full."""


class SendWatch:
    """Within the block, cancels its task, once, when a send takes `SEND_SECONDS`; `stuck` tells that it did.

    One timer watches all of a stream's sends: nearly all of them end at once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = 0.0
        self.stuck = False

    def __enter__(self) -> SendWatch:
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(SEND_SECONDS, self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    @property
    def sending(self) -> bool:
        """Whether a send is under way."""
        return bool(self._since)

    def begin(self) -> None:
        """A send begins."""
        self._since = self._loop.time()

    def end(self) -> None:
        """The client, or a buffer on the way to it, took all."""
        self._since = 0.0

    def _look(self) -> None:
        left = self._since + SEND_SECONDS - self._loop.time() if self._since else SEND_SECONDS
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif self._task is not None:
            self.stuck = True
            self._task.cancel()
