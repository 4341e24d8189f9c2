"""`sealring join`: any further machine of a cluster."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.commands.service import DryRun, Root, User
from sealring.cli.commands.up import Address, Downloads, Models, Name, SoftwareIdentity
from sealring.cli.service.places import needs_root
from sealring.cli.terminal.command import command, config_file
from sealring.cli.terminal.host import Host, host_of
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import Progress, print_json, say
from sealring.mesh.errors import InvalidInput, SealringError
from sealring.mesh.system.paths import LAUNCH_DAEMONS, default_state_root
from sealring.mesh.trust.levels import described

if TYPE_CHECKING:
    from sealring.cli.local.machines import OtherMachine
    from sealring.cli.setup.choices import Wishes

app = typer.Typer()

_ASKS = "FILE (empty: not now; sealring join --standby FILE does it later):"
_LOOK_SECONDS = 1.0
_STARTING = "starting the node"


@command(app, example="sealring join", rich_help_panel="Start")
def join(
    context: typer.Context,
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="TOKEN",
            help="of `sealring token create` (- reads it), or the first machine's address "
            "[default: it looks around, and asks for a code]",
            show_default=False,
        ),
    ] = None,
    address: Address = None,
    name: Name = None,
    models: Models = None,
    downloads: Downloads = None,
    software_identity_allowed: SoftwareIdentity = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="of this machine's own address for programs [default: 8080 if free]"
        ),
    ] = None,
    standby: Annotated[
        Path | None,
        typer.Option(
            "--standby",
            metavar="FILE",
            help="make this the standby, by the FILE of `sealring coordinator backup` on the first machine",
        ),
    ] = None,
    no_standby: Annotated[bool, typer.Option("--no-standby", help="do not ask for one")] = False,
    service: Annotated[
        bool,
        typer.Option("--service", help="have launchd run node and proxy, now and at every boot; needs sudo"),
    ] = False,
    user: User = "_sealring",
    dry_run: DryRun = False,
    as_json: AsJson = False,
    prefix: Root = Path("/"),
    begun: Annotated[bool, typer.Option("--begun", hidden=True)] = False,
    second: Annotated[bool, typer.Option("--second", hidden=True)] = False,
) -> None:
    """Join a cluster with this machine, and run its node until Ctrl-C or, with --service, from now on.

    Programs on this machine ask the cluster at an address of its own, which seals what they ask.

    Without a token it looks for clusters on this network, and asks for the code that `sealring up` shows on
    the first machine. A machine that has joined runs its node again with `sealring join` alone.
    """
    from sealring.cli.local.foreground import signals_as_exceptions
    from sealring.cli.setup.choices import Wishes, folders_of, settings_given
    from sealring.mesh.system.lock import lock_state
    from sealring.mesh.system.paths import is_enrolled

    wishes = Wishes(address, name, models or (), downloads, software_identity_allowed)
    file = config_file(context.find_root().params.get("config"))
    said, host = settings_given("node", file), host_of(context)
    signals_as_exceptions()
    if service:
        if standby is not None:
            raise InvalidInput(
                "a machine whose node is a service does not become the standby by `join`",
                hint="join it without --standby, or without --service, which runs until Ctrl-C; for a "
                "standby that launchd runs: docs/operators.md, A standby",
                reason="BAD_OPTION",
                param="standby",
            )
        _serve(host, token, said, wishes, user, prefix, port, dry_run=dry_run, as_json=as_json)
        return
    root = default_state_root()
    at = folders_of(root, file)
    os.umask(0o077)
    with lock_state(root):
        if token is None and is_enrolled(at["node"]):
            if standby is not None:
                _stand_by(at, standby)
            if not _run(host, root, at, said, wishes, port, tell=not begun, second=second):
                return
            second = False
        else:
            from sealring.cli.setup.enrol import enrol
            from sealring.cli.setup.finding import find_token

            joined = enrol(host, root, said, wishes, find_token(host, token))
            _tell(joined, as_json=as_json)
            _keep(root, joined["settings"])
            second = standby is None and joined["members"] == 2 and not no_standby
            if standby is not None:
                _stand_by(at, standby)
    # without the token, which other users of this machine could see for as long as this process lives
    host.become(
        [
            *([] if file is None else ["--config", str(file)]),
            "join",
            "--begun",
            *(["--second"] if second else []),
            *([] if port is None else ["--port", str(port)]),
        ]
    )


def _tell(joined: dict[str, Any], *, as_json: bool) -> None:
    for line in joined["said"]:
        say(line)
    if as_json:
        print_json({name: joined[name] for name in ("member_id", "cluster", "name", "level")})
    say(f"joined cluster {joined['cluster']} as {joined['name']}, trust level {described(joined['level'])}")


async def _offer(host: Host, at: Mapping[str, Path], answered: asyncio.Event) -> None:
    """Returns once the second machine of a cluster has become its standby, if the user names a backup.
    `answered` is not set while the question stands."""
    say("\nThis second machine can be the standby, which takes over when the first one is lost. It gets all")
    say("keys of the cluster. On the first machine: sealring coordinator backup FILE. Bring FILE here, as")
    say("by scp or AirDrop, and delete the copies afterwards.")
    if host.can_ask:
        answered.clear()
        say(_ASKS)
        while answer := (await host.line()).strip():
            try:
                await asyncio.to_thread(_stand_by, at, Path(answer))
            except SealringError as error:
                say(f"{error}\n{_ASKS}")
            else:
                return
    else:
        say("Then: sealring join --standby FILE\n")
    answered.set()
    await asyncio.Event().wait()


def _stand_by(at: Mapping[str, Path], file: Path) -> None:
    """Makes the state of this machine's standby. Raises as `restore`, and InvalidInput (OTHER_CLUSTER)."""
    from sealring.cli.calls.operator import read_bundle
    from sealring.coordinator.backup import restore
    from sealring.coordinator.settings import CoordinatorSettings
    from sealring.mesh.member.state import load_machine_state

    folder = at["coordinator"]
    restore(CoordinatorSettings(state_dir=folder), file.expanduser(), standby=True)
    if read_bundle(folder / "operator").root_sha256 != load_machine_state(at["node"]).root_sha256:
        shutil.rmtree(folder)
        raise InvalidInput(
            f"{file} is a backup of another cluster", hint="make one there", reason="OTHER_CLUSTER"
        )
    say(
        f"{folder} stands by: it holds all keys of the cluster, so keep this machine as safe as the first one"
    )


def _keep(root: Path, settings: dict[str, Any]) -> None:
    """Writes the chosen settings for the next start."""
    from sealring.cli.local.machines import OtherMachine

    OtherMachine(root, {"node": settings}).write_configs()


def _serve(
    host: Host,
    token: str | None,
    said: dict[str, Any],
    wishes: Wishes,
    user: str,
    prefix: Path,
    port: int | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Joins as the account that the service runs as, so that the key is that account's, and installs it and
    the proxy."""
    from sealring.cli.commands.service import program
    from sealring.cli.service.door import DoorInstallation
    from sealring.cli.service.install import Installation, account_id
    from sealring.cli.service.launchctl import Launchctl
    from sealring.cli.service.launchd import Service
    from sealring.cli.service.places import make_places, require_of_root, under
    from sealring.cli.setup.enrol import enrol_as
    from sealring.cli.setup.finding import find_token
    from sealring.mesh.system.paths import is_enrolled

    control = host.reach(Launchctl, host)
    made = Service("node", program=program(), user=user)
    owner = account_id(user, prefix)
    state = under(prefix, made.folder)
    settings = None
    was_loaded = False
    try:
        if token is not None or not is_enrolled(state):
            given = find_token(host, token)
            if dry_run:
                say(f"would join as the account {user}, with the state in {state}")
                return
            if "enclave_helper" in said:
                require_of_root(Path(said["enclave_helper"]))
            was_loaded = control.status(made.label).loaded
            control.bootout(made.label)
            make_places(made, prefix, owner)
            joined = enrol_as(user if owner is not None else None, state.parent, said, wishes, given)
            _tell(joined, as_json=as_json)
            settings = joined["settings"]
        Installation(host, made, prefix, chosen=settings).run(say, start=True, dry_run=dry_run)
        door = replace(made, component="proxy")
        DoorInstallation(host, door, prefix, port=port).run(say, start=True, dry_run=dry_run)
    except BaseException as error:
        if was_loaded:
            control.bootstrap(made.label, under(prefix, LAUNCH_DAEMONS / made.file_name))
        if isinstance(error, PermissionError):
            raise needs_root(Path(str(error.filename))) from None
        raise


def _run(
    host: Host,
    root: Path,
    at: Mapping[str, Path],
    said: dict[str, Any],
    wishes: Wishes,
    wished: int | None,
    *,
    tell: bool,
    second: bool,
) -> bool:
    """Runs the node, and the proxy beside it. Whether it ended to start again, as the standby, or as a member
    once another machine has taken over from this one."""
    with closing(Progress(_STARTING, quiet=True)):  # imports take seconds on a machine that is busy
        from sealring.cli.here.settings_files import read_settings, settings_file_of
        from sealring.cli.local.foreground import run_cluster
        from sealring.cli.local.machines import OtherMachine, StandbyMachine, give_way
        from sealring.cli.setup.choices import choose_other, choose_proxy
        from sealring.mesh.member.state import load_machine_state
        from sealring.mesh.system.paths import is_enrolled
        from sealring.mesh.system.processes import first_of

        joined = load_machine_state(at["node"])
        stands_by = is_enrolled(at["coordinator"] / "operator")
        node = str(read_settings(settings_file_of(root, "node"), "node").get("listen", "127.0.0.1:0"))
        port, taken = choose_proxy(host, root, wished, node)
        choices = choose_other(
            host, root, said, wishes, [joined.coordinator], joined=True, proxy=port if stands_by else 0
        )
        for name, chosen in choices.settings.items():
            chosen["state_dir"] = str(at[name])
    for line in (*(choices.said if tell else ()), *filter(None, [taken])):
        say(line)

    def make(told: Callable[[str], None]) -> OtherMachine:
        kind = StandbyMachine if stands_by else OtherMachine
        machine = host.reach(kind, root, choices.settings, say=told)
        machine.door = port
        return machine

    async def work(machine: OtherMachine, shown: Progress) -> None:
        await machine.start()
        shown.close()
        say(f"the node runs until Ctrl-C; its log: {machine.logs['node']}")

    async def meanwhile(machine: OtherMachine) -> None:
        answered = asyncio.Event()
        answered.set()

        async def talk() -> None:
            await _tell_door(machine)
            if second and not stands_by:
                await _offer(host, at, answered)
            else:
                await asyncio.Event().wait()

        await first_of(_watch(machine, answered), machine.keep_door(), talk())

    try:
        run_cluster(host, make, work, what=_STARTING, meanwhile=meanwhile)
    except SealringError as error:
        give_way(root, choices.settings, error, say)
        return True
    return not stands_by and is_enrolled(at["coordinator"] / "operator")


async def _tell_door(machine: OtherMachine) -> None:
    """Says where programs ask, once somebody listens there."""
    await machine.wait_for_door()
    say(f"\nOn this machine, programs ask at {machine.door_url}/v1, and what they ask leaves it sealed.")
    say('In another terminal: sealring chat "...", or sealring connect NAME --write\n')


async def _watch(machine: OtherMachine, answered: asyncio.Event) -> None:
    """Says what this node serves and whether the coordinator answers, when that changes, and then repeats a
    question that stands; on a terminal where none does, also how far it is with what it prepares."""
    from sealring.cli.local.machines import NOTHING

    before, shown = ["", NOTHING], None
    try:
        while True:
            *now, work = await asyncio.to_thread(machine.look)
            if shown is not None and not (work and answered.is_set()):
                shown.close()
                shown = None
            new = [line for line in now if line and line not in before]
            for line in new if answered.is_set() else (*new, *([_ASKS] if new else [])):
                say(line)
            before = now
            if work and answered.is_set():
                shown = shown or Progress(work, quiet=True)
                shown.update(work)
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        if shown is not None:
            shown.close()
