"""Keeps a Mac awake while its node is in a ring: an idle Mac sleeps after minutes, and its ring is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import structlog

from sealring.mesh.system.starting import starting

log = structlog.get_logger()

CAFFEINATE = Path("/usr/bin/caffeinate")
"""Apple's program that holds off sleep while it runs. With -w it ends with this process, also after a crash.
On machines without it, nothing is done."""


class Awake:
    """Runs at most one `caffeinate`. Use it from one event loop."""

    def __init__(self, program: Path = CAFFEINATE) -> None:
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process id of the program while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def hold(self, wanted: bool) -> None:
        """Holds off idle sleep, and on mains power all sleep, while `wanted`. May be repeated."""
        async with self._turn:
            if not wanted:
                await self._end()
            elif self._process is None or self._process.returncode is not None:
                await self._begin()

    async def _begin(self) -> None:
        try:
            with starting():
                self._process = await asyncio.create_subprocess_exec(
                    self._program,
                    *("-i", "-s", "-w", str(os.getpid())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    process_group=0,
                    env={},
                )
        except FileNotFoundError:  # not a Mac
            return
        except OSError as error:
            log.warning("sleep_not_prevented", why=error.strerror)
            return
        log.info("sleep_prevented", pid=self._process.pid)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await process.wait()
        log.info("sleep_allowed")
