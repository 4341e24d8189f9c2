"""`sealring audit`: who did what to the cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from sealring.cli.calls.operator import Admin, call_admin, read_bundle, run_admin
from sealring.cli.terminal.command import ADMIN, command, load_settings
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import moment, plain, print_data, print_json, print_table

if TYPE_CHECKING:
    from sealring.coordinator.roster.audit_head import AuditHead

app = typer.Typer(name="audit", help="The audit log: who did what to the cluster.", no_args_is_help=True)

_AUDIT_PAGE = 1000


async def _verify_audit(admin: Admin, pin: bytes) -> tuple[int, bytes, AuditHead]:
    """How many entries there are, the hash of the last, and what of them the roster keys signed.

    Raises FailedPrecondition (AUDIT_BROKEN, AUDIT_UNSIGNED), RosterError (ROOT_*).
    """
    from sealring.coordinator.roster.audit_head import check_signed, read_head
    from sealring.coordinator.store import verify_chain
    from sealring.coordinator.store.audit import FIRST_PREVIOUS
    from sealring.mesh.pki.root import decode_chain, verify_root_chain

    answer = await admin.call("GetRoster")
    root = verify_root_chain(decode_chain(answer.root_metadata), pin, now=time.time())
    last, head, found = (0, FIRST_PREVIOUS), None, None
    while True:
        page = await admin.call("ListAuditLog", after=last[0], limit=_AUDIT_PAGE)
        head = head or read_head(page.signed_head, root)
        last = verify_chain(page.entries, after=last)
        found = next((one.hash for one in page.entries if one.sequence == head.sequence), found)
        if len(page.entries) < _AUDIT_PAGE:
            check_signed(found, head)
            return *last, head


@command(app, "list", example="sealring audit list --limit 20", section="cli", fields=ADMIN)
def list_entries(
    context: typer.Context,
    after: Annotated[
        int | None, typer.Option(min=0, help="the entries that follow this number [default: the newest]")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="entries at most")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show who did what to the cluster."""
    found = call_admin(context, "ListAuditLog", after=after or 0, limit=limit, newest=after is None)
    entries = plain(found)["entries"]
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


@command(app, example="sealring audit verify", section="cli", fields=ADMIN)
def verify(context: typer.Context, as_json: AsJson = False) -> None:
    """Verify that no entry of the audit log was changed or cut off."""
    pin = read_bundle(load_settings(context).settings.operator).root_sha256
    count, last, head = run_admin(context, lambda admin: _verify_audit(admin, pin))
    if as_json:
        print_json({"entries": count, "head": last.hex(), "signed": head.sequence, "signed_at": head.at})
        return
    print_data(f"{count} entries, one chain, head {last.hex()}")
    print_data(f"the roster keys signed it up to entry {head.sequence}, {moment(head.at)}")
    if count > head.sequence:
        print_data(f"{count - head.sequence} entries after that are not signed yet")
