"""Waiting for what must come: as long as only something that hangs takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_SECONDS = 200


async def until(check: Callable[[], object], *, pause: float = 0.01) -> None:
    """Returns when it holds, which is looked at every `pause` seconds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not check():
            await asyncio.sleep(pause)
