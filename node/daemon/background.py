"""Tasks that the coordinator's messages start and that no caller awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


class Background:
    """Tasks of one daemon. The log reports each that fails. Use it from one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends or `stop` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def idle(self) -> None:
        """Returns once no task is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # lets the callbacks of the ended tasks run

    async def stop(self) -> None:
        """Cancels every task and waits for its end."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("daemon_task_failed", exc_info=error)
