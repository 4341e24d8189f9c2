"""`sealring join`: any further machine of a cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sealring.cli.commands.up import Address, Downloads, Models, Name, SoftwareIdentity
from sealring.cli.output import Progress, print_json, say
from sealring.cli.settings_flags import config_file
from sealring.cli.words import AsJson, read_token
from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.paths import default_state_root

if TYPE_CHECKING:
    from sealring.cli.choices import Choices, Wishes
    from sealring.cli.machines import OtherMachine

app = typer.Typer()

_LOOK_SECONDS = 1.0


@app.command()
def join(
    context: typer.Context,
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOKEN]",
            help="as `sealring up` printed it; - reads it [default: asked for]",
            show_default=False,
        ),
    ] = None,
    address: Address = None,
    name: Name = None,
    models: Models = None,
    downloads: Downloads = None,
    software_identity_allowed: SoftwareIdentity = None,
    as_json: AsJson = False,
) -> None:
    """Join a cluster with this machine, and run its node until Ctrl-C.

    The token is checked against the coordinator before anything is sent. A machine that has joined runs its
    node again with `sealring join` alone.
    """
    from sealring.cli.choices import Wishes, node_folder
    from sealring.cli.foreground import signals_as_exceptions
    from sealring.mesh.member.state import is_enrolled
    from sealring.mesh.system.lock import lock_state

    wishes = Wishes(address, name, models or (), downloads, software_identity_allowed)
    root = default_state_root()
    file = config_file(context.find_root().params.get("config"))
    signals_as_exceptions()
    os.umask(0o077)
    with lock_state(root):
        if token is None and is_enrolled(node_folder(root, file)):
            _run(root, file, wishes)
            return
        choices = _enrol(root, file, wishes, _read(token), as_json=as_json)
        _keep(root, choices)
    _begin_anew(file)


def _read(token: str | None) -> str:
    """Raises InvalidInput (BAD_TOKEN)."""
    if token is not None:
        return read_token(token)
    if not sys.stdin.isatty():
        raise InvalidInput(
            "this machine has not joined a cluster, and there is no token",
            hint="type what `sealring up` or `sealring token create` prints on the first machine",
            reason="BAD_TOKEN",
        )
    return read_token(
        str(typer.prompt("The token that the first machine printed", err=True, hide_input=True))
    )


def _enrol(root: Path, file: Path | None, wishes: Wishes, token: str, *, as_json: bool) -> Choices:
    """Raises as `choose_other` and `sealring.node.join.join`."""
    from sealring.cli.choices import choose_other
    from sealring.mesh.member.bootstrap import JoinToken
    from sealring.node.join import join as enrol
    from sealring.node.settings import NodeSettings

    choices = choose_other(root, file, wishes, JoinToken.parse(token).addresses)
    for line in choices.said:
        say(line)
    enrolled = asyncio.run(enrol(NodeSettings(**choices.settings["node"]), token))
    peer = enrolled.state.peer
    member = enrolled.roster.member(peer.id)
    if as_json:
        print_json(
            {
                "member_id": peer.id,
                "cluster": peer.cluster,
                "name": enrolled.state.name,
                "level": member.level,
            }
        )
    say(f"joined cluster {peer.cluster} as {enrolled.state.name}, trust level {member.level}")
    return choices


def _keep(root: Path, choices: Choices) -> None:
    """Where the next start finds what was chosen."""
    from sealring.cli.machines import OtherMachine

    OtherMachine(root, choices.settings).write_configs()


def _begin_anew(file: Path | None) -> None:
    """Becomes `sealring join` without the token, which other users of this machine could see for as long as
    this process lives."""
    sys.stdout.flush()
    sys.stderr.flush()
    settings = [] if file is None else ["--config", str(file)]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "sealring.cli", *settings, "join"])  # noqa: S606 - itself


def _run(root: Path, file: Path | None, wishes: Wishes) -> None:
    from sealring.cli.choices import choose_other
    from sealring.cli.foreground import run_cluster

    choices = choose_other(root, file, wishes, ())

    def make(told: Callable[[str], None]) -> OtherMachine:
        from sealring.cli.machines import OtherMachine

        return OtherMachine(root, choices.settings, say=told)

    async def work(machine: OtherMachine, shown: Progress) -> None:
        await machine.start()
        shown.close()
        say(f"the node runs until Ctrl-C; its log: {machine.logs['node']}")

    run_cluster(make, work, what="starting the node", meanwhile=_watch)


async def _watch(machine: OtherMachine) -> None:
    """Says what this node serves, for as long as it runs."""
    place = ""
    while True:
        now = await asyncio.to_thread(machine.place)
        if now != place:
            say(now or "this node serves nothing now")
        place = now
        await asyncio.sleep(_LOOK_SECONDS)
