"""How the long-running commands run: logs, lifeline, event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.lifeline import die_with_parent
from mesh.errors import SealringError

LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error")]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log-file", help="log to this file, opened again when it was rotated; else standard error"
    ),
]
ParentPipe = Annotated[int | None, typer.Option("--die-with-parent-fd", hidden=True, min=3)]


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

    from mesh.logging import configure

    configure(component, level=log_level, file=log_file)
    if parent_pipe is not None:
        die_with_parent(parent_pipe)
    try:
        asyncio.run(work())
    except Exception as error:
        if log_file is not None or not isinstance(error, SealringError):
            structlog.get_logger().error("ended by an error", exc_info=error)
        raise
