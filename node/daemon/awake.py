"""Keeps a Mac awake while its node is in a ring: an idle Mac sleeps after minutes, and its ring is lost.

On battery only while rows are computed or an epoch forms: a MacBook that nobody asks may sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from sealring.mesh.system.power import Power, power
from sealring.mesh.system.starting import starting

log = structlog.get_logger()

CAFFEINATE = Path("/usr/bin/caffeinate")
"""Apple's program that holds off sleep while it runs. With -w it ends with this process, also after a crash.
On machines without it, nothing is done."""


class Awake:
    """Runs at most one `caffeinate`. Use it from one event loop."""

    def __init__(
        self,
        quiet: Callable[[], bool],
        *,
        power: Callable[[], Power] = power,
        program: Path = CAFFEINATE,
    ) -> None:
        """`quiet` says whether none of the node's rings does anything."""
        self._serves = False
        self._quiet = quiet
        self._power = power
        self._program = program if program.exists() else None
        self._process: asyncio.subprocess.Process | None = None
        self._refused = False
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process id of the program while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def follow(self, serves: bool) -> None:
        """Takes in whether the node is in a ring."""
        self._serves = serves
        await self.look()

    async def look(self) -> None:
        """Holds off idle sleep, and on mains power all sleep, if that is wanted now. Call it regularly."""
        if self._program is not None:  # a Mac
            await self._hold(self._serves and not (self._quiet() and self._power().on_battery))

    async def _hold(self, wanted: bool) -> None:
        async with self._turn:
            if not wanted:
                await self._end()
            elif self._process is None or self._process.returncode is not None:
                await self._begin()

    async def _begin(self) -> None:
        assert self._program is not None
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
        except OSError as error:
            if not self._refused:  # it is tried again at each look
                log.warning("sleep_not_prevented", why=error.strerror)
            self._refused = True
            return
        self._refused = False
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
