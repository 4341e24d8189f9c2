"""`sealring roster`: the signed list of members, shown, verified and compared."""

from __future__ import annotations

import datetime
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.calls.operator import call_admin, read_bundle
from sealring.cli.calls.verified import describe_roster
from sealring.cli.terminal.command import ADMIN, command, load_settings
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson, cannot_write, read_file, write_file
from sealring.cli.terminal.output import moment, print_data, print_json, print_table, say, until
from sealring.mesh.errors import InvalidInput, RosterError
from sealring.mesh.trust.levels import described

if TYPE_CHECKING:
    from sealring.mesh.roster.model import Roster

app = typer.Typer(name="roster", help="The signed list of members.", no_args_is_help=True)


RosterFile = Annotated[Path, typer.Argument(metavar="ROSTER", help="a signed roster (roster.dsse)")]
RootFile = Annotated[
    Path, typer.Option("--root-chain", metavar="FILE", help="chain of root metadata (root.dsse)")
]
Pin = Annotated[str, typer.Option("--root-sha256", metavar="HEX", help="hash of the first root key")]
At = Annotated[
    datetime.datetime | None,
    typer.Option(metavar="TIME", help="as of this local time, such as 2026-01-31T12:00:00 [default: now]"),
]
_read = functools.partial(read_file, max_bytes=2 << 20)


@command(app, example="sealring roster verify roster.dsse --root-chain root.dsse --root-sha256 HEX")
def verify(
    context: typer.Context,
    file: RosterFile,
    root: RootFile,
    pin: Pin,
    at: At = None,
    as_json: AsJson = False,
) -> None:
    """Check a roster from files and a root key's hash alone.

    It is what every reader does, and trusts nobody else.
    """
    found = _verified(file, root, pin, at.timestamp() if at is not None else host_of(context).now())
    if as_json:
        print_json({"root_sha256": pin, **describe_roster(found)})
        return
    print_roster({"root_sha256": pin, **describe_roster(found)}, host_of(context).now())
    say(f"roster {found.version} of cluster {found.cluster} holds")


@command(app, example="sealring roster diff old new --root-chain root.dsse --root-sha256 HEX")
def diff(
    older: RosterFile,
    newer: Annotated[Path, typer.Argument(metavar="NEWER", help="the later roster")],
    root: RootFile,
    pin: Pin,
    as_json: AsJson = False,
) -> None:
    """Show what changed between two rosters, after checking both as of when they were issued."""
    from sealring.mesh.roster.codec import issued_unverified

    before, after = (_verified(file, root, pin, issued_unverified(_read(file))) for file in (older, newer))
    changes = compare_rosters(describe_roster(before), describe_roster(after))
    follows = after.version == before.version + 1
    if (follows and after.previous != before.hash) or (
        after.version == before.version and after.hash != before.hash
    ):
        raise RosterError(
            "the two rosters contradict each other",
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


def _verified(file: Path, root: Path, pin: str, now: float) -> Roster:
    from sealring.mesh.names import is_sha256
    from sealring.mesh.pki.root import decode_chain, verify_root_chain
    from sealring.mesh.roster.reader import check_roster

    if not is_sha256(pin):
        raise InvalidInput("the root key's hash is not 64 hex digits", reason="BAD_PIN", param="root_sha256")
    metadata = verify_root_chain(decode_chain(_read(root)), bytes.fromhex(pin), now=now)
    return check_roster(_read(file), metadata, now=now)


@command(app, example="sealring roster show --save .", section="cli", fields=ADMIN)
def show(
    context: typer.Context,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="also keep roster.dsse and root.dsse here")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the roster, after checking its signatures against the pinned root key."""
    from sealring.mesh.pki.root import decode_chain, verify_root_chain
    from sealring.mesh.roster.reader import check_roster

    pin = read_bundle(load_settings(context).settings.operator).root_sha256
    answer = call_admin(context, "GetRoster")
    now = host_of(context).now()
    root = verify_root_chain(decode_chain(answer.root_metadata), pin, now=now)
    found = check_roster(answer.roster, root, now=now)
    if save is not None:
        _save(save, answer)
    verified = {"root_sha256": pin.hex(), **describe_roster(found)}
    if as_json:
        print_json(verified)
        return
    print_data(f"root {verified['root_sha256']}")
    print_roster(verified, now)


def _save(folder: Path, answer: Any) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    write_file(folder / "roster.dsse", answer.roster)
    write_file(folder / "root.dsse", answer.root_metadata)


def print_roster(found: dict[str, Any], now: float) -> None:
    """A described roster as tables."""
    print_data(f"cluster {found['cluster']}, roster version {found['version']}, {found['hash'][:16]}")
    print_data(f"issued {moment(found['issued'])}, expires {until(found['expires'], now)}")
    print_data(f"minimum trust {described(found['min_trust'])}, floor {found['trust_floor']}")
    print_data(f"suites allowed: {', '.join(found['suites'])}\n")
    places: dict[str, list[Any]] = {}
    for ring in found["rings"]:
        for place in ring["members"]:
            first, end = place["layers"]
            places.setdefault(place["id"], []).append([ring["id"], place["rank"], f"{first}-{end - 1}"])
    rows = []
    for one in found["members"]:
        serves = [", ".join(map(str, column)) for column in zip(*places.get(one["id"], []), strict=True)]
        rows.append(
            [
                *(one["id"], described(one["trust"]), one["key_type"]),
                *(serves or ["", "", ""]),
                moment(one["attested_at"]),
            ]
        )
    print_table(["member", "trust", "key", "ring", "rank", "layers", "attested"], rows)
    for gateway in found["gateways"]:
        print_data(f"gateway {gateway}")
    for gone in found["revoked"]:
        print_data(f"revoked {gone['id']} at {moment(gone['at'])}")
