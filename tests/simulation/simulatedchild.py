"""The double of a child process: what `node.daemon.supervisor.Child` is to a daemon, in virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import signal
from collections.abc import Callable
from functools import partial
from typing import Protocol

from sealring.mesh.clock import awake_clock
from sealring.node.daemon.supervisor import child_ended

_EXIT_SECONDS = 0.01
_TERM_SECONDS = 2.0
_UNREAD_BYTES = 1 << 18


class Program(Protocol):
    """What runs in a child."""

    def begin(self) -> None: ...

    def take(self, body: bytes) -> None:
        """Takes a command of the daemon."""

    def gone(self) -> None:
        """The process has ended, and its machine closes what it had open."""

    def vanish(self) -> None:
        """The machine has lost its power: nobody closes anything, and nobody hears of it."""


class SimulatedChild:
    """One child process; all its callbacks run in the context in which it was spawned."""

    def __init__(
        self,
        name: str,
        pid: int,
        on_message: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self.name, self.pid = name, pid
        self.ended = False
        self.status: int | None = None
        self.frozen = False
        self.program: Program
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self.last_heard = awake_clock()
        self._on_message = on_message
        self._on_end: Callable[[], None] | None = on_end
        self._held: list[Callable[[], None]] = []
        self._unread = 0
        self._readable = asyncio.Event()
        self._readable.set()
        self._over = asyncio.Event()
        self._stopping: asyncio.Task[int] | None = None

    # As the daemon sees it

    def send(self, body: bytes) -> None:
        if self.ended:
            raise child_ended(self.name)
        self._unread += len(body)
        if self._unread > _UNREAD_BYTES:
            self._readable.clear()
        self.do(partial(self._take, body))

    async def drained(self) -> None:
        await self._readable.wait()

    def kill(self) -> None:
        self.ended = True
        self.exit(-signal.SIGKILL)

    async def stop(self, farewell: bytes | None = None, *, grace: float = 0.0) -> int:
        if self._stopping is None:
            self._stopping = self._loop.create_task(self._stop(grace))
        return await asyncio.shield(self._stopping)

    def cpu_seconds(self) -> float | None:
        return 0.0 if self.frozen else None

    def stopped_at(self) -> float | None:
        return 0.0 if self.frozen else None

    async def _stop(self, grace: float) -> int:
        self._on_end = None
        self.ended = True
        self._readable.set()
        if self.status is None:
            await asyncio.sleep(grace + _TERM_SECONDS if self.frozen else _EXIT_SECONDS)
            self.exit(-signal.SIGKILL if self.frozen else 0)
        await self._over.wait()
        assert self.status is not None
        return self.status

    # As its program does

    def says(self, event: bytes) -> None:
        """Sends the daemon an event."""
        self._soon(partial(self._hear, event))

    def do(self, work: Callable[[], None]) -> None:
        """Does this soon; once it is thawed, if it is frozen."""
        if self.status is None:
            self._soon(partial(self._run, work))

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Does this after a time."""
        if self.status is None:
            self._loop.call_later(seconds, self._run, work, context=self._context)

    def exit(self, status: int) -> None:
        """Ends the process."""
        if self.status is not None:
            return
        self.status = status
        self._held.clear()
        self.program.gone()
        self._soon(self._socket_ended)

    # As the simulation does

    def crash(self, status: int = -signal.SIGKILL) -> None:
        """Somebody kills it."""
        self.exit(status)

    def freeze(self) -> None:
        """Stops it, as SIGSTOP does."""
        self.frozen = True

    def thaw(self) -> None:
        """Lets it go on."""
        self.frozen = False
        held, self._held = self._held, []
        for work in held:
            self._soon(partial(self._run, work))

    def vanish(self) -> None:
        """Its machine has lost its power."""
        if self.status is None:
            self.status, self.ended, self._on_end = -signal.SIGKILL, True, None
            self._held.clear()
            self._over.set()
            self.program.vanish()

    def _soon(self, work: Callable[[], None]) -> None:
        self._loop.call_soon(work, context=self._context)

    def _run(self, work: Callable[[], None]) -> None:
        if self.status is not None:
            return
        if self.frozen:
            self._held.append(work)
        else:
            work()

    def _take(self, body: bytes) -> None:
        self._unread -= len(body)
        if self._unread <= _UNREAD_BYTES // 2:
            self._readable.set()
        self.program.take(body)

    def _hear(self, event: bytes) -> None:
        if not self.ended:
            self.last_heard = awake_clock()
            self._on_message(event)

    def _socket_ended(self) -> None:
        self.ended = True
        self._readable.set()
        self._over.set()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
