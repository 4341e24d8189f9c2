from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sealring.mesh.errors import PermissionDenied, SealringError
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
        with pytest.raises(SealringError) as raised, lock_state(tmp_path):
            pass
        assert raised.value.reason == "STATE_IN_USE"
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


@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
def test_a_group_that_has_ended_gets_no_signal(monkeypatch: pytest.MonkeyPatch, error: type[OSError]) -> None:
    """macOS reports EPERM for a group of zombies."""
    sent: list[tuple[int, int]] = []

    def ended(group: int, number: int) -> None:
        sent.append((group, number))
        raise error

    monkeypatch.setattr(os, "killpg", ended)
    signal_group(77, signal.SIGKILL)
    assert sent == [(77, signal.SIGKILL)]


class Limits:
    """A system's limits on open files. What is above `most` is refused, as above OPEN_MAX on some Macs."""

    def __init__(self, soft: int, hard: int, most: int = 1 << 30) -> None:
        self.now, self.most = (soft, hard), most

    def get(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.now

    def set(self, which: int, wanted: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE
        if not 0 <= wanted[0] <= self.most:
            raise ValueError
        self.now = wanted


@pytest.mark.parametrize(
    ("limits", "soft"),
    [
        (Limits(256, resource.RLIM_INFINITY), 16384),
        (Limits(256, 1 << 20), 16384),
        (Limits(256, 9000), 9000),
        (Limits(256, resource.RLIM_INFINITY, most=10240), 10240),
        (Limits(256, resource.RLIM_INFINITY, most=5000), 4096),
        (Limits(256, resource.RLIM_INFINITY, most=300), 256),
        (Limits(20000, resource.RLIM_INFINITY), 20000),
        (Limits(8192, resource.RLIM_INFINITY, most=9000), 8192),
        (Limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY), resource.RLIM_INFINITY),
        (Limits(128, 128), 128),
    ],
)
def test_the_limit_on_open_files_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, soft: int
) -> None:
    hard = limits.now[1]
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.set)
    assert allow_open_files() == soft
    assert limits.now == (soft, hard)
