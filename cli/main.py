"""The `sealring` command. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from sealring.cli import exit_codes
from sealring.cli.commands import (
    bench,
    chat,
    coordinator,
    demo,
    deployments,
    doctor,
    gateway,
    join,
    keys,
    model,
    node,
    nodes,
    operators,
    proxy,
    service,
    token,
    trace,
    trust,
    up,
)
from sealring.cli.commands import config as config_commands
from sealring.cli.commands import root as root_commands
from sealring.cli.output import say
from sealring.mesh.errors import SealringError
from sealring.mesh.system.coredumps import forbid_core_files
from sealring.mesh.system.lean import hide_rich

_GROUPS = (
    *(
        demo.app,
        up.app,
        join.app,
        chat.app,
        proxy.app,
        coordinator.app,
        token.app,
        node.app,
        nodes.app,
        gateway.app,
        keys.app,
    ),
    *(operators.app, deployments.app, trust.app, root_commands.app, model.app, config_commands.app),
    *(service.app, bench.app, trace.app, doctor.app),
)


app = typer.Typer(
    name="sealring",
    help="One language model over several machines: sealed activations, signed membership.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("sealring"))
        raise typer.Exit


@app.callback()
def root(
    config: Annotated[
        Path | None,
        typer.Option(
            help="settings file, TOML [default: SEALRING_CONFIG, then the user's own]", metavar="FILE"
        ),
    ] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Options before the command."""


for group in _GROUPS:
    app.add_typer(group)


def main() -> None:
    """The entry point: runs the command and turns what it raises into one line and an exit status."""
    forbid_core_files()
    hide_rich()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core would write to standard error as it likes
    try:
        app(prog_name="sealring", standalone_mode=True)
    except SealringError as error:
        _debug()
        say(f"error: {error} [{error.reason}]")
        sys.exit(exit_codes.exit_code(error))
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    except Exception as error:
        _debug()
        kind = type(error).__name__
        say(f"error: a fault of sealring: {kind} (hint: set SEALRING_DEBUG=1 for its trace) [FAULT]")
        sys.exit(exit_codes.FAULT)


def _debug() -> None:
    if os.environ.get("SEALRING_DEBUG"):
        traceback.print_exc()
