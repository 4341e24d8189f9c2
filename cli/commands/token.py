"""`sealring token`: join tokens and the join code, good for one machine or a few, and for minutes."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from sealring.cli.calls.happenings import code_lines
from sealring.cli.calls.operator import call_admin
from sealring.cli.terminal.command import ADMIN, command
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson, Seconds
from sealring.cli.terminal.output import plain, print_data, print_json, print_table, say, until

app = typer.Typer(
    name="token", help="Join tokens, which let machines join for a few minutes.", no_args_is_help=True
)


_CODE = "code"


class Role(enum.StrEnum):
    """What a token lets a machine become."""

    NODE = "node"
    GATEWAY = "gateway"


@command(app, example="sealring token create --role gateway --ttl 30m", section="cli", fields=ADMIN)
def create(
    context: typer.Context,
    role: Annotated[
        Role, typer.Option(metavar="ROLE", help="what the machine becomes: node or gateway")
    ] = Role.NODE,
    ttl: Annotated[Seconds, Seconds.option("how long it is good for", least=1, most=3600)] = Seconds(600),
    uses: Annotated[int, typer.Option(min=1, max=64, help="how many machines it lets join")] = 1,
    note: Annotated[str, typer.Option(help="for your own eyes, in `token list`")] = "",
    as_json: AsJson = False,
) -> None:
    """Print what to type on the machine that joins.

    It has a new join token in it, which is shown this once.
    """
    wanted = {"role": f"ROLE_{role.name}", "ttl_seconds": int(ttl), "note": note, "uses": uses}
    answer = call_admin(context, "CreateJoinToken", **wanted)
    if as_json:
        print_json(plain(answer))
        return
    print_data(f"sealring {'join' if role is Role.NODE else 'gateway join'} {answer.token}")
    machines = f"one {role}" if uses == 1 else f"{uses} {role}s"
    say(f"good for {machines}; it ends {until(answer.expires, host_of(context).now())}")


@command(app, example="sealring token code --uses 4", section="cli", fields=ADMIN)
def code(
    context: typer.Context,
    ttl: Annotated[Seconds, Seconds.option("how long it is good for", least=1, most=3600)] = Seconds(600),
    uses: Annotated[int, typer.Option(min=1, max=64, help="how many nodes it lets join")] = 1,
    as_json: AsJson = False,
) -> None:
    """Print a short code to type on the machine that joins, in place of the code before.

    Five wrong codes end it. While it is good the cluster is announced on the local network.
    """
    from sealring.mesh.member.joincode import show_code

    answer = call_admin(context, "CreateJoinCode", ttl_seconds=int(ttl), uses=uses)
    if as_json:
        print_json(plain(answer))
        return
    print_data(show_code(answer.code))
    nodes = "one node" if uses == 1 else f"{uses} nodes"
    ends = until(answer.expires, host_of(context).now())
    say(f"good for {nodes}; it ends {ends}: type there `sealring join`, then the code")


@command(app, "list", example="sealring token list", section="cli", fields=ADMIN)
def list_tokens(context: typer.Context, as_json: AsJson = False) -> None:
    """List the tokens that are not used up, without their secrets."""
    known = call_admin(context, "ListJoinTokens")
    answer = plain(known)
    if as_json:
        print_json(answer["tokens"])
        return
    for line in code_lines(known) if known.HasField("code") else ():
        say(line)
    now = host_of(context).now()
    rows = [
        [one["token_id"], one["role"], one["uses"], until(one["expires"], now), one["note"]]
        for one in answer["tokens"]
    ]
    print_table(["id", "role", "uses", "expires", "note"], rows)


@command(app, example="sealring token revoke ID", section="cli", fields=ADMIN)
def revoke(
    context: typer.Context,
    token_id: Annotated[str, typer.Argument(metavar="ID", help="as `token list` shows it; or `code`")],
) -> None:
    """Revoke a join token, or with `code` as its id the join code."""
    if token_id == _CODE:
        call_admin(context, "RevokeJoinCode")
    else:
        call_admin(context, "RevokeJoinToken", token_id=token_id)
    say(f"revoked {token_id}")
