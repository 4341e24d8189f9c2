"""`sealring status`: the cluster at a glance."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer

from sealring.cli.calls.away import while_away
from sealring.cli.calls.held import print_models
from sealring.cli.calls.members import look, print_gateways, print_links, print_nodes
from sealring.cli.calls.operator import Admin, run_admin
from sealring.cli.commands.deployment import print_deployments
from sealring.cli.local.standing import own_places
from sealring.cli.terminal.command import ADMIN, command
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import clear_screen, print_data, print_json, say, until
from sealring.mesh.errors import Unavailable
from sealring.mesh.system.paths import default_state_root

app = typer.Typer()

_WATCH_SECONDS = 2.0


@command(app, example="sealring status --watch", section="cli", fields=ADMIN, rich_help_panel="Look")
def status(
    context: typer.Context,
    watch: Annotated[
        bool, typer.Option("--watch", help="show it again every 2 seconds, until Ctrl-C")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the nodes, the gateways, the rings, and which nodes have which models.

    Of each node that is in no ring it says why.
    """

    async def work(admin: Admin) -> None:
        while True:
            try:
                found = await look(admin)
            except Unavailable:
                node = default_state_root() / "node"
                here = own_places(host_of(context), node.parent, node)
                for line in (*here, *while_away(node, time.time())):
                    say(line)
                if not watch:
                    raise
                await asyncio.sleep(_WATCH_SECONDS)
                continue
            if watch and not as_json:
                clear_screen()
            show(found, as_json=as_json)
            if admin.root is not None and admin.root.ends_soon(time.time()):
                ends = until(int(admin.root.ends), time.time())
                say(f"the cluster ends {ends}, with its root metadata (hint: sealring doctor on a node)")
            if not watch:
                return
            await asyncio.sleep(_WATCH_SECONDS)

    run_admin(context, work)


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """What `look` found, as one JSON document or as tables."""
    if as_json:
        print_json(found)
        return
    if trouble := found["trouble"]:
        say(trouble)
        say("until it can, nothing changes, and rings end with the newest roster (hint: free some space)")
    print_nodes(found["nodes"])
    print_data("")
    print_gateways(found["gateways"])
    print_links(found["links"], found["nodes"])
    print_data("")
    print_deployments(found["deployments"])
    if any(node["heartbeat"]["models"] for node in found["nodes"]):
        print_data("")
        print_models(found["nodes"])
