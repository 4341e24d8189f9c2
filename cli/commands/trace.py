"""`sealring trace`: where a ring's time goes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.cli.calls.operator import call_admin
from sealring.cli.terminal.command import ADMIN, command
from sealring.cli.terminal.options import AsJson, Seconds, cannot_write
from sealring.cli.terminal.output import print_json, print_table, progress, say

app = typer.Typer()

_MARGIN_SECONDS = 45.0


@command(
    app,
    example="sealring trace --duration 10s --out trace.json",
    section="cli",
    fields=ADMIN,
    rich_help_panel="Look",
)
def trace(
    context: typer.Context,
    ring: Annotated[str, typer.Option(help="ring [default: the only one]")] = "",
    seconds: Annotated[
        Seconds, Seconds.option("how long to watch", least=0.001, most=60, name="--duration")
    ] = Seconds(5),
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a Chrome trace (for ui.perfetto.dev)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where a ring's time goes, step by step.

    Watches a serving ring, then asks its members what they did: waiting for input, computing, sealing,
    sending. Steps and times only, nothing of what was asked or answered.
    """
    from sealring.cli.tracing import chrome_trace, member_shares
    from sealring.mesh.rpc.problem import from_problem
    from sealring.v1 import admin_pb2

    request = admin_pb2.TraceRingRequest(ring=ring, milliseconds=max(1, round(seconds * 1000)))
    with progress(f"watching for {seconds}"):
        found = call_admin(context, "TraceRing", request, seconds=seconds + _MARGIN_SECONDS)
    shares = member_shares(found)
    for member in found.members:
        if member.HasField("problem"):
            say(f"no trace of {member.name}: {from_problem(member.problem)}")
    if not shares:
        raise from_problem(found.members[0].problem)
    if out is not None:
        _write(out, chrome_trace(found))
    if as_json:
        print_json({"ring": found.ring, "epoch": found.epoch, "members": [asdict(one) for one in shares]})
    else:
        _print_shares(found.ring, shares)
    if out is not None:
        say(f"wrote {out}; open it with ui.perfetto.dev")


def _print_shares(ring: str, shares: list[Any]) -> None:
    from sealring.cli.tracing import SHOWN

    rows = [
        [
            one.rank,
            one.name,
            *(round(one.shares[name], 1) for name in SHOWN),
            round(one.idle, 1),
            one.steps,
            round(one.seconds, 2),
            round(one.clock_error, 3),
        ]
        for one in shares
    ]
    columns = ["rank", "node", *(name.replace("_", " ") for name in SHOWN), "idle", "steps", "s", "clock ±ms"]
    print_table(
        columns, rows, title=f"ring {ring}: percent of the time; what runs beside each other overlaps"
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from None
