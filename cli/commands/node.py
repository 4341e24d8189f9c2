"""`sealring node`: this machine as a node, and the cluster's nodes."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.calls.completion import completes
from sealring.cli.calls.members import (
    ban_member,
    change_member,
    enrolled_nodes,
    evict_member,
    print_nodes,
    print_revoked,
    revoked,
)
from sealring.cli.calls.operator import call_admin
from sealring.cli.local.processes import add_run_command
from sealring.cli.terminal.command import ADMIN, command, load_settings, same_settings
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson, JoinTokenText, read_token
from sealring.cli.terminal.output import plain, print_data, print_json, say
from sealring.mesh.errors import ConfigError, SealringError
from sealring.mesh.system.addresses import parse_address

if TYPE_CHECKING:
    from sealring.mesh.member.enrolment import Enrolled

app = typer.Typer(
    name="node",
    help="Nodes hold layers: this machine, and the cluster's nodes.",
    no_args_is_help=True,
)

NodeName = Annotated[
    str, typer.Argument(metavar="NODE", help="id or name of a node", autocompletion=completes("node"))
]

ADDRESSED = ("state_dir", "listen", "advertise", "software_identity_allowed")
RUN = (*ADDRESSED, "ring_host", "models", "memory_limit", "allow_downloads")


@command(app, example="sealring node join TOKEN", section="node", fields=(*ADDRESSED, "name"), every=True)
def join(context: typer.Context, token: JoinTokenText, as_json: AsJson = False) -> None:
    """Enrol this machine with a join token.

    The root key in the token is checked before anything is sent.
    """
    settings, host = load_settings(context).settings, host_of(context)
    enrolled = host.run(host.join("node", settings, read_token(token)))
    report_enrolled(enrolled, settings, as_json=as_json)
    say(f"next: {same_settings(context, 'node run', RUN)}")


add_run_command(app, "node", RUN, summary="Run the node daemon until SIGTERM.")


@command(app, "list", example="sealring node list", section="cli", fields=ADMIN)
def list_nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the nodes with their state, trust level, memory and layers."""
    known = plain(call_admin(context, "ListNodes"))
    if as_json:
        print_json(known["nodes"])
        return
    print_nodes(known["nodes"])
    print_revoked(known["revoked"], "node")


@command(app, example="sealring node drain mac-3", section="cli", fields=ADMIN)
def drain(
    context: typer.Context,
    node: NodeName,
    undo: Annotated[bool, typer.Option("--undo", help="let it serve again")] = False,
) -> None:
    """Let a node finish what it runs and give it nothing new."""
    change_member(context, node, "DrainNode", enrolled_nodes, undo=undo)
    say(f"{'no longer draining' if undo else 'draining'} {node}")


@command(app, example="sealring node evict mac-3", section="cli", fields=ADMIN)
def evict(context: typer.Context, node: NodeName) -> None:
    """Take a node out of the roster; it may join again with a new token."""
    evict_member(context, node, enrolled_nodes)


@command(app, example="sealring node ban mac-3", section="cli", fields=ADMIN)
def ban(context: typer.Context, node: NodeName) -> None:
    """Take a node out of the roster for good, by its identity key.

    Works on an evicted node too.
    """
    ban_member(context, node, enrolled_nodes, revoked("ROLE_NODE"))


@command(app, example="sealring node leave", section="node", fields=("state_dir",))
def leave(context: typer.Context) -> None:
    """Give up this machine's enrolment; stop the daemon first.

    The identity key stays.
    """
    leave_cluster(load_settings(context).settings.state_dir, "node")


@command(
    app,
    example="sealring node nonce",
    section="node",
    fields=("state_dir", "enclave_helper"),
)
def nonce(context: typer.Context, as_json: AsJson = False) -> None:
    """Print the DeviceAttestationNonce of this machine's identity.

    The identity is made if there is none yet.
    """
    settings = load_settings(context).settings
    from sealring.mesh.trust.apple import device_nonce
    from sealring.node.identity.choice import make_signer

    found = device_nonce(make_signer(settings).public_key).hex()
    if as_json:
        print_json({"nonce": found})
    else:
        print_data(found)


def leave_cluster(folder: Path, group: str) -> None:
    """Removes the enrolment in a folder and says what is left to do, and where."""
    from sealring.cli.calls.away import coordinates
    from sealring.mesh.member.state import ROSTER, forget_enrolment, load_machine_state
    from sealring.mesh.roster.reader import check_roster
    from sealring.mesh.system.files import read_bounded, unwritable
    from sealring.mesh.system.lock import lock_state
    from sealring.mesh.system.paths import is_enrolled
    from sealring.node.stored.keys import FOLDER, forget

    if not is_enrolled(folder):
        raise ConfigError(
            f"there is no enrolment in {folder}", hint="name its folder: --state-dir", reason="NOT_ENROLLED"
        )
    with lock_state(folder):
        name, at = "NAME", "the coordinator's machine"
        with suppress(OSError, SealringError):  # what cannot be read can be left, too
            state = load_machine_state(folder)
            name, at = state.name, f"the machine at {parse_address(state.coordinator)[0]}"
            roster = check_roster(read_bounded(folder / ROSTER), state.root, now=time.time())
            for address in roster.coordinators[:1]:  # a standby may have taken over since it has joined
                at = f"the machine at {parse_address(address)[0]}"
        try:
            forget(folder / FOLDER)
            forget_enrolment(folder)
        except OSError as error:
            raise unwritable(folder, error) from None
    say(f"the enrolment in {folder} is gone; a new token enrols it again, in this cluster or another")
    if coordinates(folder.parent / "coordinator"):
        say("this is the cluster's first machine: `sealring up` goes on with it, and its node joins again.")
        say(f"To end the cluster for good, remove {folder.parent}")
        return
    say(f"the cluster lists it as offline until somebody types on {at}: sealring {group} evict {name}")


def report_enrolled(enrolled: Enrolled, settings: Any, *, as_json: bool) -> None:
    """Says who this machine is now."""
    member, cluster = enrolled.state.peer.id, enrolled.state.peer.cluster
    if as_json:
        print_json({"member_id": member, "cluster": cluster, "state_dir": str(settings.state_dir)})
    say(f"enrolled in cluster {cluster} as {member}; the state is in {settings.state_dir}")
