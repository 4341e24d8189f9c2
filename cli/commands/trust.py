"""`sealring roster`, `audit` and `status`: what the cluster says of itself."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sealring.cli.commands.deployments import print_deployments
from sealring.cli.commands.nodes import print_nodes
from sealring.cli.operator import Admin, call_admin, read_bundle, run_admin
from sealring.cli.output import moment, plain, print_data, print_json, print_table, say
from sealring.cli.settings_flags import settings_command
from sealring.cli.words import AsJson, cannot_write, read_file, write_file
from sealring.mesh.errors import InvalidInput, RosterError

if TYPE_CHECKING:
    from sealring.coordinator.roster.audit_head import AuditHead
    from sealring.mesh.roster.model import Roster

app = typer.Typer()
roster = typer.Typer(name="roster", help="The signed list of members.", no_args_is_help=True)
app.add_typer(roster)


RosterFile = Annotated[Path, typer.Argument(metavar="ROSTER", help="a signed roster (roster.dsse)")]
RootFile = Annotated[Path, typer.Option("--root", metavar="FILE", help="chain of root metadata (root.dsse)")]
Pin = Annotated[str, typer.Option("--root-sha256", metavar="HEX", help="hash of the first root key")]
At = Annotated[int, typer.Option(min=0, help="as of this time, in seconds since 1970; 0: now")]
_read = functools.partial(read_file, max_bytes=2 << 20)


@roster.command()
def verify(file: RosterFile, root: RootFile, pin: Pin, at: At = 0, as_json: AsJson = False) -> None:
    """Check a roster from files and a root key's hash alone, as any reader does; trusts nobody else."""
    found = _verified(file, root, pin, at)
    if as_json:
        print_json({"root_sha256": pin, **describe_roster(found)})
        return
    print_roster({"root_sha256": pin, **describe_roster(found)})
    say(f"roster {found.version} of cluster {found.cluster} holds")


@roster.command()
def diff(
    older: RosterFile,
    newer: Annotated[Path, typer.Argument(metavar="NEWER", help="a later one")],
    root: RootFile,
    pin: Pin,
    as_json: AsJson = False,
) -> None:
    """Show what changed between two rosters, after checking both as of when they were issued."""
    before, after = (_verified(file, root, pin, _issued(file)) for file in (older, newer))
    changes = compare_rosters(describe_roster(before), describe_roster(after))
    follows = after.version == before.version + 1
    if (follows and after.previous != before.hash) or (
        after.version == before.version and after.hash != before.hash
    ):
        raise RosterError(
            "the two rosters are of two histories",
            hint="the roster keys may be stolen: compare with other members and rotate them",
            reason="ROSTER_EQUIVOCATION",
        )
    if as_json:
        print_json({"from": before.version, "to": after.version, "changes": changes})
        return
    print_data(f"version {before.version} -> {after.version}")
    for change in changes:
        print_data(" ".join(str(part) for part in change.values() if part != ""))


def compare_rosters(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """What changed from one described roster to another, but for hashes and times of the roster itself."""
    changes: list[dict[str, Any]] = []
    for name in ("trust_floor", "min_trust", "suites"):
        if before[name] != after[name]:
            value = f"{before[name]} -> {after[name]}"
            changes.append({"what": "changed", "kind": "roster", "id": "", "field": name, "value": value})
    for kind in ("members", "rings", "gateways", "revoked"):
        old, new = ({_id(one): one for one in found[kind]} for found in (before, after))
        for identifier in sorted(old.keys() | new.keys()):
            if identifier not in new or identifier not in old:
                what = "removed" if identifier in old else "added"
                changes.append({"what": what, "kind": kind, "id": identifier, "field": "", "value": ""})
                continue
            first, second = old[identifier], new[identifier]
            for field in first if isinstance(first, dict) else ():
                if first[field] != second[field]:
                    value = f"{first[field]} -> {second[field]}"
                    changes.append(
                        {"what": "changed", "kind": kind, "id": identifier, "field": field, "value": value}
                    )
    return changes


def _id(entry: Any) -> str:
    return str(entry["id"] if isinstance(entry, dict) else entry)


def _verified(file: Path, root: Path, pin: str, at: int) -> Roster:
    from sealring.mesh.pki.root import decode_chain, verify_root_chain
    from sealring.mesh.roster.reader import check_roster

    if re.fullmatch(r"[0-9a-f]{64}", pin) is None:
        raise InvalidInput("the root key's hash is not 64 hex digits", reason="BAD_PIN", param="root_sha256")
    now = at or time.time()
    metadata = verify_root_chain(decode_chain(_read(root)), bytes.fromhex(pin), now=now)
    return check_roster(_read(file), metadata, now=now)


def _issued(file: Path) -> int:
    from sealring.mesh.crypto.dsse import open_envelope
    from sealring.mesh.roster.codec import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE, parse_header

    opened = open_envelope(_read(file), payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    return parse_header(opened.payload).issued


@roster.command(cls=settings_command("cli"))
def show(
    context: typer.Context,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="also keep roster.dsse and root.dsse here")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the roster, after checking its signatures against the pinned root key."""
    from sealring.cli.settings_flags import load_settings
    from sealring.mesh.pki.root import decode_chain, verify_root_chain
    from sealring.mesh.roster.reader import check_roster
    from sealring.v1 import admin_pb2

    pin = read_bundle(load_settings(context, "cli").settings.operator).root_sha256
    answer = call_admin(context, "GetRoster", admin_pb2.GetAdminRosterRequest())
    now = time.time()
    root = verify_root_chain(decode_chain(answer.root_metadata), pin, now=now)
    found = check_roster(answer.roster, root, now=now)
    if save is not None:
        _save(save, answer)
    verified = {"root_sha256": pin.hex(), **describe_roster(found)}
    if as_json:
        print_json(verified)
        return
    print_data(f"root {verified['root_sha256']}")
    print_roster(verified)


def _save(folder: Path, answer: Any) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    write_file(folder / "roster.dsse", answer.roster)
    write_file(folder / "root.dsse", answer.root_metadata)


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


AuditWork = Literal["show", "verify"]
_AUDIT_PAGE = 1000


async def _verify_audit(admin: Admin, pin: bytes) -> tuple[int, bytes, AuditHead]:
    """How many entries there are, the hash of the last, and what of them the roster keys signed.

    Raises FailedPrecondition (AUDIT_BROKEN, AUDIT_UNSIGNED), RosterError (ROOT_*).
    """
    from sealring.coordinator.roster.audit_head import check_signed, read_head
    from sealring.coordinator.store import verify_chain
    from sealring.coordinator.store.audit import FIRST_PREVIOUS
    from sealring.mesh.pki.root import decode_chain, verify_root_chain
    from sealring.v1 import admin_pb2

    answer = await admin.call("GetRoster", admin_pb2.GetAdminRosterRequest())
    root = verify_root_chain(decode_chain(answer.root_metadata), pin, now=time.time())
    last, head, found = (0, FIRST_PREVIOUS), None, None
    while True:
        request = admin_pb2.ListAuditLogRequest(after=last[0], limit=_AUDIT_PAGE)
        page = await admin.call("ListAuditLog", request)
        head = head or read_head(page.signed_head, root)
        last = verify_chain(page.entries, after=last)
        found = next((one.hash for one in page.entries if one.sequence == head.sequence), found)
        if len(page.entries) < _AUDIT_PAGE:
            check_signed(found, head)
            return *last, head


@app.command(cls=settings_command("cli"))
def audit(
    context: typer.Context,
    what: Annotated[AuditWork, typer.Argument(help="show entries, or verify the whole chain")] = "show",
    after: Annotated[
        int | None, typer.Option(min=0, help="the entries that follow this number; unset: the newest")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="entries at most")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show who did what to the cluster, or verify that nothing of it was changed."""
    from sealring.v1 import admin_pb2

    if what == "verify":
        _show_verified(context, as_json)
        return
    request = admin_pb2.ListAuditLogRequest(after=after or 0, limit=limit, newest=after is None)
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


def _show_verified(context: typer.Context, as_json: bool) -> None:
    from sealring.cli.settings_flags import load_settings

    pin = read_bundle(load_settings(context, "cli").settings.operator).root_sha256
    count, last, head = run_admin(context, lambda admin: _verify_audit(admin, pin))
    if as_json:
        print_json({"entries": count, "head": last.hex(), "signed": head.sequence, "signed_at": head.at})
        return
    print_data(f"{count} entries, one chain, head {last.hex()}")
    print_data(f"the roster keys signed it up to entry {head.sequence}, {moment(head.at)}")
    if count > head.sequence:
        print_data(f"{count - head.sequence} entries after that are not signed yet")


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
