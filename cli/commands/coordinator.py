"""`sealring coordinator`: make a cluster's authority and run it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.local.processes import add_run_command
from sealring.cli.terminal.command import command, load_settings
from sealring.cli.terminal.options import AsJson, public_keys, read_file, write_file
from sealring.cli.terminal.output import print_data, print_json, say

app = typer.Typer(
    name="coordinator", help="The coordinator: keys, roster, plans, and its backups.", no_args_is_help=True
)


KEYS = ("state_dir", "roster_key_files")
MAKE = (*KEYS, "cluster")
FINISH = (*KEYS, "listen", "advertise")
RUN = (*FINISH, "join_listen", "standby", "software_identity_allowed")

RosterThreshold = Annotated[
    int, typer.Option(min=1, max=16, help="signatures that a roster needs; see --roster-key-files")
]
_MAX_FILE = 128 << 10


@command(
    app,
    example="sealring coordinator init --cluster attic",
    section="coordinator",
    fields=(*FINISH, "cluster"),
)
def init(
    context: typer.Context,
    root_metadata: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="the signed draft of `coordinator prepare` [default: make a root key here]"
        ),
    ] = None,
    roster_threshold: RosterThreshold = 1,
    as_json: AsJson = False,
) -> None:
    """Make keys, certificates, database and the operator bundle of a new cluster."""
    settings = load_settings(context).settings
    from sealring.coordinator.init import complete
    from sealring.coordinator.init import init as initialise

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
    say("next: sealring coordinator run, then sealring token create")


@command(
    app,
    example="sealring coordinator prepare --root-key HEX --out draft.dsse",
    section="coordinator",
    fields=MAKE,
)
def prepare(
    context: typer.Context,
    root_key: Annotated[
        list[str], typer.Option(metavar="HEX", help="public root key, made elsewhere; may be repeated")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="where the draft of the root metadata goes")],
    root_threshold: Annotated[int, typer.Option(min=1, max=16, help="root signatures needed")] = 1,
    roster_threshold: RosterThreshold = 1,
    as_json: AsJson = False,
) -> None:
    """Make a new cluster's keys under a root that is kept elsewhere, and the draft for it to sign."""
    settings = load_settings(context).settings
    from sealring.coordinator.init import prepare as make

    keys = public_keys(root_key)
    draft = make(settings, keys, root_threshold, roster_threshold=roster_threshold)
    write_file(out, draft)
    digest = hashlib.sha256(draft).hexdigest()
    if as_json:
        print_json({"draft": str(out), "sha256": digest})
    else:
        print_data(digest)
    say(f"drafted the root metadata in {out}; its holders compare that hash, look at it and sign it:")
    say(f"  sealring root show {out}; sealring root sign {out} --key FILE")
    say(f"then: sealring coordinator init --root-metadata {out}")


@command(app, example="sealring coordinator new-operator", section="coordinator", fields=FINISH)
def new_operator(context: typer.Context) -> None:
    """Replace the operator bundle in the coordinator's folder by one with a new key; stop it first."""
    settings = load_settings(context).settings
    from sealring.coordinator.init import new_operator as make

    make(settings)
    say(f"made a new operator bundle in {settings.state_dir / 'operator'}; the old one opens nothing")


BackupFile = Annotated[Path, typer.Argument(metavar="FILE", help="the backup")]


@command(
    app,
    example="sealring coordinator backup /Volumes/safe/sealring.backup",
    section="coordinator",
    fields=KEYS,
)
def backup(context: typer.Context, file: BackupFile) -> None:
    """Write keys, certificates and database to a file; the coordinator may run meanwhile."""
    settings = load_settings(context).settings
    from sealring.coordinator.backup import backup as make

    make(settings, file)
    say(f"wrote {file}: keep it as safe as the coordinator itself: it has all keys of the cluster")
    for kept in settings.roster_key_files:
        say(f"not in it, and needed beside it: {kept}")


@command(
    app,
    example="sealring coordinator restore /Volumes/safe/sealring.backup",
    section="coordinator",
    fields=KEYS,
)
def restore(context: typer.Context, file: BackupFile) -> None:
    """Make the state folder from a backup."""
    settings = load_settings(context).settings
    from sealring.coordinator.backup import restore as make

    make(settings, file)
    say(f"restored {settings.state_dir} from {file}")
    _say_what_is_undone()


@command(
    app,
    example="sealring coordinator standby /Volumes/safe/sealring.backup",
    section="coordinator",
    fields=KEYS,
)
def standby(context: typer.Context, file: BackupFile) -> None:
    """Make the state folder of a standby from a backup; `coordinator run` then follows the coordinator."""
    settings = load_settings(context).settings
    from sealring.coordinator.backup import restore as make

    make(settings, file, standby=True)
    say(f"{settings.state_dir} stands by; next: sealring coordinator run")
    say("if the coordinator is lost: sealring coordinator promote")


@command(app, example="sealring coordinator promote", section="coordinator", fields=("state_dir",))
def promote(context: typer.Context) -> None:
    """Have the standby on this machine take over for good, whether or not the coordinator is still there."""
    settings = load_settings(context).settings
    from sealring.coordinator.standby.follow import promote as take_over

    take_over(settings)
    say("the standby takes over: `sealring join`, or `sealring coordinator run`, goes on as first machine")
    say("what the other one did in its last seconds may be undone, evictions, bans and operators too: see")
    say("sealring node list, sealring operator list. It comes back as a member, by: sealring up")
    say("API keys, the LAN door and usage until now stay with it: for friends and phones make new keys here")


@command(app, example="sealring coordinator recover", section="coordinator", fields=KEYS)
def recover(context: typer.Context) -> None:
    """Go on after an older copy of the state folder was put back by hand; stop the coordinator first."""
    settings = load_settings(context).settings
    from sealring.coordinator.backup import recover as go_on

    go_on(settings)
    say(f"the coordinator's state in {settings.state_dir} goes on above what members may have seen")
    _say_what_is_undone()


def _say_what_is_undone() -> None:
    say("what was done after this copy is undone: joins, deployments, evictions, bans, revoked operators")
    say("next: sealring coordinator run; then look at: sealring node list, sealring operator list")


add_run_command(app, "coordinator", RUN, summary="Run the coordinator until SIGTERM.")
