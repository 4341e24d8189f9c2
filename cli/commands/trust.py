"""`sealring roster`, `audit` and `status`: what the cluster says of itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.deployments import print_deployments
from cli.commands.nodes import print_nodes
from cli.operator import Admin, call_admin, read_bundle, run_admin
from cli.output import moment, plain, print_data, print_json, print_table
from cli.settings_flags import settings_command
from cli.words import AsJson

if TYPE_CHECKING:
    from mesh.roster import Roster

app = typer.Typer()
roster = typer.Typer(name="roster", help="The signed list of members.", no_args_is_help=True)
app.add_typer(roster)


@roster.command(cls=settings_command("cli"))
def show(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the roster, after checking its signatures against the pinned root key."""
    from cli.settings_flags import load_settings
    from mesh.rootmeta import decode_chain, verify_root_chain
    from mesh.roster_reader import check_roster
    from sealring.v1 import admin_pb2

    pin = read_bundle(load_settings(context, "cli").settings.operator).root_sha256
    answer = call_admin(context, "GetRoster", admin_pb2.GetAdminRosterRequest())
    now = time.time()
    root = verify_root_chain(decode_chain(answer.root_metadata), pin, now=now)
    found = check_roster(answer.roster, root, now=now)
    verified = {"root_sha256": pin.hex(), **describe_roster(found)}
    if as_json:
        print_json(verified)
        return
    print_data(f"root {verified['root_sha256']}")
    print_roster(verified)


def describe_roster(found: Roster) -> dict[str, Any]:
    """A roster as JSON data: hashes in hex, layers as [first, end)."""
    return {
        "cluster": found.cluster,
        "version": found.version,
        "hash": found.hash.hex(),
        "issued": found.issued,
        "expires": found.expires,
        "suites": [str(suite) for suite in found.suites],
        "trust_floor": found.trust_floor,
        "min_trust": found.min_trust,
        "members": [
            {
                "id": one.id,
                "key_type": str(one.key_type),
                "level": str(one.level),
                "trust": one.trust,
                "attested_at": one.attested_at,
                "challenged_at": one.challenged_at,
                "addresses": list(one.addresses),
            }
            for one in found.members
        ],
        "rings": [
            {
                "id": ring.id,
                "deployment": ring.deployment,
                "model": ring.model,
                "context": ring.context,
                "min_trust": ring.min_trust,
                "members": [
                    {"id": one.id, "rank": one.rank, "layers": list(one.layers)} for one in ring.members
                ],
            }
            for ring in found.rings
        ],
        "gateways": [one.id for one in found.gateways],
        "revoked": [{"id": one.id, "at": one.at} for one in found.revoked],
    }


def print_roster(found: dict[str, Any]) -> None:
    """A described roster as tables."""
    print_data(f"cluster {found['cluster']}, roster version {found['version']}, {found['hash'][:16]}")
    print_data(f"issued {moment(found['issued'])}, expires {moment(found['expires'])}")
    print_data(f"minimum trust {found['min_trust']}, floor {found['trust_floor']}")
    print_data(f"suites allowed: {', '.join(found['suites'])}\n")
    places = {place["id"]: (ring, place) for ring in found["rings"] for place in ring["members"]}
    rows = []
    for one in found["members"]:
        ring, place = places.get(one["id"], ({"id": ""}, None))
        layers = f"{place['layers'][0]}-{place['layers'][1] - 1}" if place else ""
        rank = place["rank"] if place else ""
        trust = f"{one['level']} {one['trust']}"
        rows.append([one["id"], trust, one["key_type"], ring["id"], rank, layers, moment(one["attested_at"])])
    print_table(["member", "trust", "key", "ring", "rank", "layers", "attested"], rows)
    for gateway in found["gateways"]:
        print_data(f"gateway {gateway}")
    for gone in found["revoked"]:
        print_data(f"revoked {gone['id']} at {moment(gone['at'])}")


@app.command(cls=settings_command("cli"))
def audit(
    context: typer.Context,
    after: Annotated[int, typer.Option(min=0, help="entries after this number")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="entries at most")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show who did what to the cluster."""
    from sealring.v1 import admin_pb2

    request = admin_pb2.ListAuditLogRequest(after=after, limit=limit)
    entries = plain(call_admin(context, "ListAuditLog", request))["entries"]
    if as_json:
        print_json(entries)
        return
    rows = [
        [
            one["sequence"],
            moment(one["at"]),
            one["actor"],
            one["action"],
            one["subject"],
            " ".join(f"{name}={value}" for name, value in sorted(one["details"].items())),
        ]
        for one in entries
    ]
    print_table(["number", "at", "actor", "action", "subject", "details"], rows)


@app.command(cls=settings_command("cli"))
def status(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the nodes and the rings."""
    from sealring.v1 import admin_pb2

    async def work(admin: Admin) -> tuple[Any, Any]:
        nodes = await admin.call("ListNodes", admin_pb2.ListNodesRequest())
        return nodes, await admin.call("ListDeployments", admin_pb2.ListDeploymentsRequest())

    nodes, deployments = (plain(answer) for answer in run_admin(context, work))
    if as_json:
        print_json({"nodes": nodes["nodes"], "deployments": deployments["deployments"]})
        return
    print_nodes(nodes["nodes"])
    print_data("")
    print_deployments(deployments["deployments"])
