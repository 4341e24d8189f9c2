"""The benchmark of many members ends when a session is lost."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import psutil
import pytest

from bench import members


async def test_a_session_that_is_lost_ends_the_measurement() -> None:
    class Lost:
        challenges = 0

        async def come(self, address: str) -> None:
            pass

        async def beat(self) -> None:
            await asyncio.Event().wait()

        async def listen(self) -> None:
            raise RuntimeError("the coordinator ended a session")

    options = argparse.Namespace(rosters=0, seconds=200)
    given: Any = [Lost()]
    settings: Any = argparse.Namespace(listen="")
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await members.measure_sessions(settings, given, psutil.Process(), options)
