"""`sealring import`: models that other programs have fetched, served from where they are."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.terminal.command import command, load_settings
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import print_json, print_table, say
from sealring.mesh.errors import NotFound
from sealring.mesh.system.files import unwritable
from sealring.mesh.units import size

app = typer.Typer(
    name="import", help="Models that other programs have fetched, without a copy.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Models that other programs have fetched, without a copy."""


@command(app, "exo", example="sealring import exo", section="node", fields=("state_dir",))
def exo(
    context: typer.Context,
    folders: Annotated[
        list[Path] | None, typer.Option("--folder", metavar="DIR", help="of exo's models; may be repeated")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what is there, and do nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Let this machine's node serve the models that exo has fetched, from exo's folders.

    A running node has them within a minute. Nothing in exo's folders changes; what exo deletes is gone here.
    """
    from sealring.cli.setup.exo import exo_folders, link, models_of_exo
    from sealring.node.models.folders import LINKED

    usual = exo_folders(os.environ, Path.home(), host_of(context).platform)
    looked = [one.expanduser().absolute() for one in folders or usual]
    found = models_of_exo(looked)
    if not found:
        raise NotFound(
            f"exo has no models in {', '.join(map(str, looked))}",
            hint="name its folder: sealring import exo --folder DIR",
            reason="NO_EXO_MODELS",
        )
    whole = [one for one in found if not one.problem]
    if not dry_run:
        into = load_settings(context).settings.state_dir / LINKED
        try:
            link(whole, into)
        except OSError as error:
            raise unwritable(into, error) from None
    if as_json:
        print_json([asdict(one) | {"folder": str(one.folder)} for one in found])
        return
    rows = [[one.name, size(one.size), one.problem or "-"] for one in found]
    print_table(["model", "size", "why it cannot be served"], rows)
    if whole and not dry_run:
        say(f"serve one, on the first machine: sealring deploy {whole[0].name}")
