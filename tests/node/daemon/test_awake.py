"""Sleep is held off by one program, which ends when it is not needed any more."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from patience import until
from structlog.testing import capture_logs

from sealring.mesh.system.power import Power
from sealring.node.daemon.awake import Awake

MAINS = Power(on_battery=False, low=False)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that runs until it is ended."""
    path = tmp_path / "caffeinate"
    path.write_text("#!/bin/sh\nexec /bin/sleep 100000\n")
    path.chmod(0o700)
    return path


@pytest.fixture
async def awake(program: Path):
    made = Awake(lambda: False, power=lambda: MAINS, program=program)
    yield made
    await made.follow(False)


async def ended(awake: Awake) -> None:
    await until(lambda: awake.pid is None)


async def test_one_program_runs_for_as_long_as_it_is_wanted(awake: Awake) -> None:
    await asyncio.gather(awake.follow(True), awake.follow(True))
    first = awake.pid
    assert first is not None
    await awake.follow(True)
    assert awake.pid == first
    await awake.follow(False)
    assert not psutil.pid_exists(first)
    await awake.follow(False)
    await awake.follow(True)
    assert awake.pid != first


async def test_a_program_that_was_ended_is_started_again(awake: Awake) -> None:
    await awake.follow(True)
    first = awake.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await ended(awake)
    await awake.follow(True)
    assert awake.pid != first


async def test_it_ends_with_this_process_and_holds_off_idle_sleep(tmp_path: Path) -> None:
    program, told = tmp_path / "caffeinate", tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "$@" > {told}\n')
    program.chmod(0o700)
    awake = Awake(lambda: False, power=lambda: MAINS, program=program)
    await awake.follow(True)
    await ended(awake)
    assert told.read_text().split() == ["-i", "-s", "-w", str(os.getpid())]
    await awake.follow(False)


@pytest.mark.parametrize("mode", [None, 0o600])
async def test_where_there_is_no_such_program_nothing_happens(tmp_path: Path, mode: int | None) -> None:
    program = tmp_path / "caffeinate"
    if mode is not None:
        program.write_text("")
        program.chmod(mode)
    awake = Awake(lambda: False, power=lambda: MAINS, program=program)
    with capture_logs() as logs:
        await awake.follow(True)
        await awake.look()
        await awake.follow(False)
    assert awake.pid is None
    assert [line["event"] for line in logs] == ["sleep_not_prevented"] * (mode is not None)


async def test_on_battery_a_machine_that_nobody_asks_may_sleep(program: Path) -> None:
    quiet, battery = True, True
    awake = Awake(lambda: quiet, power=lambda: Power(battery, low=False), program=program)
    await awake.follow(True)
    assert awake.pid is None
    quiet = False
    await awake.look()
    assert awake.pid is not None, "rows are computed"
    quiet = True
    await awake.look()
    assert awake.pid is None
    battery = False
    await awake.look()
    assert awake.pid is not None, "on mains"
    battery = True
    await awake.look()
    assert awake.pid is None
    await awake.follow(False)
    quiet = False
    await awake.look()
    assert awake.pid is None, "in no ring"
