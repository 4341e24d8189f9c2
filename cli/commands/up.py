"""`sealring up`: the first machine of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.terminal.command import command, config_file
from sealring.cli.terminal.host import Host, host_of
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import Progress, print_data, print_json, progress, say, until
from sealring.mesh.system.paths import default_state_root

if TYPE_CHECKING:
    from sealring.cli.local.machines import FirstMachine

app = typer.Typer()

CODE_USES = 16
CODE_SECONDS = 3600
_LOOK_SECONDS = 1.0
_TOO_SMALL = frozenset({"DOES_NOT_FIT", "NOT_ENOUGH_NODES"})
"""Reasons for which a plan may succeed once there are more nodes."""


def _folder(text: str) -> Path:
    """A folder that is there; `~/` means the home folder: zsh leaves it in `--models=~/models`."""
    folder = os.path.expanduser(text)  # which leaves that of an unknown user as it is
    if not os.path.isdir(folder):
        raise typer.BadParameter(f"there is no folder {text!r}")
    return Path(folder)


Address = Annotated[
    str | None,
    typer.Option(metavar="IP", help="where other machines reach this one [default: at all of its addresses]"),
]
Name = Annotated[str | None, typer.Option(help="what people call this node [default: the host's name]")]
Models = Annotated[
    list[Path] | None,
    typer.Option(
        "--models",
        metavar="DIR",
        parser=_folder,
        help="a folder with one model folder each inside; repeatable",
    ),
]
Downloads = Annotated[
    bool | None,
    typer.Option("--downloads/--no-downloads", help="fetch a model that is not here from the hub"),
]
SoftwareIdentity = Annotated[
    bool | None,
    typer.Option(
        "--software-identity-allowed/--no-software-identity-allowed",
        help="identity keys in a file, trust level software [default: where this machine has no better]",
    ),
]
Announce = Annotated[
    bool | None,
    typer.Option("--announce/--no-announce", help="let machines on this network find the cluster"),
]


@command(app, example="sealring up", rich_help_panel="Start")
def up(
    context: typer.Context,
    address: Address = None,
    name: Name = None,
    models: Models = None,
    downloads: Downloads = None,
    software_identity_allowed: SoftwareIdentity = None,
    announce: Announce = None,
    lan: Annotated[
        bool, typer.Option("--lan", help="open a door for phones and laptops: HTTPS, with a key")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="serve this as well: a folder, a hub id, or demo"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make this the first machine of a cluster, and run it until Ctrl-C.

    A coordinator, a gateway and a node as processes of their own, with their logs in files. Prints what to
    type on the other machines. Started again, it is the same cluster. A machine that has joined another one's
    cluster, a standby too, or from which the standby has taken over, goes on as a member.
    """
    from sealring.cli.calls.away import coordinates
    from sealring.cli.local.foreground import run_cluster, signals_as_exceptions
    from sealring.cli.local.machines import FirstMachine, give_way
    from sealring.cli.setup.choices import Wishes, choose_first, folders_of
    from sealring.mesh.errors import SealringError
    from sealring.mesh.system.lock import lock_state
    from sealring.mesh.system.paths import is_enrolled

    wishes = Wishes(address, name, models or (), downloads, software_identity_allowed, announce, lan)
    root, host = default_state_root(), host_of(context)
    signals_as_exceptions()
    os.umask(0o077)
    file = config_file(context.find_root().params.get("config"))

    def lead() -> bool:
        """Runs it as the first machine. Whether it ended to go on as a member."""
        choices = choose_first(host, root, file, wishes)
        for line in choices.said:
            say(line)

        def make(say: Callable[[str], None]) -> FirstMachine:
            return host.reach(FirstMachine, root, choices.settings, say=say)

        async def work(machine: FirstMachine, shown: Progress) -> None:
            await machine.start()
            code = await machine.code(uses=CODE_USES, seconds=CODE_SECONDS)
            shown.close()
            if as_json:
                token = await machine.token(uses=CODE_USES, seconds=CODE_SECONDS)
                print_json(_report(machine, token, code) | ({"lan": await machine.lan()} if lan else {}))
            else:
                served = model or (await machine.admin.call("ListDeployments")).deployments
                _tell(machine, code, host.now(), served=bool(served), silent=_silent(host))
                if lan:
                    _tell_lan(await machine.lan())

        async def meanwhile(machine: FirstMachine) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(_watch(machine))
                if model is not None:
                    group.create_task(serve_model(machine, model))

        try:
            run_cluster(host, make, work, what="starting the coordinator", meanwhile=meanwhile)
        except SealringError as error:
            give_way(root, choices.settings, error, say)
            return True
        return False

    with lock_state(root):
        at = folders_of(root, file)
        if is_enrolled(at["node"]) and not coordinates(at["coordinator"]):
            say("this machine has joined a cluster: it goes on as a member (to leave: sealring node leave)")
        elif not lead():
            return
    host.become([*([] if file is None else ["--config", str(file)]), "join", "--begun"])


def _report(machine: FirstMachine, token: Any, code: Any) -> dict[str, Any]:
    return {
        "join": f"sealring join {token.token}",
        "token_id": token.token_id,
        "expires": token.expires,
        "code": code.code,
        "cluster": machine.cluster,
        "coordinator": machine.coordinator_addresses[0],
        "grpc": machine.grpc_address,
        "http": machine.http_url,
        "operator": str(machine.operator_bundle),
        "logs": str(machine.state_dir / "logs"),
        "processes": machine.processes,
    }


def _silent(host: Host) -> str:
    """Why this machine cannot announce its cluster; empty where it can."""
    from sealring.mesh.errors import Unavailable
    from sealring.mesh.member.discovery import reached

    try:
        host.reach(reached, [one.host for one in host.own_addresses()])
    except Unavailable as error:
        return str(error)
    return ""


def _tell(machine: FirstMachine, code: Any, now: float, *, served: bool, silent: str) -> None:
    from sealring.mesh.member.joincode import show_code

    say(f"coordinator at {', '.join(machine.coordinator_addresses)}; gateway at {machine.http_url}")
    say(f"logs: {machine.state_dir / 'logs'}")
    say(f"\nOn each other machine ({CODE_USES} at most; the code ends {until(code.expires, now)}) type:\n")
    joins = [f"sealring join {one}" for one in machine.join_addresses]
    if silent:
        print_data(f"  {' or '.join(joins)}")
        say(f"\nIt asks for the code of this cluster, {machine.cluster}:\n")
    else:
        print_data("  sealring join")
        say(f"\nIt finds this cluster, {machine.cluster}, and asks for this code:\n")
    print_data(f"  {show_code(code.code)}")
    say(f"\nIt would find nothing: {silent}" if silent else f"\nIf it finds nothing: {' or '.join(joins)}")
    if not served:
        say("Then here, in another terminal: sealring deploy MODEL, and sealring chat")
        say("(MODEL is a folder, a name on the Hugging Face hub, or demo, which is a small one to try it)")
    say("Another code: sealring token code. Ctrl-C stops what runs on this machine.\n")


def _tell_lan(door: dict[str, Any]) -> None:
    say("Phones and laptops of the house ask, as any OpenAI client, at:\n")
    print_data("\n".join(f"  {url}" for url in door["urls"]))
    if door["key"]:
        say("\nwith a key (sealring key create --lan makes more; this one is shown this once):\n")
        print_data(f"  {door['key']}")
    else:
        say("\nwith a key that they have (sealring key list --lan; sealring key create --lan makes more)")
    say(f"\nThey have to trust {door['certificate']} (docs/lan.md says how), SHA-256")
    say(f"{door['sha256']}\nTo close this door: sealring key revoke --lan --all\n")


async def serve_model(machine: FirstMachine, model: str) -> None:
    """Has the cluster serve a model, which nodes fetch if none has it, and says how to ask it.

    One that does not fit is tried again whenever another machine comes. Any other error is said, and the
    cluster goes on.
    """
    from sealring.cli.calls.waiting import APIS_OWN, own_sampling, wait_until_serving
    from sealring.cli.commands.deployment import FETCH_SECONDS, create_deployment, make_spec
    from sealring.mesh.errors import SealringError, Unavailable

    admin, spec = machine.admin, make_spec(model)
    while True:
        try:
            online = await _online(admin)
            with progress(f"planning {spec.name}") as shown:
                deployed = (await admin.call("ListDeployments")).deployments
                if spec.name not in {one.plan.spec.name for one in deployed}:
                    await create_deployment(admin, spec, shown.update)
                serving = await wait_until_serving(admin, spec.name, seconds=FETCH_SECONDS, say=shown.update)
        except Unavailable:  # the coordinator is busy, or no node is there yet
            await asyncio.sleep(_LOOK_SECONDS)
        except SealringError as error:
            if error.reason not in _TOO_SMALL:
                say(f"{model} is not served: {error} [{error.reason}]")
                return
            say(f"{model} is not served yet: {error}; it is tried again when another machine comes")
            await _other_nodes(admin, online)
        else:
            break
    say(f'\n{spec.name} is serving. Ask it in another terminal: sealring chat "..."')
    say(f"or with any OpenAI client at {machine.http_url}/v1; sealring connect sets programs up")
    say(f"{own_sampling(serving.plan.profile.card) or APIS_OWN}\n")


async def _other_nodes(admin: Any, online: set[str]) -> None:
    """Returns once others are online than these."""
    from sealring.mesh.errors import SealringError

    now = online
    while now == online:
        await asyncio.sleep(_LOOK_SECONDS)
        with contextlib.suppress(SealringError):  # the coordinator is busy
            now = await _online(admin)


async def _online(admin: Any) -> set[str]:
    from sealring.v1 import admin_pb2

    answer = await admin.call("ListNodes")
    return {one.id for one in answer.nodes if one.state == admin_pb2.NODE_STATE_ONLINE}


async def _watch(machine: FirstMachine) -> None:
    """Prints the events of the cluster while it runs."""
    from sealring.cli.calls.happenings import code_lines, deployment_lines, deployment_states, node_lines
    from sealring.mesh.errors import SealringError

    nodes: dict[str, Any] | None = None
    codes: tuple[str, ...] | None = None
    deployments: dict[str, str] = {}
    while True:
        try:
            listed = await machine.admin.call("ListNodes")
            answer = await machine.admin.call("ListDeployments")
            code = code_lines(await machine.admin.call("ListJoinTokens"))
        except SealringError:
            pass  # the coordinator is busy; its end is reported by wait_for_end
        else:
            now, states = {one.id: one for one in listed.nodes}, deployment_states(answer.deployments)
            for line in (
                *node_lines(now if nodes is None else nodes, now),
                *deployment_lines(deployments, states),
                *(line for line in code if codes is not None and line not in codes),
            ):
                say(line)
            nodes, deployments, codes = now, states, code
        await asyncio.sleep(_LOOK_SECONDS)
