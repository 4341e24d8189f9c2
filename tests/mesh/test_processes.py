from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mesh.errors import PermissionDenied, SealringError
from mesh.processes import first_of, run_enrolled, stop_on_signals
from mesh.statelock import lock_state


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_and_does_not_kill(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        handler = signal.getsignal(number)
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 200)
    assert signal.getsignal(number) != handler


async def test_whoever_is_thrown_out_ends_cleanly(tmp_path: Path) -> None:
    """Else a supervisor would start it again and again."""

    async def serve(stop: asyncio.Event) -> None:
        raise PermissionDenied("evicted", hint="join again", reason="REMOVED")

    with capture_logs() as logs:
        await run_enrolled(tmp_path, serve)
    assert [(one["event"], one["hint"]) for one in logs] == [("removed from the cluster", "join again")]


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
