"""`sealring keys`: the API keys of the gateway on this machine."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from sealring.cli.output import moment, print_data, print_json, print_table, say
from sealring.cli.settings_flags import load_settings, settings_command
from sealring.cli.words import AsJson

if TYPE_CHECKING:
    from sealring.gateway.access.keyfile import KeyFile, KeyRecord

app = typer.Typer(
    name="keys",
    help="API keys of a gateway, in its state folder; a running gateway takes changes up at once.",
    no_args_is_help=True,
)

_DAY = 86_400


class Scope(enum.StrEnum):
    """What a key is good for: prompts, metrics, or everything."""

    INFERENCE = "inference"
    READ = "read"
    ADMIN = "admin"


@app.command(cls=settings_command("gateway"))
def create(
    context: typer.Context,
    scope: Annotated[
        list[Scope] | None, typer.Option(help="what it is good for; repeatable [default: inference]")
    ] = None,
    label: Annotated[str, typer.Option(help="for your own eyes, in `keys list`")] = "",
    days: Annotated[int, typer.Option(min=0, max=3650, help="good for so long; 0: until revoked")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print a new API key. It is shown this once; from the first on, every request needs one."""
    from sealring.gateway.access.keys import Scope as KeyScope

    chosen = [KeyScope(one.value) for one in scope or [Scope.INFERENCE]]
    keys = _keys(context)
    first = not keys.read()
    text, record = keys.create(chosen, label=label, seconds=days * _DAY)
    if as_json:
        print_json({"key": text, **_plain(record)})
        return
    print_data(text)
    until = f"until {moment(record.expires)}" if record.expires else "until it is revoked"
    say(f"good for {', '.join(record.scopes)} {until}; use: authorization: Bearer KEY")
    if first:
        say("this is the gateway's first key: from now on it answers no request without one")


@app.command("list", cls=settings_command("gateway"))
def list_keys(context: typer.Context, as_json: AsJson = False) -> None:
    """List the keys without their secrets."""
    import time

    records = sorted(_keys(context).read().values(), key=lambda record: record.created)
    if as_json:
        print_json([_plain(record) for record in records])
        return
    rows = []
    for one in records:
        state = "revoked" if one.revoked else "usable" if one.usable(time.time()) else "expired"
        times = [moment(when) for when in (one.created, one.last_used, one.expires)]
        rows.append([one.id, one.label, ", ".join(one.scopes), *times, state])
    print_table(["id", "label", "scopes", "created", "last used", "expires", "state"], rows)


@app.command(cls=settings_command("gateway"))
def revoke(context: typer.Context, key_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Make a key useless for good."""
    record = _keys(context).revoke(key_id)
    say(f"revoked {record.id}")


def _keys(context: typer.Context) -> KeyFile:
    from sealring.gateway.access.keyfile import KeyFile
    from sealring.mesh.member.state import is_enrolled

    folder = load_settings(context, "gateway").settings.state_dir
    if not is_enrolled(folder):
        say(f"note: no gateway has been enrolled in {folder} yet")
    return KeyFile(folder)


def _plain(record: KeyRecord) -> dict[str, object]:
    return record.model_dump(mode="json", exclude={"hash"})
