"""`sealring trace`: where a ring's time goes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from sealring.cli.calls.operator import call_admin
from sealring.cli.terminal.command import ADMIN, command
from sealring.cli.terminal.options import AsJson, Seconds
from sealring.cli.terminal.output import print_data, print_json, print_table, progress, say

app = typer.Typer()

_MARGIN_SECONDS = 45.0


@command(
    app,
    example="sealring trace --duration 10s",
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
    as_json: AsJson = False,
) -> None:
    """Show where a ring's time goes, step by step.

    Watches a serving ring, then asks its members what they did: waiting for input, computing, sealing,
    sending, reading prefixes from disk. Steps, times and numbers of tokens only; nothing of what was asked
    or answered.
    """
    from sealring.cli.tracing import member_shares
    from sealring.mesh.rpc.problem import from_problem

    wanted = {"ring": ring, "milliseconds": max(1, round(seconds * 1000))}
    with progress(f"watching for {seconds}"):
        found = call_admin(context, "TraceRing", **wanted, seconds=seconds + _MARGIN_SECONDS)
    shares = member_shares(found)
    for member in found.members:
        if member.HasField("problem"):
            say(f"no trace of {member.name}: {from_problem(member.problem)}")
    if not shares:
        raise from_problem(found.members[0].problem)
    if as_json:
        print_json({"ring": found.ring, "epoch": found.epoch, "members": [asdict(one) for one in shares]})
    else:
        _print_shares(found.ring, shares)


def _print_shares(ring: str, shares: list[Any]) -> None:
    from sealring.cli.tracing import SHOWN

    rows = [
        [
            one.rank,
            one.name,
            *(one.shares[name] for name in SHOWN),
            one.idle,
            one.steps,
            one.seconds,
            one.clock_error,
        ]
        for one in shares
    ]
    columns = ["rank", "node", *(name.replace("_", " ") for name in SHOWN), "idle", "steps", "s", "clock ±ms"]
    print_table(
        columns, rows, title=f"ring {ring}: percent of the time; what runs beside each other overlaps"
    )
    for one in shares:
        if one.drafted:
            sources = f"{one.modelled} came from a model, {one.drafted - one.modelled} were looked up"
            print_data(
                f"of {one.drafted} tokens that {one.name} guessed {one.accepted} were right; {sources}"
            )
        if one.recalled or one.stored:
            read, wrote = f"read {one.recalled:,} tokens of prefixes", f"wrote {one.stored:,}"
            print_data(f"{one.name} {read} from its disk and {wrote}")
