"""`sealring nodes` and `sealring gateways`: the members of a cluster and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from sealring.cli.operator import Admin, call_admin, run_admin
from sealring.cli.output import moment, plain, print_data, print_json, print_table, say, size
from sealring.cli.settings_flags import settings_command
from sealring.cli.words import AsJson
from sealring.mesh.errors import InvalidInput, NotFound

app = typer.Typer()
nodes_app = typer.Typer(name="nodes", help="The cluster's nodes.", no_args_is_help=True)
gateways_app = typer.Typer(name="gateways", help="The cluster's gateways.", no_args_is_help=True)
app.add_typer(nodes_app)
app.add_typer(gateways_app)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="id or name of a node")]
GatewayName = Annotated[str, typer.Argument(metavar="GATEWAY", help="id or name of a gateway")]
Find = Callable[[Any], Iterable[Any]]


@nodes_app.command("list", cls=settings_command("cli"))
def list_nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the nodes with their state, trust, memory and layers."""
    from sealring.v1 import admin_pb2

    known = plain(call_admin(context, "ListNodes", admin_pb2.ListNodesRequest()))
    if as_json:
        print_json(known["nodes"])
        return
    print_nodes(known["nodes"])
    for one in known["revoked"]:
        done = "banned" if one["banned"] else "evicted"
        print_data(f"{done} {one['role']} {one['name']} {one['id']} at {moment(one['at'])}")


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
    _print_trouble(nodes)


def _print_trouble(machines: list[dict[str, Any]]) -> None:
    for one in machines:
        if one["trouble"]:
            print_data(f"{one['name']} is refused: {one['trouble']}")


def _of_nodes(known: Any) -> list[Any]:
    return list(known.nodes)


def _of_gateways(known: Any) -> list[Any]:
    return list(known.gateways)


def _revoked(role: str) -> Find:
    """Those of a role that were thrown out."""
    from sealring.v1 import membership_pb2

    number = membership_pb2.Role.Value(role)
    return lambda known: [one for one in known.revoked if one.role == number]


@nodes_app.command(cls=settings_command("cli"))
def drain(
    context: typer.Context,
    node: NodeName,
    undo: Annotated[bool, typer.Option("--undo", help="let it serve again")] = False,
) -> None:
    """Let a node finish what it runs and give it nothing new."""
    from sealring.v1 import admin_pb2

    found = _change(
        context, node, "DrainNode", lambda found: admin_pb2.DrainNodeRequest(id=found, undo=undo), _of_nodes
    )
    say(f"{'no longer draining' if undo else 'draining'} {found}")


@nodes_app.command(cls=settings_command("cli"))
def evict(context: typer.Context, node: NodeName) -> None:
    """Take a node out of the roster; it may enrol again with a new token."""
    _evict(context, node, _of_nodes)


@nodes_app.command(cls=settings_command("cli"))
def ban(context: typer.Context, node: NodeName) -> None:
    """Take a node out of the roster for good, by its identity key; also one that was evicted."""
    _ban(context, node, _of_nodes, _revoked("ROLE_NODE"))


@gateways_app.command("list", cls=settings_command("cli"))
def list_gateways(context: typer.Context, as_json: AsJson = False) -> None:
    """List the gateways, and whether they are connected."""
    from sealring.v1 import admin_pb2

    gateways = plain(call_admin(context, "ListNodes", admin_pb2.ListNodesRequest()))["gateways"]
    if as_json:
        print_json(gateways)
        return
    rows = [
        [one["name"], one["id"][:16], "connected" if one["watching"] else "offline", moment(one["enrolled"])]
        for one in gateways
    ]
    print_table(["gateway", "id", "state", "enrolled"], rows)
    _print_trouble(gateways)


@gateways_app.command("evict", cls=settings_command("cli"))
def evict_gateway(context: typer.Context, gateway: GatewayName) -> None:
    """Take a gateway out of the roster; it may enrol again with a new token."""
    _evict(context, gateway, _of_gateways)


@gateways_app.command("ban", cls=settings_command("cli"))
def ban_gateway(context: typer.Context, gateway: GatewayName) -> None:
    """Take a gateway out of the roster for good, by its identity key; also one that was evicted."""
    _ban(context, gateway, _of_gateways, _revoked("ROLE_GATEWAY"))


def _evict(context: typer.Context, name: str, *among: Find) -> None:
    from sealring.v1 import admin_pb2

    found = _change(context, name, "EvictNode", lambda found: admin_pb2.EvictNodeRequest(id=found), *among)
    say(f"evicted {found}")


def _ban(context: typer.Context, name: str, *among: Find) -> None:
    from sealring.v1 import admin_pb2

    found = _change(context, name, "BanNode", lambda found: admin_pb2.BanNodeRequest(id=found), *among)
    say(f"banned {found}")


def _change(context: typer.Context, name: str, method: str, request: Any, *among: Find) -> str:
    async def work(admin: Admin) -> str:
        found = await _find(admin, name, *among)
        await admin.call(method, request(found))
        return found

    return run_admin(context, work)


async def find_node(admin: Admin, node: str) -> str:
    """The id of the one enrolled node that is called so. Raises as `_find`."""
    return await _find(admin, node, _of_nodes)


async def _find(admin: Admin, name: str, *among: Find) -> str:
    """The id of the one that is called so; who was thrown out is looked for only where nobody else is.

    Raises NotFound (NODE_NOT_FOUND), InvalidInput (AMBIGUOUS_NODE).
    """
    from sealring.v1 import admin_pb2

    known = await admin.call("ListNodes", admin_pb2.ListNodesRequest())
    for those in among:
        found = [one.id for one in those(known) if name in (one.id, one.name)]
        if len(found) > 1:
            raise InvalidInput(
                f"{len(found)} are called {name[:80]}", hint="name one by its id", reason="AMBIGUOUS_NODE"
            )
        if found:
            return str(found[0])
    raise NotFound(
        f"there is none called {name[:80]}",
        hint="see: sealring nodes list, sealring gateways list",
        reason="NODE_NOT_FOUND",
    )
