"""Turns at what few may do at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary


class Turns:
    """Names take turns: each has one place in the queue, however many wait behind it under the same name."""

    def __init__(self, at_once: int) -> None:
        self._all = asyncio.Semaphore(at_once)
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Waits for the turn of a name, and holds it within the block."""
        own = self._own.setdefault(name, asyncio.Lock())
        async with own, self._all:
            yield
