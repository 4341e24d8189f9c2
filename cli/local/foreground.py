"""Runs components in the foreground of a terminal: Ctrl-C, SIGTERM and SIGHUP end all of them in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from sealring.cli.terminal import exit_codes
from sealring.cli.terminal.host import Host
from sealring.cli.terminal.output import Progress, progress, say

if TYPE_CHECKING:
    from sealring.cli.local.cluster import Cluster

C = TypeVar("C", bound="Cluster")


def signals_as_exceptions() -> None:
    """Raises an exception for a signal until the event loop takes signals over, so that cleaning up is not
    skipped."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def run_cluster(
    host: Host,
    make: Callable[[Callable[[str], None]], C],
    work: Callable[[C, Progress], Coroutine[Any, Any, None]],
    *,
    what: str,
    serve: bool = True,
    meanwhile: Callable[[C], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Runs `work` over the cluster that `make` makes, which then serves on if it shall, with `meanwhile`.

    SIGINT, SIGTERM and SIGHUP end it in order; while it serves that is its normal end.
    """
    caught: list[int] = []
    serving = False

    async def run() -> None:
        nonlocal serving
        from sealring.mesh.system.processes import first_of

        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop(number: int) -> None:
            caught.append(number)
            if task is not None:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        with progress(what) as shown:
            async with make(shown.update) as cluster:
                await work(cluster, shown)
                if serve:
                    serving = True
                    await first_of(cluster.wait_for_end(), *([meanwhile(cluster)] if meanwhile else []))
                say("stopping")

    try:
        host.run(run())
    except asyncio.CancelledError:
        say("stopped")
        if serving:
            return
        interrupted = not caught or caught[0] == signal.SIGINT
        raise typer.Exit(exit_codes.INTERRUPTED if interrupted else 128 + caught[0]) from None
