"""`sealring nodes`: the members of a cluster and what becomes of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.operator import Admin, call_admin, run_admin
from cli.output import plain, print_json, print_table, say, size
from cli.settings_flags import settings_command
from cli.words import AsJson
from mesh.errors import InvalidInput, NotFound

app = typer.Typer(name="nodes", help="The cluster's nodes.", no_args_is_help=True)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="id or name of a node")]


@app.command("list", cls=settings_command("cli"))
def list_nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the nodes with their state, trust, memory and layers."""
    from sealring.v1 import admin_pb2

    nodes = plain(call_admin(context, "ListNodes", admin_pb2.ListNodesRequest()))["nodes"]
    if as_json:
        print_json(nodes)
        return
    print_nodes(nodes)


def print_nodes(nodes: list[dict[str, Any]]) -> None:
    """The nodes as a table."""
    rows = [
        [
            one["name"],
            one["id"][:16],
            one["state"],
            f"{one['level']} {one['trust']}",
            f"{size(one['memory_used'])} of {size(one['memory_usable'])}",
            one["ring"],
            f"{one['first_layer']}-{one['end_layer'] - 1}" if one["ring"] and one["end_layer"] else "",
        ]
        for one in nodes
    ]
    print_table(["node", "id", "state", "trust", "memory", "ring", "layers"], rows)


@app.command(cls=settings_command("cli"))
def drain(
    context: typer.Context,
    node: NodeName,
    undo: Annotated[bool, typer.Option("--undo", help="let it serve again")] = False,
) -> None:
    """Let a node finish what it runs and give it nothing new."""
    from sealring.v1 import admin_pb2

    found = _change(context, node, "DrainNode", lambda found: admin_pb2.DrainNodeRequest(id=found, undo=undo))
    say(f"{'no longer draining' if undo else 'draining'} {found}")


@app.command(cls=settings_command("cli"))
def evict(context: typer.Context, node: NodeName) -> None:
    """Take a node out of the roster; it may enrol again with a new token."""
    from sealring.v1 import admin_pb2

    found = _change(context, node, "EvictNode", lambda found: admin_pb2.EvictNodeRequest(id=found))
    say(f"evicted {found}")


@app.command(cls=settings_command("cli"))
def ban(context: typer.Context, node: NodeName) -> None:
    """Take a node out of the roster for good, by its identity key."""
    from sealring.v1 import admin_pb2

    found = _change(context, node, "BanNode", lambda found: admin_pb2.BanNodeRequest(id=found))
    say(f"banned {found}")


def _change(context: typer.Context, node: str, method: str, request: Any) -> str:
    async def work(admin: Admin) -> str:
        found = await find_node(admin, node)
        await admin.call(method, request(found))
        return found

    return run_admin(context, work)


async def find_node(admin: Admin, node: str) -> str:
    """The id of the one node that is called so. Raises NotFound, InvalidInput (AMBIGUOUS_NODE)."""
    from sealring.v1 import admin_pb2

    nodes = (await admin.call("ListNodes", admin_pb2.ListNodesRequest())).nodes
    found = [one.id for one in nodes if node in (one.id, one.name)]
    if not found:
        raise NotFound(
            f"there is no node {node[:80]}", hint="see sealring nodes list", reason="NODE_NOT_FOUND"
        )
    if len(found) > 1:
        raise InvalidInput(
            f"{len(found)} nodes are called {node[:80]}", hint="name one by its id", reason="AMBIGUOUS_NODE"
        )
    return str(found[0])
