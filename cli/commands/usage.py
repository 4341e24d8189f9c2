"""`sealring usage`: what was used, by key, model and day."""

from __future__ import annotations

import csv
import enum
import io
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.terminal.command import command, load_settings
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import print_data, print_json, print_table, say
from sealring.mesh.errors import InvalidInput, SealringError

if TYPE_CHECKING:
    from sealring.cli.settings import CliSettings
    from sealring.mesh.settings.config import Loaded
    from sealring.v1.inference_pb2 import GetUsageResponse

app = typer.Typer()


class Group(enum.StrEnum):
    """Each value of it has rows of its own."""

    DAY = "day"
    KEY = "key"
    MODEL = "model"


@command(
    app,
    example="sealring usage --by day --by model --days 7",
    section="cli",
    fields=("gateway", "gateway_ca", "api_key_file"),
    rich_help_panel="Look",
)
def usage(
    context: typer.Context,
    by: Annotated[
        list[Group] | None,
        typer.Option(metavar="GROUP", help="day, key or model; may be repeated [default: key and model]"),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=366, help="how many, today among them")] = 30,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV on standard output")] = False,
) -> None:
    """Show what was used: requests, tokens and ring seconds by key, model and day.

    A gateway counts the requests that come to it, and keeps the numbers for a year. Where it asks for API
    keys, this needs one of scope `read`. What a ring computes at once shares the ring's seconds.
    """
    import asyncio

    from sealring.cli.calls.usage import added_up, first_day

    if as_json and as_csv:
        raise InvalidInput("--json and --csv exclude each other", reason="BAD_OPTION")
    loaded = load_settings(context)
    groups = [one.value for one in dict.fromkeys(by or [Group.KEY, Group.MODEL])]
    found = asyncio.run(_ask(loaded, first_day(host_of(context).now(), days)))
    if any(one.more for one in found):
        say("note: there is more than a gateway tells at once; ask for fewer days")
    rows = added_up(found, groups)
    if as_json:
        print_json(rows)
    elif as_csv:
        _print_csv(rows)
    else:
        _print_rows(rows, groups, found)


async def _ask(loaded: Loaded[CliSettings], since: str) -> list[GetUsageResponse]:
    """The answers of the gateways; one without an answer is named. Raises the last error if none answers."""
    from sealring.cli.calls.gateway import inference
    from sealring.cli.calls.member import gateways_of

    found: list[GetUsageResponse] = []
    failed = None
    async with gateways_of(loaded) as (addresses, access):
        for address in addresses:
            try:
                async with inference(address, **access) as calls:
                    found.append(await calls.usage(since))
            except SealringError as error:
                failed = error
                if len(addresses) > 1:
                    say(f"without {address}: {error}")
    if failed is not None and not found:
        raise failed
    return found


def _print_csv(rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["requests"], lineterminator="\n")
    writer.writeheader()
    for row in rows:  # a spreadsheet takes no name and no label for a formula
        writer.writerow(
            {at: f"'{one}" if str(one).startswith(tuple("=+-@\t\r")) else one for at, one in row.items()}
        )
    print_data(text.getvalue().rstrip("\n"))


def _print_rows(rows: list[dict[str, Any]], groups: list[str], found: list[GetUsageResponse]) -> None:
    from sealring.cli.calls.usage import COUNTED, key_name

    def named(row: dict[str, Any], group: str) -> str:
        if group == "key":
            return key_name(row["key"], row["label"])
        return row[group] or "other"

    if not rows:
        print_data("nothing was used in these days")
    else:
        print_table(
            [*groups, *(one.removesuffix("_tokens") for one in COUNTED), "ring seconds"],
            [
                [
                    *(named(row, one) for one in groups),
                    *(row[name] for name in COUNTED),
                    row["ring_ms"] / 1000,
                ]
                for row in rows
            ],
        )
    for one in (key for answer in found for key in answer.keys if key.tokens_a_day):
        spent = f"{one.tokens_today:,} of its {one.tokens_a_day:,} tokens of today"
        print_data(f"{key_name(one.key, one.label)} has used {spent}")
