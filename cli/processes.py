"""How the long-running commands run: logs, lifeline, event loop."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.cli.lifeline import die_with_parent
from sealring.cli.settings_flags import load_settings, settings_command
from sealring.mesh.errors import SealringError

LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error")]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log-file", help="log to this file, opened again when it was rotated; else standard error"
    ),
]
ParentPipe = Annotated[int | None, typer.Option("--die-with-parent-fd", hidden=True, min=3)]


def add_run_command(app: typer.Typer, component: str, *, summary: str) -> None:
    """Gives a component's commands the one that runs its daemon, with the component's settings as flags."""

    @app.command(cls=settings_command(component), help=summary)
    def run(
        context: typer.Context,
        log_level: LogLevel = "info",
        log_file: LogFile = None,
        parent_pipe: ParentPipe = None,
    ) -> None:
        with starting():
            settings = load_settings(context, component).settings

        async def serve() -> None:
            with starting():
                program = importlib.import_module(f"{component}.main")
            await program.run(settings)

        run_daemon(component, serve, log_level=log_level, log_file=log_file, parent_pipe=parent_pipe)


@contextmanager
def starting() -> Iterator[None]:
    """For the imports of a process that runs for long: hardly anything of what they make is ever garbage.

    Nothing is collected meanwhile, which would take an eighth of their time. Later collections leave out what
    there is now: each full one would stop the event loop for tens of milliseconds to look through it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_daemon(
    component: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    log_level: str,
    log_file: Path | None,
    parent_pipe: int | None,
) -> None:
    """Runs one component until it ends by itself or by a signal that it handles."""
    import structlog

    from sealring.mesh.system.logging import configure
    from sealring.mesh.system.processes import allow_open_files

    os.umask(0o077)  # whatever it and its children make is their account's alone
    configure(component, level=log_level, file=log_file)
    allow_open_files()
    if parent_pipe is not None:
        die_with_parent(parent_pipe)
    try:
        asyncio.run(work())
    except Exception as error:
        if log_file is not None or not isinstance(error, SealringError):
            structlog.get_logger().error("ended_by_error", exc_info=error)
        raise
