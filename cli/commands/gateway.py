"""`sealring gateway`: where clients connect."""

from __future__ import annotations

import asyncio

import typer

from sealring.cli.commands.node import leave_cluster, report_enrolled
from sealring.cli.output import say
from sealring.cli.processes import add_run_command
from sealring.cli.settings_flags import load_settings, same_settings, settings_command
from sealring.cli.words import AsJson, JoinTokenText, read_token

app = typer.Typer(name="gateway", help="Where clients connect: gRPC and HTTP.", no_args_is_help=True)


@app.command(cls=settings_command("gateway"))
def join(
    context: typer.Context,
    token: JoinTokenText,
    as_json: AsJson = False,
) -> None:
    """Enrol with a join token; the root key in it is checked before anything is sent."""
    settings = load_settings(context, "gateway").settings
    from sealring.gateway.join import join as enrol

    enrolled = asyncio.run(enrol(settings, read_token(token)))
    report_enrolled(enrolled, settings, as_json=as_json)
    say(f"next: {same_settings(context, 'gateway run')}")


@app.command(cls=settings_command("gateway"))
def leave(context: typer.Context) -> None:
    """Give up this gateway's enrolment; stop it first. The identity key stays."""
    leave_cluster(load_settings(context, "gateway").settings.state_dir, "gateways")


add_run_command(app, "gateway", summary="Run the gateway until SIGTERM.")
