"""Calls under way, which end once their callers have no right to them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sealring.mesh.errors import SealringError


class RunningCalls:
    """Each runs in a task of its own. Use it from one event loop."""

    def __init__(self, refusal: Callable[[], SealringError]) -> None:
        """`refusal` makes the error with which a call ends."""
        self._refusal = refusal
        self._callers: dict[asyncio.Task[Any], str] = {}
        self._cut: set[asyncio.Task[Any]] = set()

    @property
    def callers(self) -> list[str]:
        """The callers, one name for each call."""
        return list(self._callers.values())

    @contextmanager
    def one(self, caller: str) -> Iterator[None]:
        """The block is a call in the current task. Raises the refusal once `end` has named its caller."""
        task = asyncio.current_task()
        assert task is not None
        self._callers[task] = caller
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._cut:
                raise
            # `end` cancelled the task, and the cancellation becomes an error here. Without `uncancel` the
            # task would still count as cancelled: a timeout around it would raise CancelledError instead of
            # TimeoutError.
            task.uncancel()
            raise self._refusal() from None
        finally:
            del self._callers[task]
            self._cut.discard(task)

    def end(self, caller: str) -> None:
        """Ends the calls of a caller, but not the one in which this is called."""
        current = asyncio.current_task()
        for task in [one for one, name in self._callers.items() if name == caller and one is not current]:
            self._cut.add(task)
            task.cancel()
