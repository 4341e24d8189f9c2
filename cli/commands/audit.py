"""`sealring audit`: who did what to the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from sealring.cli.calls.operator import call_admin, run_admin
from sealring.cli.calls.verified import verify_audit
from sealring.cli.terminal.command import ADMIN, command
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import moment, plain, print_data, print_json, print_table

app = typer.Typer(name="audit", help="The audit log: who did what to the cluster.", no_args_is_help=True)


@command(app, "list", example="sealring audit list --limit 20", section="cli", fields=ADMIN)
def list_entries(
    context: typer.Context,
    after: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="the entries that follow this number [default: the newest]"),
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
    """Verify that each entry of the audit log follows from the one before it.

    Note its last number and hash elsewhere: a log that was made anew has another hash at that number.
    """
    found = run_admin(context, verify_audit)
    count = found.last - found.first + 1
    if as_json:
        print_json({"entries": count, "first": found.first, "last": found.last, "head": found.hash.hex()})
        return
    print_data(f"{count} entries, {found.first} to {found.last}, one chain, head {found.hash.hex()}")
