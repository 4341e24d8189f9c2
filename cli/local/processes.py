"""How the long-running commands run: logs, lifeline, event loop."""

from __future__ import annotations

import asyncio
import enum
import gc
import importlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.cli.terminal.command import command, load_settings
from sealring.mesh.errors import InvalidInput, SealringError

GRACE_SECONDS = 8.0


class Level(enum.StrEnum):
    """What a log holds at least."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevel = Annotated[
    Level, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error")
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log-file",
        metavar="FILE",
        help="log to this file, reopened after rotation [default: standard error]",
    ),
]
ParentPipe = Annotated[int | None, typer.Option("--die-with-parent-fd", hidden=True, min=3)]


def add_run_command(app: typer.Typer, component: str, fields: Sequence[str], *, summary: str) -> None:
    """Gives a component's commands the one that runs its daemon, with `fields` of its settings as options."""

    @command(
        app, example=f"sealring {component} run", section=component, fields=fields, every=True, help=summary
    )
    def run(
        context: typer.Context,
        log_level: LogLevel = Level.INFO,
        log_file: LogFile = None,
        parent_pipe: ParentPipe = None,
    ) -> None:
        with starting():
            settings = load_settings(context).settings

        async def serve() -> None:
            with starting():
                program = importlib.import_module(f"sealring.{component}.main")
            await program.run(settings)

        run_daemon(component, serve, log_level=log_level, log_file=log_file, parent_pipe=parent_pipe)


@contextmanager
def starting() -> Iterator[None]:
    """Turns garbage collection off while a long-lived process imports its modules, which make hardly any
    garbage.

    Later collections leave these objects out: to look through them would stop the event loop for tens of
    milliseconds each time.
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
    log_level: Level,
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


def die_with_parent(descriptor: int) -> None:
    """Ends this process, as by SIGTERM, once its parent has ended and so the pipe behind `descriptor`.

    The parent alone holds the pipe's write end. However it ends, SIGKILL included, the kernel closes the
    pipe, on Linux and on macOS, whichever thread of the parent started this process.

    Raises InvalidInput (BAD_DESCRIPTOR).
    """
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except (OSError, OverflowError):
        is_pipe = False
    if not is_pipe:
        raise InvalidInput(f"descriptor {descriptor} is not a pipe", reason="BAD_DESCRIPTOR")
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_watch, args=(descriptor,), name="lifeline", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)  # `sys.exit` would end this thread alone
