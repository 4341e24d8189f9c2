"""`sealring logs`: what the components on this machine write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.calls.completion import completes
from sealring.cli.terminal.command import command
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.output import print_data
from sealring.mesh.errors import NotFound

app = typer.Typer()

_LOOK_SECONDS = 0.5


@command(app, example="sealring logs --component node --follow", rich_help_panel="Look")
def logs(
    context: typer.Context,
    component: Annotated[
        list[str] | None,
        typer.Option(
            "--component",
            metavar="NAME",
            autocompletion=completes("component"),
            help="coordinator, gateway, node, or one node such as node-1; may be repeated [default: all]",
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=100_000, help="last lines of each")] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="go on with what is written, until Ctrl-C")
    ] = False,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="state folder of a local cluster [default: those that run, and services]"
        ),
    ] = None,
) -> None:
    """Show the logs of the components on this machine.

    These are the processes of `demo` and `up`, and the services of `service install`.
    """
    from sealring.cli.service.logfiles import Tail, find_logs

    found = find_logs(state_dir, component or [])
    if not found:
        whose = ", ".join(component or ["any component"])
        where = "on this machine" if state_dir is None else f"in {state_dir}"
        raise NotFound(
            f"there is no log of {whose} {where}",
            hint="name the state folder of a local cluster: --state-dir",
            reason="NO_LOG",
        )
    width = max(map(len, found))
    tails = {name: Tail(file) for name, file in found.items()}

    def show(name: str, line: str) -> None:
        print_data(line if len(found) == 1 else f"{name:{width}} | {line}")

    for name, tail in tails.items():
        for line in tail.last(lines):
            show(name, line)
    while follow:
        for name, tail in tails.items():
            for line in tail.new():
                show(name, line)
        host_of(context).pause(_LOOK_SECONDS)
