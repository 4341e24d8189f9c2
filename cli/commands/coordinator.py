"""`sealring coordinator`: make a cluster's authority and run it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from cli.output import print_data, print_json, say
from cli.processes import add_run_command
from cli.settings_flags import load_settings, settings_command
from cli.words import AsJson, public_keys, read_file

app = typer.Typer(name="coordinator", help="The cluster's authority.", no_args_is_help=True)


RosterThreshold = Annotated[
    int, typer.Option(min=1, max=16, help="signatures that a roster needs; see roster_key_files")
]
_MAX_FILE = 128 << 10


@app.command(cls=settings_command("coordinator"))
def init(
    context: typer.Context,
    root_metadata: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the draft of `prepare`, signed; unset: makes a root key here"),
    ] = None,
    roster_threshold: RosterThreshold = 1,
    as_json: AsJson = False,
) -> None:
    """Make keys, certificates, database and the operator bundle of a new cluster."""
    settings = load_settings(context, "coordinator").settings
    from coordinator.init import complete
    from coordinator.init import init as initialise

    if root_metadata is None:
        initialise(settings, roster_threshold=roster_threshold)
    else:
        complete(settings, read_file(root_metadata, max_bytes=_MAX_FILE))
    state = settings.state_dir
    if as_json:
        print_json({"state_dir": str(state), "operator": str(state / "operator")})
    say(f"made the coordinator's state in {state}; the operator bundle is {state / 'operator'}")
    if root_metadata is None:
        say(f"{state / 'root.key'} stands above everything: keep it elsewhere, and a copy of it")
    say("next: sealring coordinator run, then sealring token create --role node")


@app.command(cls=settings_command("coordinator"))
def prepare(
    context: typer.Context,
    root_key: Annotated[list[str], typer.Option(metavar="HEX", help="public root keys, made elsewhere")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="where the draft of the root metadata goes")],
    root_threshold: Annotated[int, typer.Option(min=1, max=16, help="root signatures needed")] = 1,
    roster_threshold: RosterThreshold = 1,
) -> None:
    """Make a new cluster's keys under a root that is kept elsewhere, and the draft for it to sign."""
    settings = load_settings(context, "coordinator").settings
    from coordinator.init import prepare as make
    from mesh.statefiles import write_atomic

    keys = public_keys(root_key)
    draft = make(settings, keys, root_threshold, roster_threshold=roster_threshold)
    write_atomic(out, draft, mode=0o644)
    print_data(hashlib.sha256(draft).hexdigest())
    say(f"drafted the root metadata in {out}; its holders compare that hash, look at it and sign it:")
    say(f"  sealring root show {out}; sealring root sign {out} --key FILE")
    say(f"then: sealring coordinator init --root-metadata {out}")


@app.command(cls=settings_command("coordinator"))
def new_operator(context: typer.Context) -> None:
    """Replace the operator bundle in the coordinator's folder by one with a new key; stop it first."""
    settings = load_settings(context, "coordinator").settings
    from coordinator.init import new_operator as make

    make(settings)
    say(f"made a new operator bundle in {settings.state_dir / 'operator'}; the old one opens nothing")


add_run_command(app, "coordinator", summary="Run the coordinator until SIGTERM.")
