"""`sealring node`: make this machine a member of a cluster and run its daemon."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from cli.output import print_data, print_json, say
from cli.processes import add_run_command
from cli.settings_flags import load_settings, settings_command
from cli.words import AsJson, JoinTokenText, read_token

if TYPE_CHECKING:
    from mesh.enrolment import Enrolled

app = typer.Typer(name="node", help="A machine that holds layers.", no_args_is_help=True)


@app.command(cls=settings_command("node"))
def join(context: typer.Context, token: JoinTokenText, as_json: AsJson = False) -> None:
    """Enrol with a join token; the root key in it is checked before anything is sent."""
    settings = load_settings(context, "node").settings
    from node.join import join as enrol

    report_enrolled(asyncio.run(enrol(settings, read_token(token))), settings, as_json=as_json)
    say("next: sealring node run")


@app.command(cls=settings_command("node"))
def nonce(context: typer.Context) -> None:
    """Print the DeviceAttestationNonce for this node's identity, which is made if there is none."""
    settings = load_settings(context, "node").settings
    from mesh.device import device_nonce
    from node.identity import make_signer

    print_data(device_nonce(make_signer(settings).public_key).hex())


def report_enrolled(enrolled: Enrolled, settings: Any, *, as_json: bool) -> None:
    """Says who this machine is now."""
    member, cluster = enrolled.state.peer.id, enrolled.state.peer.cluster
    if as_json:
        print_json({"member_id": member, "cluster": cluster, "state_dir": str(settings.state_dir)})
    say(f"enrolled in cluster {cluster} as {member}; the state is in {settings.state_dir}")


add_run_command(app, "node", summary="Run the node daemon until SIGTERM.")
