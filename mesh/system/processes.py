"""How long-running processes start and end: by a signal, by a part that fails, or by an eviction."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import structlog

from sealring.mesh.errors import PermissionDenied
from sealring.mesh.system.lock import lock_state

log = structlog.get_logger()

_OPEN_FILES = (16384, 10240, 4096)
"""Limits to try, highest first. The second is OPEN_MAX, above which macOS may refuse."""


def allow_open_files() -> int:
    """Raises the soft limit on open files towards 16384, never above the hard one; returns the result.

    A terminal on macOS gives 256, which a few hundred connections use up. Children inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _OPEN_FILES:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return limit
    return soft


def signal_group(group: int, number: signal.Signals) -> None:
    """Sends a signal to a process group; has no effect if it has ended.

    For a group whose processes have all ended but were not reaped, macOS reports EPERM instead of ESRCH.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """The event that SIGTERM and SIGINT set until the end of the block, in the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def first_of(*work: Coroutine[Any, Any, Any]) -> None:
    """Runs all coroutines until one ends, then cancels the others. Raises the error of the first."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def run_enrolled(folder: Path, serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Serves with the state folder locked, until SIGTERM, SIGINT or eviction.

    Raises Conflict (STATE_IN_USE), and the errors of `serve` except PermissionDenied (REMOVED).
    """
    try:
        with stop_on_signals() as stop, lock_state(folder):
            await serve(stop)
    except PermissionDenied as error:
        if error.reason != "REMOVED":
            raise
        # A success towards whoever supervises this process: to start it again would change nothing.
        log.error("removed_from_cluster", why=error.message, hint=error.hint)
