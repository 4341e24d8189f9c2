"""The processes of a local cluster: started in groups of their own, watched, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]

from sealring.cli.terminal.host import Host
from sealring.mesh.errors import SealringError, Unavailable
from sealring.mesh.member.roster_keeper import removed
from sealring.mesh.system.processes import signal_group
from sealring.mesh.system.starting import starting

T = TypeVar("T")

TERM_SECONDS = 6.0
REAP_SECONDS = 3.0
MAX_LOG_BYTES = 10 << 20
_REMOVED = "removed_from_cluster"
"""What a component logs last that ends because its machine was thrown out (`run_enrolled`)."""

_TAIL_LINES = 12
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True)
class Child:
    """One running component; what it writes goes to `log`, from byte `begins` on."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    begins: int


class Children:
    """Starts and ends the components. Each ends with this process (`processes.die_with_parent`)."""

    def __init__(
        self,
        log_dir: Path,
        *,
        command: Sequence[str] = Host.components,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is added to what the children inherit of this process's."""
        self._log_dir = log_dir
        self._environment = _inherited() | dict(environment or {})
        self.command = command
        """What is started from now on, before the arguments."""
        self._children: dict[str, Child] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] | None = None
        self._stopping = False
        self._expected: set[int] = set()
        self._read_end, self._write_end = os.pipe()

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each component that was started."""
        return {name: child.process.pid for name, child in self._children.items()}

    @property
    def logs(self) -> dict[str, Path]:
        """The log file of each component that was started."""
        return {name: child.log for name, child in self._children.items()}

    async def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts `sealring ARGUMENTS --die-with-parent-fd N` in a session of its own.

        `environment` is added to what every component gets.
        """
        log = self._log_dir / f"{name}.log"
        _move_aside(log)
        with log.open("ab") as out:
            begins = out.tell()
            with starting():
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    *arguments,
                    "--die-with-parent-fd",
                    str(self._read_end),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=self._environment | dict(environment or {}),
                    pass_fds=[self._read_end],
                    start_new_session=True,
                )
        child = Child(name, process, log, begins)
        self._children[name] = child
        task = asyncio.create_task(self._watch(child))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    def child(self, name: str) -> Child:
        """A component as it was started last, whether it runs or not."""
        return self._children[name]

    def expect_end(self, name: str) -> asyncio.subprocess.Process:
        """The process of a component, whose end is no failure from now on."""
        process = self._children[name].process
        self._expected.add(process.pid)
        return process

    async def kill_one(self, name: str) -> None:
        """SIGKILL to one component, as a crash or a power cut would be."""
        process = self.expect_end(name)
        _signal(self._children[name], signal.SIGKILL)
        await process.wait()

    async def stop_one(self, name: str) -> None:
        """SIGTERM to one component, as a supervisor does; returns when it has ended."""
        process = self.expect_end(name)
        process.send_signal(signal.SIGTERM)
        await process.wait()

    async def failed(self) -> None:
        """Raises Unavailable (COMPONENT_ENDED) with its log's last lines once a component ends by itself, or
        PermissionDenied (REMOVED) where that is because the cluster has thrown it out."""
        await asyncio.shield(self._future())

    async def or_failure(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless a component ends first. Raises as `failed`, and what `work` raises."""
        task = asyncio.ensure_future(work)
        failure = asyncio.ensure_future(self.failed())
        try:
            await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                failure.result()
            return await task
        except SealringError:
            await asyncio.sleep(0.1)  # a component that has just ended explains the error
            if failure.done():
                failure.result()
            raise
        finally:
            for one in (task, failure):
                one.cancel()
            await asyncio.gather(task, failure, return_exceptions=True)

    async def stop(self) -> None:
        """Ends everything: SIGTERM, gateway first, then SIGKILL, until no descendant is left."""
        if self._stopping:
            return
        self._stopping = True
        family = _descendants(self._children.values())
        for wave in _waves(list(self._children.values())):
            for child in wave:
                _signal(child, signal.SIGTERM)
            await _wait_all(wave, TERM_SECONDS)
        self.kill()
        await _wait_all(list(self._children.values()), 2.0)
        await asyncio.to_thread(_reap, family)
        for task in list(self._watchers):
            task.cancel()
        for descriptor in (self._write_end, self._read_end):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def kill(self) -> None:
        """SIGKILL to every group that is still there."""
        for child in self._children.values():
            _signal(child, signal.SIGKILL)

    def _future(self) -> asyncio.Future[None]:
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
            self._failure.add_done_callback(lambda future: future.cancelled() or future.exception())
        return self._failure

    async def _watch(self, child: Child) -> None:
        status = await child.process.wait()
        future = self._future()
        if self._stopping or future.done() or child.process.pid in self._expected:
            return
        said = tail(child.log, child.begins)
        if status == 0 and _REMOVED in said:
            future.set_exception(removed())
            return
        how = f"signal {-status}" if status < 0 else f"status {status}"
        future.set_exception(
            Unavailable(
                f"the {child.name} ended by itself with {how}; the end of {child.log}:\n{said}",
                hint="its whole log is there; a demo keeps it with --state-dir",
                reason="COMPONENT_ENDED",
                component=child.name,
            )
        )


def _move_aside(log: Path) -> None:
    """A log that has grown large begins anew when its component does; one old one is kept."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > MAX_LOG_BYTES:
            os.replace(log, log.with_suffix(".log.1"))


def tail(log: Path, begins: int = 0) -> str:
    """The last lines of a log after its byte `begins`, indented, as far as they are there."""
    try:
        with log.open("rb") as file:
            file.seek(max(begins, log.stat().st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join(f"  {line[:400]}" for line in lines) or "  (nothing)"


def _inherited() -> dict[str, str]:
    """This process's environment without settings of sealring: the cluster's config files say it all."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}


def _waves(children: list[Child]) -> list[list[Child]]:
    """Gateways stop first, while they can still answer clients; the coordinator stops last, after the nodes
    that report to it."""
    ranks = {"gateway": 0, "proxy": 0, "node": 1}
    waves: dict[int, list[Child]] = {}
    for child in children:
        waves.setdefault(ranks.get(child.name.split("-")[0], 2), []).append(child)
    return [waves[rank] for rank in sorted(waves)]


async def _wait_all(children: list[Child], seconds: float) -> None:
    if children:
        await asyncio.wait([asyncio.ensure_future(one.process.wait()) for one in children], timeout=seconds)


def _signal(child: Child, number: signal.Signals) -> None:
    """A signal to the child's group. Once the child has been reaped, its number may be another's."""
    if child.process.returncode is None:
        signal_group(child.process.pid, number)


def _descendants(children: Iterable[Child]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in children:
        if child.process.returncode is None:
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(child.process.pid).children(recursive=True)
    return found


def _reap(family: list[psutil.Process]) -> None:
    """Engines and carriers end with their daemon; what has not after a moment is killed."""
    _, alive = psutil.wait_procs(family, timeout=REAP_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=REAP_SECONDS)
