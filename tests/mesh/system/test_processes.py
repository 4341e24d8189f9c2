from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused
from structlog.testing import capture_logs

from sealring.mesh.errors import PermissionDenied
from sealring.mesh.system import processes
from sealring.mesh.system.lock import lock_state
from sealring.mesh.system.processes import (
    allow_open_files,
    first_of,
    run_enrolled,
    signal_group,
    stop_on_signals,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_and_does_not_kill(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        handler = signal.getsignal(number)
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        async with asyncio.timeout(200):
            await stop.wait()
    assert signal.getsignal(number) != handler


async def test_whoever_is_thrown_out_ends_cleanly(tmp_path: Path) -> None:
    """Else a supervisor would start it again and again."""

    async def serve(stop: asyncio.Event) -> None:
        raise PermissionDenied("evicted", hint="join again", reason="REMOVED")

    with capture_logs() as logs:
        await run_enrolled(tmp_path, serve)
    assert [(one["event"], one["hint"]) for one in logs] == [("removed_from_cluster", "join again")]


async def test_another_refusal_is_an_error(tmp_path: Path) -> None:
    async def serve(stop: asyncio.Event) -> None:
        raise PermissionDenied("something else")

    with pytest.raises(PermissionDenied):
        await run_enrolled(tmp_path, serve)


async def test_the_state_is_locked_while_it_serves(tmp_path: Path) -> None:
    async def serve(stop: asyncio.Event) -> None:
        with refused("STATE_IN_USE"), lock_state(tmp_path):
            pass
        served.set()

    served = asyncio.Event()
    await run_enrolled(tmp_path, serve)
    assert served.is_set()
    with lock_state(tmp_path):
        pass


async def test_what_ends_first_ends_the_others() -> None:
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("a fault")

    async with asyncio.timeout(200):
        await first_of(waits(), asyncio.sleep(0))
        assert ended == ["waits"]
        with pytest.raises(ValueError, match="a fault"):
            await first_of(waits(), fails())
    assert ended == ["waits", "waits"]


@pytest.mark.parametrize("reaped", [True, False])
def test_a_group_that_has_ended_gets_no_signal(reaped: bool) -> None:
    """macOS reports EPERM for a group of zombies (tests/test_darwin.py runs this so)."""
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        signal_group(process.pid, signal.SIGKILL)


class System:
    """Limits on open files. What is above `most` is refused, as above OPEN_MAX on some Macs."""

    RLIMIT_NOFILE, RLIM_INFINITY = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY

    def __init__(self, soft: int, hard: int, most: int = 1 << 30) -> None:
        self.now, self.most = (soft, hard), most

    def getrlimit(self, which: int) -> tuple[int, int]:
        assert which == self.RLIMIT_NOFILE
        return self.now

    def setrlimit(self, which: int, wanted: tuple[int, int]) -> None:
        assert which == self.RLIMIT_NOFILE
        if not 0 <= wanted[0] <= self.most:
            raise ValueError
        self.now = wanted


@pytest.mark.parametrize(
    ("limits", "soft"),
    [
        (System(256, resource.RLIM_INFINITY), 16384),
        (System(256, 1 << 20), 16384),
        (System(256, 9000), 9000),
        (System(256, resource.RLIM_INFINITY, most=10240), 10240),
        (System(256, resource.RLIM_INFINITY, most=5000), 4096),
        (System(256, resource.RLIM_INFINITY, most=300), 256),
        (System(20000, resource.RLIM_INFINITY), 20000),
        (System(8192, resource.RLIM_INFINITY, most=9000), 8192),
        (System(resource.RLIM_INFINITY, resource.RLIM_INFINITY), resource.RLIM_INFINITY),
        (System(128, 128), 128),
    ],
)
def test_the_limit_on_open_files_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, limits: System, soft: int
) -> None:
    hard = limits.now[1]
    monkeypatch.setattr(processes, "resource", limits)
    assert allow_open_files() == soft
    assert limits.now == (soft, hard)
