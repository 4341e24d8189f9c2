"""The processes of one machine of a cluster: the first one's for `sealring up`, any other's for `join`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sealring.cli.calls.operator import connect
from sealring.cli.here.settings_files import PORTS, settings_file_of
from sealring.cli.local.cluster import Cluster
from sealring.cli.setup.finding import JOIN_PORT
from sealring.cli.terminal.host import START_SECONDS, Host
from sealring.coordinator.settings import MOST_ADDRESSES, CoordinatorSettings
from sealring.coordinator.standby.terms import deposed_by
from sealring.doctor.system import listens_itself
from sealring.edge.access.keyfile import LAN_FOLDER, KeyFile
from sealring.edge.access.keys import Scope
from sealring.gateway.lan.certificate import ROOT_FILE, fingerprint
from sealring.mesh.errors import DeadlineExceeded, SealringError
from sealring.mesh.member.state import ROSTER, load_machine_state
from sealring.mesh.roster.model import Ring
from sealring.mesh.roster.reader import check_roster
from sealring.mesh.system.addresses import format_address, parse_address
from sealring.mesh.system.files import read_bounded, unwritable, write_atomic
from sealring.mesh.system.paths import CLIENT_FOLDER, is_enrolled
from sealring.node.daemon.watch import DOING, read_doing

NOTHING = "this node serves nothing now"

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.1
_AGAIN_SECONDS = 30.0
_LAN_SECONDS = 30.0
_OWN_NOTE = "sealring up"


class Machine(Cluster):
    """Components below `root`, each set to what `settings` has under its name, state folder included."""

    def __init__(
        self,
        root: Path,
        settings: Mapping[str, Mapping[str, Any]],
        *,
        say: Callable[[str], None] = lambda text: None,
        host: Host | None = None,
    ) -> None:
        super().__init__(root, say=say, host=host)
        self.names = list(settings)
        self._chosen = settings

    def settings_of(self, name: str) -> dict[str, Any]:
        return dict(self._chosen[name])


class FirstMachine(Machine):
    """Coordinator, gateway and a node, called node."""

    def write_configs(self) -> None:
        """Also writes the gateway's port, which `sealring chat` reads."""
        super().write_configs()
        ports = {"gateway": parse_address(self.grpc_address)[1]}
        write_atomic(self.state_dir / PORTS, json.dumps(ports).encode())

    @property
    def coordinator_addresses(self) -> tuple[str, ...]:
        """host:port of the coordinator's main addresses, as they are now."""
        return self._coordinator.addresses()

    @property
    def join_addresses(self) -> list[str]:
        """The addresses at which other machines join, without the port if that is the usual one."""
        port = parse_address(self._coordinator.join_listen)[1]
        addresses = (format_address(host, port) for host in self._coordinator.hosts()[:MOST_ADDRESSES])
        return [one.removesuffix(f":{JOIN_PORT}") for one in addresses]

    @property
    def _coordinator(self) -> CoordinatorSettings:
        return CoordinatorSettings(**self.settings_of("coordinator"))

    @property
    def cluster(self) -> str:
        """The cluster's name, and the beginning of its root hash."""
        from sealring.cli.calls.operator import read_bundle
        from sealring.mesh.member.joincode import short_hash

        bundle = read_bundle(self.operator_bundle)
        return f"{bundle.peer.cluster} ({short_hash(bundle.root_sha256)})"

    async def code(self, *, uses: int, seconds: int) -> Any:
        """A code with which nodes join, as Admin describes it; the one of an earlier start ends with it."""
        return await self.admin.call("CreateJoinCode", uses=uses, ttl_seconds=seconds)

    async def token(self, *, uses: int, seconds: int) -> Any:
        """A token with which nodes join, as Admin describes it; those of earlier starts end with it."""
        listed = await self.admin.call("ListJoinTokens")
        for one in listed.tokens:
            if one.note == _OWN_NOTE:
                await self.admin.call("RevokeJoinToken", token_id=one.token_id)
        wanted: dict[str, Any] = {
            "role": "ROLE_NODE",
            "uses": uses,
            "ttl_seconds": seconds,
            "note": _OWN_NOTE,
        }
        return await self.admin.call("CreateJoinToken", **wanted)

    async def _lan_of(self, gateway: str) -> list[str]:
        listed = await self.admin.call("ListNodes")
        return [at for one in listed.gateways if one.id == gateway for at in one.lan]

    async def lan(self) -> dict[str, Any]:
        """Addresses and certificate of the LAN door, with a new key if none is good.

        Raises DeadlineExceeded (LAN_CLOSED).
        """
        folder = self._state_dir("gateway") / LAN_FOLDER
        own = load_machine_state(folder.parent).peer.id  # another gateway might name an address of its own
        keys, key = KeyFile(folder), ""
        if not any(one.usable(self._host.now()) for one in keys.read().values()):
            key, _ = keys.create([Scope.INFERENCE], label="house")
        deadline = asyncio.get_running_loop().time() + _LAN_SECONDS
        while not (found := await self._lan_of(own)):
            if asyncio.get_running_loop().time() > deadline:
                hint = f"see {self.logs['gateway']}"
                raise DeadlineExceeded("the LAN door does not open", hint=hint, reason="LAN_CLOSED")
            await asyncio.sleep(_POLL_SECONDS)
        root = folder / ROOT_FILE
        urls = [f"https://{one}/v1" for one in found]
        return {"urls": urls, "key": key, "certificate": str(root), "sha256": fingerprint(root)}


class OtherMachine(Machine):
    """An enrolled node, whose coordinator is elsewhere, and a proxy beside it at the port `door`, if any."""

    door = 0
    behind_door = "proxy"

    @property
    def door_url(self) -> str:
        """The URL of the proxy, without a path."""
        return f"http://{_HOST}:{self.door}"

    def write_configs(self) -> None:
        """Also writes the proxy's port, which is its own at the next start."""
        super().write_configs()
        if self.door:
            write_atomic(self.state_dir / PORTS, json.dumps({"proxy": self.door}).encode())

    async def wait_for_door(self) -> None:
        """Returns once the program `behind_door` listens. Another at its port is not it, and would get
        prompts."""
        while True:
            if await asyncio.to_thread(
                listens_itself, self.children.pids.get(self.behind_door, 0), self.door
            ):
                return
            await asyncio.sleep(5 * _POLL_SECONDS)

    async def keep_door(self) -> None:
        """Runs the proxy, and starts it again when it ends, which keeps the node from nothing. For ever."""
        folder = self._state_dir("node") / CLIENT_FOLDER
        pause = _POLL_SECONDS
        while True:
            listen = format_address(_HOST, self.door)
            await self.children.start("proxy", ["proxy", "--listen", listen, "--member", str(folder)])
            await self.children.expect_end("proxy").wait()
            pause = min(2 * pause, _AGAIN_SECONDS)
            await asyncio.sleep(pause)

    async def start(self) -> None:
        """Returns when the node listens; it may not have found its coordinator yet.

        Raises Unavailable (COMPONENT_ENDED), DeadlineExceeded (NODE_NOT_STARTED).
        """
        self.write_configs()
        (self._state_dir("node") / DOING).unlink(missing_ok=True)  # of the last time
        await self.start_one("node")
        await self.begun(self.wait_until_it_listens())

    def look(self) -> tuple[str, str, str]:
        """Words on whether the coordinator answers (empty at first), on what the node serves, and on how far
        it is with what it prepares. Blocks."""
        folder = self._state_dir("node")
        doing = read_doing(folder)
        try:
            state = load_machine_state(folder)
            roster = check_roster(read_bounded(folder / ROSTER), state.root, now=self._host.now())
        except (OSError, SealringError):
            return "", NOTHING, ""
        if doing is None:
            return "", NOTHING, ""
        answers = "answers" if doing.coordinator else "does not answer; this node goes on, and looks for it"
        places = [
            describe_place(ring, state.peer.id, doing.phases.get(ring.id, ""))
            for ring in roster.rings_of(state.peer.id)
        ]
        coordinator = (*roster.coordinators, state.coordinator)[0]
        return f"the coordinator at {coordinator} {answers}", "; ".join(places) or NOTHING, doing.work

    async def wait_until_it_listens(self) -> None:
        """Raises DeadlineExceeded (NODE_NOT_STARTED)."""
        address = parse_address(self.settings_of("node")["listen"])
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_SECONDS
        while not await asyncio.to_thread(self._host.listens, *address):
            if loop.time() > deadline:
                raise DeadlineExceeded(
                    f"the node did not start within {START_SECONDS:g} s",
                    hint=f"see {self.state_dir / 'logs' / 'node.log'}",
                    reason="NODE_NOT_STARTED",
                )
            await asyncio.sleep(_POLL_SECONDS)


class StandbyMachine(OtherMachine):
    """A node, a coordinator that follows the first machine's until it is promoted, and a gateway, which takes
    the place of the proxy."""

    behind_door = "gateway"

    def write_configs(self) -> None:
        super().write_configs()
        ports = {"proxy": self.door, "gateway": parse_address(self.grpc_address)[1]}
        write_atomic(self.state_dir / PORTS, json.dumps(ports).encode())

    async def start(self) -> None:
        """Raises as `OtherMachine.start`."""
        await super().start()
        await self.start_one("coordinator")

    async def keep_door(self) -> None:
        """Enrols the gateway, with the operator bundle that came with the backup, and runs it. For ever."""
        while not is_enrolled(self._state_dir("gateway")):
            try:
                async with connect(self.operator_bundle, seconds=_AGAIN_SECONDS) as admin:
                    self.admin = admin
                    await self.enrol("gateway")
            except SealringError:  # the coordinator is away, or busy
                await asyncio.sleep(10 * _POLL_SECONDS)
        await self.start_one("gateway")
        await asyncio.Event().wait()


def give_way(
    root: Path, settings: Mapping[str, Mapping[str, Any]], error: SealringError, say: Callable[[str], None]
) -> None:
    """Moves the state folders of coordinator and gateway, as `settings` name them, each into a folder
    `deposed-N` beside it, which is on its disk, if a standby has taken over from the coordinator, which ended
    by `error`. What an earlier call did not move joins what it did.

    Raises `error` otherwise, and ConfigError (STATE_*).
    """
    if error.metadata.get("component") != "coordinator" and error.reason != "UNREACHABLE":
        raise error  # a call may find it gone before its end is seen
    coordinator, gateway = (Path(settings[name]["state_dir"]) for name in ("coordinator", "gateway"))
    roster = deposed_by(coordinator)
    if roster is None:
        raise error
    stored = Path(settings["node"]["state_dir"]) / ROSTER
    try:
        write_atomic(stored, roster)  # the node verifies it, and finds the standby by it
    except OSError as failed:
        raise unwritable(stored, failed) from None
    moved = {gateway: gateway.parent, root / "gateway.key": root, settings_file_of(root, "gateway"): root}
    moved[coordinator] = coordinator.parent  # last: until then the next start does this again
    aside = {parent: _aside(parent, (gateway, coordinator)) for parent in moved.values()}
    for one, parent in moved.items():
        try:
            if one.exists():
                aside[parent].mkdir(mode=0o700, exist_ok=True)
                one.rename(aside[parent] / one.name)
        except OSError as failed:
            raise unwritable(one, failed) from None
    kept = ", ".join(str(one) for one in aside.values() if one.exists())
    say("\nThe standby has taken over while this machine was off. This machine goes on as a member.")
    say(f"What changes the cluster is typed on the other one. Keys of the cluster are still in {kept}:")
    say("remove it. To make this machine the standby: Ctrl-C, then sealring join --standby FILE\n")


def _aside(parent: Path, folders: Sequence[Path]) -> Path:
    """The newest folder `deposed-N` in `parent`, or the next one if that has one of `folders` already."""
    numbers = [one.name.removeprefix("deposed-") for one in parent.glob("deposed-*")]
    last = max((int(one) for one in numbers if one.isdecimal()), default=1)
    full = any(one.exists() and (parent / f"deposed-{last}" / one.name).exists() for one in folders)
    return parent / f"deposed-{last + full}"


def describe_place(ring: Ring, own_id: str, phase: str) -> str:
    """Says how the member `own_id` serves a ring; `phase` is that of its last epoch, as `Doing` has it."""
    own = ring.member(own_id)
    first, end = own.layers
    place = f"layers {first} to {end - 1} of {ring.total_layers}, node {own.rank + 1} of {len(ring.members)}"
    if phase == "up":
        return f"serves {ring.deployment}: {place}"
    if phase == "ended":
        return f"{ring.deployment} is not served now: {place} (`sealring status` says why)"
    return f"{ring.deployment} is about to be served: {place}"
