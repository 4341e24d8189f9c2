"""`sealring dashboard`: the cluster in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from sealring.cli.calls.operator import connect, read_bundle
from sealring.cli.local.processes import Level, run_daemon
from sealring.cli.terminal.command import ADMIN, command, load_settings
from sealring.cli.terminal.output import say

if TYPE_CHECKING:
    from sealring.cli.calls.gateway import GatewayAccess

app = typer.Typer()


@command(
    app,
    example="sealring dashboard",
    section="cli",
    fields=(*ADMIN, "gateway", "gateway_ca", "api_key_file"),
    rich_help_panel="Look",
)
def dashboard(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="where it listens, on loopback; port 0 takes any")
    ] = "127.0.0.1:0",
) -> None:
    """Show the cluster in a browser: its machines at work, speed, models, usage, proofs, and a chat.

    It prints an address with a token, which shows all that this operator may see. Prompts of its chat are
    sealed here, so that the gateway cannot read them.
    """
    loaded = load_settings(context)
    settings = loaded.settings
    pin = read_bundle(settings.operator).root_sha256

    from sealring.cli.calls.gateway import inference
    from sealring.cli.calls.member import gateways_of
    from sealring.cli.calls.pin import roster_file
    from sealring.cli.dashboard.app import create_dashboard, new_token
    from sealring.client import AsyncClient
    from sealring.client.sealing import SealingBackend
    from sealring.edge.http.app import create_app
    from sealring.edge.http.server import HttpServer
    from sealring.edge.metrics import Metrics
    from sealring.mesh.system.processes import first_of, stop_on_signals

    async def work() -> None:
        async with gateways_of(loaded) as (addresses, access):
            await serve(addresses, access)

    async def serve(addresses: Sequence[str], access: GatewayAccess) -> None:
        client = AsyncClient(
            addresses, root_sha256=pin, state_file=roster_file(pin, addresses), timeout=3600.0, **access
        )
        metrics, token = Metrics(), new_token()
        edge = create_app(SealingBackend(client, metrics), exposition=metrics.exposition)
        calls = connect(settings.operator, address=settings.coordinator, seconds=settings.timeout)
        async with client, calls as admin, AsyncExitStack() as stack:
            opened = [inference(address, **access) for address in addresses]
            gateways = [await stack.enter_async_context(one) for one in opened]
            app, history = create_dashboard(admin, pin, gateways, client, edge, token)
            server = HttpServer(app)
            with stop_on_signals() as stop:
                try:
                    port = server.listen(listen)
                    await server.start()
                    say(f"http://{listen.rpartition(':')[0]}:{port}/#{token}")
                    say("open this address in a browser on this machine; Ctrl-C ends it")
                    await first_of(stop.wait(), history.run())
                finally:
                    await server.stop()

    run_daemon("dashboard", work, log_level=Level.WARNING, log_file=None, parent_pipe=None)
