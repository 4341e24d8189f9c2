"""`sealring gateway`: this machine's gateway, and the cluster's gateways."""

from __future__ import annotations

from typing import Annotated

import typer

from sealring.cli.calls.members import (
    ban_member,
    enrolled_gateways,
    evict_member,
    print_gateways,
    print_revoked,
    revoked,
)
from sealring.cli.calls.operator import call_admin
from sealring.cli.commands.node import leave_cluster, report_enrolled
from sealring.cli.local.processes import add_run_command
from sealring.cli.terminal.command import ADMIN, command, load_settings, same_settings
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson, JoinTokenText, read_token
from sealring.cli.terminal.output import plain, print_json, say

app = typer.Typer(
    name="gateway",
    help="Gateways answer clients: this machine's, and the cluster's.",
    no_args_is_help=True,
)

GatewayName = Annotated[str, typer.Argument(metavar="GATEWAY", help="id or name of a gateway")]

RUN = (
    *("state_dir", "http_listen", "grpc_listen", "http_tls_certificate", "http_tls_key"),
    *("grpc_tls_certificate", "grpc_tls_key"),
)


@command(
    app,
    example="sealring gateway join TOKEN",
    section="gateway",
    fields=("state_dir", "name"),
)
def join(
    context: typer.Context,
    token: JoinTokenText,
    as_json: AsJson = False,
) -> None:
    """Enrol a gateway on this machine with a join token.

    The root key in the token is checked before anything is sent.
    """
    settings, host = load_settings(context).settings, host_of(context)
    enrolled = host.run(host.join("gateway", settings, read_token(token)))
    report_enrolled(enrolled, settings, as_json=as_json)
    say(f"next: {same_settings(context, 'gateway run', RUN)}")


add_run_command(app, "gateway", RUN, summary="Run the gateway until SIGTERM.")


@command(app, "list", example="sealring gateway list", section="cli", fields=ADMIN)
def list_gateways(context: typer.Context, as_json: AsJson = False) -> None:
    """List the gateways, and whether they are connected."""
    known = plain(call_admin(context, "ListNodes"))
    if as_json:
        print_json(known["gateways"])
        return
    print_gateways(known["gateways"])
    print_revoked(known["revoked"], "gateway")


@command(app, example="sealring gateway evict edge", section="cli", fields=ADMIN)
def evict(context: typer.Context, gateway: GatewayName) -> None:
    """Take a gateway out of the roster; it may join again with a new token."""
    evict_member(context, gateway, enrolled_gateways)


@command(app, example="sealring gateway ban edge", section="cli", fields=ADMIN)
def ban(context: typer.Context, gateway: GatewayName) -> None:
    """Take a gateway out of the roster for good, by its identity key.

    Works on an evicted gateway too.
    """
    ban_member(context, gateway, enrolled_gateways, revoked("ROLE_GATEWAY"))


@command(app, example="sealring gateway leave", section="gateway", fields=("state_dir",))
def leave(context: typer.Context) -> None:
    """Give up this gateway's enrolment; stop it first.

    The identity key stays.
    """
    leave_cluster(load_settings(context).settings.state_dir, "gateway")
