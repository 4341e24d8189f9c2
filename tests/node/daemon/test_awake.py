"""Sleep is held off by one program, which ends when it is not needed any more."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from sealring.node.daemon.awake import Awake


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that runs until it is ended."""
    path = tmp_path / "caffeinate"
    path.write_text("#!/bin/sh\nexec /bin/sleep 100000\n")
    path.chmod(0o700)
    return path


@pytest.fixture
async def awake(program: Path):
    made = Awake(program)
    yield made
    await made.hold(False)


async def ended(awake: Awake) -> None:
    async with asyncio.timeout(200):
        while awake.pid is not None:
            await asyncio.sleep(0.001)


async def test_one_program_runs_for_as_long_as_it_is_wanted(awake: Awake) -> None:
    await asyncio.gather(awake.hold(True), awake.hold(True))
    first = awake.pid
    assert first is not None
    await awake.hold(True)
    assert awake.pid == first
    await awake.hold(False)
    assert not psutil.pid_exists(first)
    await awake.hold(False)
    await awake.hold(True)
    assert awake.pid != first


async def test_a_program_that_was_ended_is_started_again(awake: Awake) -> None:
    await awake.hold(True)
    first = awake.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await ended(awake)
    await awake.hold(True)
    assert awake.pid != first


async def test_it_ends_with_this_process_and_holds_off_idle_sleep(tmp_path: Path) -> None:
    program, told = tmp_path / "caffeinate", tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "$@" > {told}\n')
    program.chmod(0o700)
    awake = Awake(program)
    await awake.hold(True)
    await ended(awake)
    assert told.read_text().split() == ["-i", "-s", "-w", str(os.getpid())]
    await awake.hold(False)


@pytest.mark.parametrize("mode", [None, 0o600])
async def test_where_there_is_no_such_program_nothing_happens(tmp_path: Path, mode: int | None) -> None:
    program = tmp_path / "caffeinate"
    if mode is not None:
        program.write_text("")
        program.chmod(mode)
    awake = Awake(program)
    await awake.hold(True)
    await awake.hold(False)
    assert awake.pid is None
