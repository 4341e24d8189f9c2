"""Nodes and gateways as the coordinator knows them: found by name, evicted, banned, shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sealring.cli.calls.operator import Admin, run_admin
from sealring.cli.terminal.output import moment, plain, print_data, print_table, say
from sealring.mesh.errors import InvalidInput, NotFound
from sealring.mesh.trust.levels import SCORES, TrustLevel, described
from sealring.mesh.units import size

if TYPE_CHECKING:
    import typer

Find = Callable[[Any], Iterable[Any]]

_TOKENS_GONE = "; what was left of its join token is revoked (sealring token create makes another)"
_SHOWN_LINKS = 32
SHOWN_ID = 16
"""Characters of an id in a table, which name the one that has it."""


def enrolled_nodes(known: Any) -> list[Any]:
    """The nodes of the roster."""
    return list(known.nodes)


def enrolled_gateways(known: Any) -> list[Any]:
    """The gateways of the roster."""
    return list(known.gateways)


def revoked(role: str) -> Find:
    """Members of a role that were evicted or banned."""
    from sealring.v1 import membership_pb2

    number = membership_pb2.Role.Value(role)
    return lambda known: [one for one in known.revoked if one.role == number]


def evict_member(context: typer.Context, name: str, *among: Find) -> None:
    """Takes a member out of the roster. Raises as `find_member`."""
    change_member(context, name, "EvictNode", *among)
    say(f"evicted {name}{_TOKENS_GONE}")


def ban_member(context: typer.Context, name: str, *among: Find) -> None:
    """Takes a member out of the roster for good. Raises as `find_member`."""
    change_member(context, name, "BanNode", *among)
    say(f"banned {name}{_TOKENS_GONE}")


def change_member(context: typer.Context, name: str, method: str, *among: Find, **fields: Any) -> None:
    """Calls a method of the Admin service with the id of the one called `name`."""

    async def work(admin: Admin) -> None:
        await admin.call(method, id=await find_member(admin, name, *among), **fields)

    run_admin(context, work)


async def find_node(admin: Admin, node: str) -> str:
    """The id of the one enrolled node that is called so. Raises as `find_member`."""
    return await find_member(admin, node, enrolled_nodes)


async def find_member(admin: Admin, name: str, *among: Find) -> str:
    """The id of the one that has this id, or is called so; of names, those of a later group only where nobody
    else has it.

    Ids, or their beginning as tables show it, come first: members choose their names, and may choose
    another's id, or another's name.

    Raises NotFound (UNKNOWN_NODE), InvalidInput (AMBIGUOUS_NODE).
    """
    known = await admin.call("ListNodes")
    groups = [list(those(known)) for those in among]
    by_id = {one.id for those in groups for one in those if len(name) >= SHOWN_ID and one.id.startswith(name)}
    for found in (sorted(by_id), *([one.id for one in those if one.name == name] for those in groups)):
        if len(found) > 1:
            shown = ", ".join(one[:SHOWN_ID] for one in found[:8])
            raise InvalidInput(
                f"{len(found)} are called {name[:80]}",
                hint=f"name one by its id: {shown}",
                reason="AMBIGUOUS_NODE",
            )
        if found:
            return str(found[0])
    raise NotFound(
        f"there is none called {name[:80]}",
        hint="see: sealring node list, sealring gateway list",
        reason="UNKNOWN_NODE",
    )


def _stored(beat: dict[str, Any]) -> str:
    """What a node stores of prompts, as the end of a sentence."""
    blocks, read = f"{beat['stored_blocks']:,} blocks", f"{beat['stored_read']:,} tokens"
    said = f"{size(beat['stored_bytes'])} of prompts in {blocks}, and has read {read} of them"
    if beat["stored_oldest"]:
        said += f"; the oldest was last used at {moment(beat['stored_oldest'])}"
    if beat["stored_damaged"]:
        said += f"; {beat['stored_damaged']:,} were damaged"
    return f"{said}; its disk takes no more" if beat["stored_broken"] else said


def _memory(beat: dict[str, Any]) -> str:
    usable = beat["memory_usable"]
    return f"{size(beat['memory_used'])} of {size(usable)}" if usable else ""


def print_nodes(nodes: list[dict[str, Any]]) -> None:
    """The nodes as a table; below it, what keeps nodes from serving."""
    rows = [
        [
            one["name"],
            one["id"][:SHOWN_ID],
            one["state"],
            described(one["trust"]),
            _memory(one["heartbeat"]),
            ", ".join(place["ring"] for place in one["rings"]),
            ", ".join(f"{place['first_layer']}-{place['end_layer'] - 1}" for place in one["rings"]),
        ]
        for one in nodes
    ]
    print_table(["node", "id", "state", "trust", "memory", "ring", "layers"], rows)
    for one in nodes:
        if one.get("idle"):
            print_data(f"{one['name']} is in no ring: {one['idle']}")
    for field, what in (("on_battery", "on battery"), ("low_power", "in Low Power Mode")):
        if names := [one["name"] for one in nodes if one["heartbeat"][field]]:
            print_data(f"{what}: {', '.join(names)}")
    kinds = {one["heartbeat"]["computes_on"] for one in nodes} - {""}
    for kind in sorted(kinds) if len(kinds) > 1 else ():
        names = [one["name"] for one in nodes if one["heartbeat"]["computes_on"] == kind]
        print_data(f"computing on {kind}: {', '.join(names)}")
    for one in nodes:
        beat = one["heartbeat"]
        if beat["stored_blocks"] or beat["stored_broken"]:
            print_data(f"{one['name']} stores {_stored(beat)}")
    _print_trouble([one for one in nodes if not one.get("idle")])


def print_links(links: list[dict[str, Any]], nodes: list[dict[str, Any]]) -> None:
    """Prints the measured links between nodes as a table, the slowest first, if there are any."""
    if not links:
        return
    names = {one["id"]: one["name"] for one in nodes}
    slowest = sorted(links, key=lambda one: int(one["bytes_per_second"]))
    rows = [
        [
            names.get(one["caller"], one["caller"][:SHOWN_ID]),
            names.get(one["called"], one["called"][:SHOWN_ID]),
            one["host"] or "no way was found",
            f"{size(int(one['bytes_per_second']))}/s" if one["host"] else "",
            f"{one['round_trip_us'] / 1000:.2f} ms" if one["host"] else "",
            moment(int(one["measured"])),
        ]
        for one in slowest[:_SHOWN_LINKS]
    ]
    print_data("")
    title = "links between nodes"
    if len(links) > len(rows):
        title += f", the slowest {len(rows)} of {len(links)}"
    print_table(["from", "to", "over", "rate", "round trip", "measured"], rows, title=title)


def links_along(links: list[dict[str, Any]], rings: Iterable[Any]) -> list[dict[str, Any]]:
    """Those of the links that planned rings use, with their closing edges."""
    used = set()
    for ring in rings:
        members = [stage.member for stage in ring.stages]
        used |= {frozenset(pair) for pair in zip(members, [*members[1:], *members[:1]], strict=True)}
    return [one for one in links if frozenset((one["caller"], one["called"])) in used]


def print_gateways(gateways: list[dict[str, Any]]) -> None:
    """The gateways as a table."""
    rows = [
        [
            one["name"],
            one["id"][:SHOWN_ID],
            "connected" if one["watching"] else "offline",
            moment(one["enrolled"]),
        ]
        for one in gateways
    ]
    print_table(["gateway", "id", "state", "enrolled"], rows)
    for one in gateways:
        if at := ", ".join(f"https://{address}/v1" for address in one["lan"]):
            print_data(f"{one['name']}: its LAN door is open at {at}")
    _print_trouble(gateways)


def _print_trouble(members: list[dict[str, Any]]) -> None:
    for one in members:
        if one["trouble"]:
            print_data(f"{one['name']}: {one['trouble']}")


def print_revoked(members: list[dict[str, Any]], role: str) -> None:
    """Prints the members of a role that were evicted or banned, a line each."""
    for one in members:
        if one["role"] == role:
            done = "banned" if one["banned"] else "evicted"
            print_data(f"{done} {one['name']} {one['id']} at {moment(one['at'])}")


async def look(admin: Admin) -> dict[str, Any]:
    """Nodes, each with why it is `idle`, their links, gateways, and deployments with rings, as JSON data."""
    known = plain(await admin.call("ListNodes"))
    listed = plain(await admin.call("ListDeployments"))
    deployments = listed["deployments"]
    nodes = [{**node, "idle": why_idle(node, deployments)} for node in known["nodes"]]
    found = {"nodes": nodes} | {name: known[name] for name in ("gateways", "links", "trouble")}
    return {**found, "deployments": deployments}


def why_idle(node: dict[str, Any], deployments: list[dict[str, Any]]) -> str:
    """Why a node is in no ring; nothing for one that is in one."""
    if node["rings"]:
        return ""
    if node["state"] == "offline":
        return f"offline, {node['trouble']}" if node["trouble"] else "offline"
    if node["trouble"]:
        return str(node["trouble"])
    if node["state"] == "draining":
        return "it was drained (sealring node drain --undo lets it serve again)"
    if not deployments:
        return "no model is served"
    return "; ".join(_unfit(node, one["plan"]) for one in deployments)


def _unfit(node: dict[str, Any], plan: dict[str, Any]) -> str:
    spec = plan["spec"]
    stages = [stage for ring in plan["rings"] for stage in ring["stages"]]
    if any(stage["member"] == node["id"] for stage in stages):
        return f"{spec['name']} is about to use it"
    if SCORES[TrustLevel(node["trust"])] < SCORES[TrustLevel(spec["trust_floor"])]:
        return f"{spec['name']} wants trust level {spec['trust_floor']} and it has {node['trust']}"
    if spec["members"] and node["id"] not in spec["members"]:
        return f"{spec['name']} is for other nodes (--member)"
    least = min((stage["weight_bytes"] + stage["kv_bytes"] for stage in stages), default=0)
    usable = node["heartbeat"]["memory_usable"]
    if usable < least:
        return f"{spec['name']} needs {size(least)} of memory on each node and it has {size(usable)}"
    holding = "one node holds" if len(stages) == 1 else f"{len(stages)} nodes hold"
    return f"{spec['name']} does not need it: {holding} all of it"
