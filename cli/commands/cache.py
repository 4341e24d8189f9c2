"""`sealring cache`: the beginnings of prompts that this machine's node stores on its disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.terminal.command import command, state_here
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import moment, print_json, print_table, say
from sealring.mesh.errors import NotFound
from sealring.mesh.units import size

app = typer.Typer(name="cache", help="Beginnings of prompts on this machine's disk.", no_args_is_help=True)


def _root(context: typer.Context) -> Path:
    from sealring.node.stored.keys import FOLDER

    return state_here(context) / FOLDER


@command(app, "list", example="sealring cache list", section="node", fields=("state_dir",))
def list_stored(context: typer.Context, as_json: AsJson = False) -> None:
    """Show how much this machine's node stores of prompts, by model. No text can be shown: it is sealed."""
    from sealring.node.stored.keys import names_of
    from sealring.node.stored.store import listed

    root = _root(context)
    found = [(", ".join(names_of(root / one.folder)) or one.folder, one) for one in listed(root)]
    if as_json:
        print_json(
            [
                {"model": name, "bytes": one.bytes, "blocks": one.blocks, "last_used": int(one.used)}
                for name, one in found
            ]
        )
        return
    rows = [[name, size(one.bytes), str(one.blocks), moment(int(one.used))] for name, one in found]
    print_table(["model", "bytes", "blocks", "last used"], rows)


@command(app, "clear", example="sealring cache clear", section="node", fields=("state_dir",))
def clear(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="of this model only")] = "",
) -> None:
    """Destroy what this machine's node stores of prompts, and the key that it is sealed under.

    The node may be running: it stores prompts again when its ring is formed anew.
    """
    from sealring.mesh.system.files import unwritable
    from sealring.node.stored.keys import forget
    from sealring.node.stored.store import listed

    root = _root(context)
    before = sum(one.bytes for one in listed(root))
    try:
        if not forget(root, model or None) and model:
            nothing = f"nothing is stored of {model[:80]}"
            raise NotFound(nothing, hint="see: sealring cache list", reason="NOT_STORED")
    except OSError as error:
        raise unwritable(root, error) from None
    say(f"{size(before - sum(one.bytes for one in listed(root)))} are gone")
