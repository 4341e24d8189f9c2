"""The `sealring` command. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sealring.cli.commands import (
    audit,
    bench,
    bugreport,
    chat,
    config,
    connect,
    coordinator,
    dashboard,
    demo,
    deployment,
    doctor,
    gateway,
    join,
    key,
    logs,
    model,
    node,
    operator,
    proxy,
    roster,
    service,
    status,
    token,
    trace,
    up,
)
from sealring.cli.commands import root as root_commands
from sealring.cli.terminal import exit_codes
from sealring.cli.terminal.output import say
from sealring.mesh.errors import SealringError
from sealring.mesh.system.coredumps import forbid_core_files
from sealring.mesh.system.lean import hide_rich

_COMMANDS = (
    *(demo, up, join, deployment.short, chat, proxy, connect),
    *(status, dashboard, doctor, logs, bugreport, trace, bench),
)
_GROUPS = (
    *(coordinator, node, gateway, deployment, model, token, key, operator, roster, root_commands, audit),
    *(service, config),
)
_PARTS = "Parts of a cluster"


class Sections(TyperGroup):
    """Lists its commands in sections, by their help panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a section per help panel, in the order in which they come first."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            found: Any = self.get_command(ctx, name)
            text = found.get_short_help_str(formatter.width)
            sections.setdefault(found.rich_help_panel or _PARTS, []).append((name, text))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="sealring",
    cls=Sections,
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


for one in _COMMANDS:
    app.add_typer(one if isinstance(one, typer.Typer) else one.app)
for group in _GROUPS:
    app.add_typer(group.app)


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
