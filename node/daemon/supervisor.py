"""Child processes: spawned with few privileges, watched, and never left behind.

A child exchanges length-prefixed frames (`node/wire/frames.py`) over one private socket. The socket ends with
the daemon, and the child exits then, on Linux and macOS alike. A child has its own process group: Ctrl-C in
a terminal reaches the daemon alone, and grandchildren end with the child.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import psutil  # type: ignore[import-untyped]
import structlog

from sealring.mesh.clock import awake_clock
from sealring.mesh.errors import DeadlineExceeded, EpochEnded, InvalidInput
from sealring.mesh.system.processes import signal_group
from sealring.mesh.system.starting import starting
from sealring.node.daemon.childlog import ChildLog
from sealring.node.wire.frames import LENGTH, MAX_FRAME, socket_pair

log = structlog.get_logger()

T = TypeVar("T")

_TERM_GRACE_SECONDS = 2.0
_EXIT_GRACE_SECONDS = 1.0
LOOK_SECONDS = 1.0
STOPPED_LOOKS = 2
"""A child that is stopped at this many checks in a row, without work in between, is frozen."""

IDLE_SHARE = 3 / 8
"""After this share of its deadline a silent child is frozen if it has used no processor. A slow child has
used one, or waits for one."""

_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "HF_HOME", "HF_HUB_CACHE")
_PASSED_ON_FOR_DEVICES = (
    *("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    *("NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME"),  # of a tensor ring's group
)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child, without secrets and without Python's switches."""
    kept = variables((*_PASSED_ON, *_PASSED_ON_FOR_DEVICES))
    return {**kept, "TOKENIZERS_PARALLELISM": "false", **extra}


def variables(names: Sequence[str]) -> dict[str, str]:
    """The named environment variables that are set, to pass on to a child."""
    return {name: os.environ[name] for name in names if name in os.environ}


class Child:
    """One running child process. Use it from one event loop.

    `on_message` receives the body of every frame from the child. `on_end` is called once, as soon as the
    child's socket ends: by an exit, a crash, a kill or a broken frame.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        on_message: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self.name = name
        self._process = process
        self._on_message = on_message
        self._on_end: Callable[[], None] | None = on_end
        self._frames = Frames(self._message, self._socket_ended)
        self._loop = asyncio.get_running_loop()
        self.last_heard = awake_clock()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[int] | None = None

    @classmethod
    async def spawn(
        cls,
        name: str,
        arguments: Sequence[str],
        *,
        on_message: Callable[[bytes], None],
        on_end: Callable[[], None],
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts `python ARGUMENTS --control-fd N`. The child inherits `descriptors` and nothing else.

        The caller keeps its own copies of `descriptors` and closes them. Raises OSError.
        """
        ours, theirs = socket_pair()
        with theirs:
            try:
                with starting():
                    process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-P",
                        *arguments,
                        "--control-fd",
                        str(theirs.fileno()),
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=asyncio.subprocess.DEVNULL,
                        stderr=asyncio.subprocess.PIPE,
                        pass_fds=(theirs.fileno(), *descriptors),
                        process_group=0,
                        env=child_environment(environment or {}),
                    )
            except BaseException:
                ours.close()
                raise
        child = cls(name, process, on_message, on_end)
        try:
            await child._begin(ours)
        except BaseException:
            ours.close()
            await child.stop()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the child's socket has ended. Nothing can be sent then."""
        return self._frames.closed

    def cpu_seconds(self) -> float | None:
        """Its processor seconds; None while it waits for a processor, or if unknown."""
        return cpu_seconds(self.pid)

    def stopped_at(self) -> float | None:
        """Its processor seconds if a signal or a debugger has stopped it, else None."""
        return stopped_at(self.pid)

    def send(self, body: bytes) -> None:
        """Queues one frame. Raises EpochEnded (CHILD_ENDED) when the child is gone."""
        if self.ended:
            raise child_ended(self.name)
        self._frames.send(body)

    async def drained(self) -> None:
        """Waits while the child is behind in reading. Returns also when the child is gone."""
        await self._frames.writable.wait()

    def kill(self) -> None:
        """Ends the child's process group at once. `stop` still has to be awaited."""
        self._signal(signal.SIGKILL)
        self._frames.close()

    async def stop(self, farewell: bytes | None = None, *, grace: float = 0.0) -> int:
        """Ends the child: `farewell` and the end of its socket, SIGTERM after `grace` s, then SIGKILL.

        Returns the exit status (negative: the signal's number) once the process is reaped and every
        descriptor is closed. May be called any number of times and survives the caller's cancellation.
        """
        if self._stopping is None:
            self._stopping = self._loop.create_task(self._stop(farewell, grace))
        return await asyncio.shield(self._stopping)

    async def _begin(self, ours: socket.socket) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        self._tasks.append(self._loop.create_task(ChildLog(self.name, self.pid).follow(stderr)))
        ours.setblocking(False)
        await self._loop.create_connection(lambda: self._frames, sock=ours)

    def _message(self, body: bytes) -> None:
        self.last_heard = awake_clock()
        self._on_message(body)

    def _socket_ended(self) -> None:
        on_end, self._on_end = self._on_end, None
        if self._stopping is None:
            self._stopping = self._loop.create_task(self._stop(None, _EXIT_GRACE_SECONDS))
        if on_end is not None:
            on_end()

    async def _stop(self, farewell: bytes | None, grace: float) -> int:
        self._on_end = None
        if farewell is not None and not self.ended:
            self._frames.send(farewell)
        self._frames.close()
        steps = ((grace, signal.SIGTERM), (_TERM_GRACE_SECONDS, signal.SIGKILL))
        for patience, sign in steps:
            if await self._exits_within(patience):
                break
            self._signal(sign)
        status = await self._process.wait()
        self._kill_leftovers()
        for task in self._tasks:
            await finish(task)
        log.info("child_ended", child=self.name, pid=self.pid, status=status)
        return status

    async def _exits_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _signal(self, sign: signal.Signals) -> None:
        if self._process.returncode is None:
            signal_group(self.pid, sign)

    def _kill_leftovers(self) -> None:
        """Kills grandchildren: a process group outlives its leader."""
        signal_group(self.pid, signal.SIGKILL)


Spawn: TypeAlias = Callable[..., Awaitable[Child]]
"""Starts a child, as `Child.spawn` does."""


class Frames(asyncio.Protocol):
    """Splits a socket's bytes into frames and passes them on. `buffer` holds an unfinished frame."""

    def __init__(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self.buffer = bytearray()
        self.closed = False
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        start = 0
        try:
            while (end := _frame_end(self.buffer, start)) is not None:
                body = bytes(self.buffer[start + LENGTH.size : end])
                start = end
                self._on_message(body)
        except Exception as error:
            log.error("child_protocol_error", kind=type(error).__name__, exc_info=True)
            self._abort()
            return
        if start:
            del self.buffer[:start]

    def connection_lost(self, _error: Exception | None) -> None:
        self.closed = True
        self.writable.set()
        self._on_end()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def send(self, body: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.writelines((LENGTH.pack(len(body)), body))

    def close(self) -> None:
        self.closed = True
        self.writable.set()
        if self._transport is not None:
            if self._transport.get_write_buffer_size():
                self._abort_later()
            self._transport.close()

    def _abort_later(self) -> None:
        """Closes the socket later even if the child reads no more."""
        transport = self._transport
        assert transport is not None
        asyncio.get_running_loop().call_later(_TERM_GRACE_SECONDS, transport.abort)

    def _abort(self) -> None:
        self.closed = True
        self.buffer.clear()
        if self._transport is not None:
            self._transport.abort()


def _frame_end(buffer: bytearray, start: int) -> int | None:
    """The end of the frame that begins at `start`, or None while it is incomplete."""
    if len(buffer) - start < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(buffer, start)
    if length > MAX_FRAME:
        raise InvalidInput(f"a frame of {length} bytes is above {MAX_FRAME}", reason="FRAME_TOO_LARGE")
    end = start + LENGTH.size + int(length)
    return end if end <= len(buffer) else None


def child_ended(name: str) -> EpochEnded:
    return EpochEnded(
        f"the {name} process ended", hint="see the node's log; the ring is formed anew", reason="CHILD_ENDED"
    )


async def within(future: asyncio.Future[T], seconds: float, what: str, reason: str) -> T:
    """The child's answer. Raises DeadlineExceeded with `reason`, and the future's exception."""
    try:
        async with asyncio.timeout(seconds):
            return await future
    except TimeoutError:
        raise DeadlineExceeded(
            f"{what} took longer than {seconds:g} s", hint="see the node's log", reason=reason
        ) from None


async def finish(task: asyncio.Task[None]) -> None:
    """Ends the reading of a pipe that a grandchild may hold open."""
    done, _ = await asyncio.wait((task,), timeout=_EXIT_GRACE_SECONDS)
    if not done:
        task.cancel()
        await asyncio.wait((task,))


class Liveness:
    """Pings a child and calls `on_frozen` when it is silent for too long. Every frame is a sign of life.

    `ping` makes the body of a ping from a rising number. A stopped process (SIGSTOP, a debugger) and a silent
    one that uses no processor time are found sooner: a slow machine causes neither.
    """

    def __init__(self, child: Child, ping: Callable[[int], bytes], on_frozen: Callable[[], None]) -> None:
        self._child = child
        self._ping = ping
        self._on_frozen = on_frozen
        self._sequence = 0
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self, *, interval: float, deadline: float) -> None:
        """Pings every `interval` seconds; the child is frozen after `deadline` seconds of silence."""
        self.stop()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run(interval, deadline)), loop.create_task(self._look())]

    def look(self) -> None:
        """Stops pings and checks only whether the process is stopped: it may be too busy to answer."""
        self.stop()
        self._tasks = [asyncio.get_running_loop().create_task(self._look())]

    def stop(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks = []

    async def _run(self, interval: float, deadline: float) -> None:
        while not self._child.ended:
            sent = awake_clock()
            self._sequence += 1
            self._child.send(self._ping(self._sequence))
            due, end = sent + min(interval, deadline), sent + deadline
            seconds, worked_at = self._child.cpu_seconds(), sent
            while (now := awake_clock()) < due or (self._child.last_heard < sent and not self._child.ended):
                before, seconds = seconds, self._child.cpu_seconds()
                if seconds is None or seconds != before:
                    worked_at = now
                idle = self._child.last_heard < sent and now >= worked_at + deadline * IDLE_SHARE
                if idle or now >= end:
                    self._frozen("silent")
                    return
                await asyncio.sleep(min(1.0, due - now) if now < due else min(0.25, end - now))

    async def _look(self) -> None:
        looks, seen = 0, -1.0
        while not self._child.ended:
            await asyncio.sleep(LOOK_SECONDS)
            worked = self._child.stopped_at()
            # A child that has used CPU since the last look was stopped only for a moment.
            looks = looks + 1 if worked is not None and worked == seen else 0
            seen = -1.0 if worked is None else worked
            if looks >= STOPPED_LOOKS and not self._child.ended:
                self._frozen("stopped")
                return

    def _frozen(self, how: str) -> None:
        log.error("child_frozen", how=how, child=self._child.name, pid=self._child.pid)
        self.stop()
        self._on_frozen()


def cpu_seconds(pid: int) -> float | None:
    """Processor seconds of a process; None while it waits for a processor, or if unknown.

    macOS does not show which processes wait.
    """
    try:
        process = psutil.Process(pid)
        if sys.platform == "darwin" or process.status() != psutil.STATUS_RUNNING:
            return float(sum(process.cpu_times()[:2]))
    except psutil.Error:
        pass
    return None


def stopped_at(pid: int) -> float | None:
    """Processor seconds of a process that a signal or a debugger has stopped; None if it is not stopped."""
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return float(sum(process.cpu_times()[:2]))
    except psutil.Error:
        pass
    return None
