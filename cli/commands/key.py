"""`sealring key`: the API keys of the gateway on this machine."""

from __future__ import annotations

import enum
import getpass
from typing import TYPE_CHECKING, Annotated

import typer

from sealring.cli.terminal.command import command, state_here
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson, Seconds
from sealring.cli.terminal.output import moment, print_data, print_json, print_table, say, until
from sealring.mesh.errors import InvalidInput

if TYPE_CHECKING:
    from sealring.edge.access.keyfile import KeyFile, KeyRecord

app = typer.Typer(
    name="key",
    help="API keys of the gateway on this machine; changes count at once.",
    no_args_is_help=True,
)

_DAY = 86_400
_STATE = ("state_dir",)
_TOKENS_A_DAY = typer.Option(
    min=0,
    metavar="N",
    help="tokens that it may use from midnight to midnight, but for those of cached prefixes; 0: any number",
)
_LAN = typer.Option("--lan", help="of the door for phones and laptops (`up --lan`)")


class Scope(enum.StrEnum):
    """What a key is good for: prompts, metrics, or everything."""

    INFERENCE = "inference"
    READ = "read"
    ADMIN = "admin"


@command(app, example="sealring key create --label laptop", section="gateway", fields=_STATE)
def create(
    context: typer.Context,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            metavar="SCOPE",
            help="inference, read or admin; may be repeated [default: inference]",
        ),
    ] = None,
    label: Annotated[str, typer.Option(help="name in `key list` and `usage` [default: who made it]")] = "",
    lifetime: Annotated[
        Seconds | None,
        Seconds.option("how long it is good for [default: until it is revoked]", least=1, most=3650 * _DAY),
    ] = None,
    tokens_a_day: Annotated[int, _TOKENS_A_DAY] = 0,
    lan: Annotated[bool, _LAN] = False,
    as_json: AsJson = False,
) -> None:
    """Print a new API key; it is shown this once.

    From a gateway's first key on, every request needs one.
    """
    from sealring.edge.access.keys import Scope as KeyScope

    chosen = [KeyScope(one.value) for one in scope or [Scope.INFERENCE]]
    keys = _keys(context, lan=lan)
    known = keys.read()
    first, label = not (lan or known), label or f"key {len(known) + 1} of {getpass.getuser()}"
    text, record = keys.create(chosen, label=label, seconds=int(lifetime or 0), tokens_a_day=tokens_a_day)
    if as_json:
        print_json({"key": text, **_plain(record)})
    else:
        print_data(text)
        ends = until(record.expires, host_of(context).now())
        lasts = f", and ends {ends}" if ends else " until it is revoked"
        say(f"good for {', '.join(record.scopes)}{lasts}; use: authorization: Bearer KEY")
    if first:
        say("this is the gateway's first key: from now on it answers no request without one")
        _keep_own(context, keys)


@command(app, "list", example="sealring key list", section="gateway", fields=_STATE)
def list_keys(context: typer.Context, lan: Annotated[bool, _LAN] = False, as_json: AsJson = False) -> None:
    """List the keys without their secrets."""
    records = sorted(_keys(context, lan=lan).read().values(), key=lambda record: record.created)
    if as_json:
        print_json([_plain(record) for record in records])
        return
    rows, now = [], host_of(context).now()
    for one in records:
        state = "revoked" if one.revoked else "usable" if one.usable(now) else "expired"
        used = max(one.created, one.last_used) if one.last_used else 0  # which is kept by the hour
        times = [moment(one.created), moment(used), until(one.expires, now)]
        a_day = f"{one.tokens_a_day:,}" if one.tokens_a_day else ""
        rows.append([one.id, one.label, ", ".join(one.scopes), a_day, *times, state])
    print_table(["id", "label", "scopes", "tokens a day", "created", "last used", "expires", "state"], rows)
    if not lan and (door := len(_keys(context, lan=True).read())):
        say(f"the LAN door has a list of its own, of {door}: sealring key list --lan")


@command(app, example="sealring key limit ID --tokens-a-day 200000", section="gateway", fields=_STATE)
def limit(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="as `key list` shows it")],
    tokens_a_day: Annotated[int, _TOKENS_A_DAY],
    lan: Annotated[bool, _LAN] = False,
) -> None:
    """Set how many tokens a day a key may use, from the next request on."""
    record = _keys(context, lan=lan).limit(key_id, tokens_a_day)
    say(f"{record.id} may use {f'{tokens_a_day:,}' if tokens_a_day else 'any number of'} tokens a day")


@command(app, example="sealring key revoke ID", section="gateway", fields=_STATE)
def revoke(
    context: typer.Context,
    key_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="as `key list` shows it [required without --all]")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="all keys; with --lan that closes the door")] = False,
    lan: Annotated[bool, _LAN] = False,
) -> None:
    """Refuse a key from now on, for good."""
    if (key_id is None) != every:
        raise InvalidInput("name the ID of one key, or --all", reason="BAD_OPTION")
    keys, now = _keys(context, lan=lan), host_of(context).now()
    for one in [one.id for one in keys.read().values() if one.usable(now)] if every else [str(key_id)]:
        say(f"revoked {keys.revoke(one).id}")
    if not any(one.usable(now) for one in keys.read().values()):
        what = "the LAN door closes" if lan else "the gateway answers no request until you create one"
        say(f"no key is usable now: {what}")


def _keep_own(context: typer.Context, keys: KeyFile) -> None:
    """Makes a key for this machine's own commands at the gateway of `sealring up`, and says whom it answers.
    Otherwise a key for a friend would lock out the first machine."""
    from sealring.cli.here.settings_files import settings_file_of
    from sealring.edge.access.keys import Scope as KeyScope
    from sealring.mesh.system.files import write_atomic
    from sealring.mesh.system.paths import default_state_root, gateway_key_file

    root = default_state_root()
    if state_here(context) != root / "gateway" or not settings_file_of(root, "gateway").exists():
        return
    text, record = keys.create([KeyScope.INFERENCE, KeyScope.READ], label="this machine")
    write_atomic(gateway_key_file(), f"{text}\n".encode())
    say(f"commands here use a key of their own, {record.id}; for programs: sealring connect NAME --write")
    say("this gateway answers this machine alone; for other people: sealring up --lan, keys with --lan")


def _keys(context: typer.Context, *, lan: bool) -> KeyFile:
    from sealring.edge.access.keyfile import LAN_FOLDER, KeyFile
    from sealring.mesh.system.paths import is_enrolled

    folder = state_here(context)
    if not is_enrolled(folder):
        say(f"note: no gateway has been enrolled in {folder} yet")
    return KeyFile(folder / LAN_FOLDER if lan else folder)


def _plain(record: KeyRecord) -> dict[str, object]:
    return record.model_dump(mode="json", exclude={"hash"})
