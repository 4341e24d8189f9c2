"""`sealring node`: make this machine a member of a cluster and run its daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sealring.cli.output import print_data, print_json, say
from sealring.cli.processes import add_run_command
from sealring.cli.settings_flags import load_settings, same_settings, settings_command
from sealring.cli.words import AsJson, JoinTokenText, read_token
from sealring.mesh.errors import ConfigError

if TYPE_CHECKING:
    from sealring.mesh.member.enrolment import Enrolled

app = typer.Typer(name="node", help="A machine that holds layers.", no_args_is_help=True)


@app.command(cls=settings_command("node"))
def join(context: typer.Context, token: JoinTokenText, as_json: AsJson = False) -> None:
    """Enrol with a join token; the root key in it is checked before anything is sent."""
    loaded = load_settings(context, "node")
    from sealring.node.join import join as enrol

    enrolled = asyncio.run(enrol(loaded.settings, read_token(token)))
    report_enrolled(enrolled, loaded.settings, as_json=as_json)
    say(f"next: {same_settings(context, 'node run')}")


@app.command(cls=settings_command("node"))
def nonce(context: typer.Context, as_json: AsJson = False) -> None:
    """Print the DeviceAttestationNonce for this node's identity, which is made if there is none."""
    settings = load_settings(context, "node").settings
    from sealring.mesh.trust.apple import device_nonce
    from sealring.node.identity.key import make_signer

    found = device_nonce(make_signer(settings).public_key).hex()
    if as_json:
        print_json({"nonce": found})
    else:
        print_data(found)


@app.command(cls=settings_command("node"))
def leave(context: typer.Context) -> None:
    """Give up this machine's enrolment; stop the daemon first. The identity key stays."""
    leave_cluster(load_settings(context, "node").settings.state_dir, "nodes")


def leave_cluster(folder: Path, group: str) -> None:
    """Removes the enrolment in a folder and says what the operator has left to do."""
    from sealring.mesh.member.state import forget_enrolment, is_enrolled
    from sealring.mesh.system.files import unwritable
    from sealring.mesh.system.lock import lock_state

    if not is_enrolled(folder):
        raise ConfigError(f"there is no enrolment in {folder}", reason="NOT_ENROLLED")
    with lock_state(folder):
        try:
            forget_enrolment(folder)
        except OSError as error:
            raise unwritable(folder, error) from None
    say(f"the enrolment in {folder} is gone; a new token enrols it again, in this cluster or another")
    say(f"to take it out of the old cluster's roster, its operator runs: sealring {group} evict NAME")


def report_enrolled(enrolled: Enrolled, settings: Any, *, as_json: bool) -> None:
    """Says who this machine is now."""
    member, cluster = enrolled.state.peer.id, enrolled.state.peer.cluster
    if as_json:
        print_json({"member_id": member, "cluster": cluster, "state_dir": str(settings.state_dir)})
    say(f"enrolled in cluster {cluster} as {member}; the state is in {settings.state_dir}")


add_run_command(app, "node", summary="Run the node daemon until SIGTERM.")
