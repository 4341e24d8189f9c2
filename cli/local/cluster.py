"""The components of a cluster as processes of this machine, enrolled with real join tokens.

`LocalCluster` is a whole one on loopback, for `sealring demo` and the integration tests; for `sealring up`
and `sealring join` see `cli/local/machines.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psutil  # type: ignore[import-untyped]

from sealring.cli.calls.gateway import inference
from sealring.cli.calls.operator import Admin, connect, read_bundle, wait_for_bundle
from sealring.cli.calls.waiting import wait_until_offered, wait_until_online, wait_until_serving
from sealring.cli.here.settings_files import PORTS, as_toml, settings_file_of
from sealring.cli.local.children import Children
from sealring.cli.terminal.command import settings_model
from sealring.cli.terminal.host import SLOW_SECONDS, SLOW_START, START_SECONDS, Host
from sealring.mesh.errors import ConfigError, InvalidInput
from sealring.mesh.system.addresses import format_address, free_port, parse_address
from sealring.mesh.system.files import write_atomic
from sealring.mesh.system.networks import ANY_HOST

if TYPE_CHECKING:
    from sealring.coordinator.settings import CoordinatorSettings

MAX_NODES = 64
_HOST = "127.0.0.1"
_ADMIN_SECONDS = 60.0
_OFFER_SECONDS = 60.0
_LOAD_SECONDS = 600.0
_PLAN_SECONDS = 180.0
_MIN_MEMORY = 64 << 20
_MEMORY_FRACTION = 0.75


class Cluster:
    """Components as processes of this machine, with their settings files below `state_dir`.

    Use it as `async with ... as cluster: await cluster.start()`. However the block or this process ends, no
    process is left. `say` gets a line for each step.
    """

    names: Sequence[str]
    """The components: `coordinator`, `gateway`, and any other name for a node."""

    def __init__(
        self,
        state_dir: Path,
        *,
        say: Callable[[str], None] = lambda text: None,
        host: Host | None = None,
    ) -> None:
        self.state_dir = state_dir.absolute()
        self.admin: Admin
        self._say = say
        self._host = host or Host()
        self.children: Children
        """The running components, from the block's beginning on."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs, temporary = self.state_dir / "logs", self.state_dir / "tmp"
        for folder in (logs, temporary):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.children = Children(logs, command=self._host.components, environment={"TMPDIR": str(temporary)})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stack.aclose()
        finally:
            stopping = asyncio.ensure_future(self.children.stop())
            while not stopping.done():
                try:
                    await asyncio.shield(stopping)
                except asyncio.CancelledError:
                    self.children.kill()

    @property
    def node_names(self) -> list[str]:
        """The components that are nodes."""
        return [name for name in self.names if name not in ("coordinator", "gateway")]

    @property
    def grpc_address(self) -> str:
        """host:port of the gateway's Inference service."""
        return str(self.settings_of("gateway")["grpc_listen"])

    @property
    def http_url(self) -> str:
        """The URL of the gateway's HTTP edge, without a path."""
        return f"http://{self.settings_of('gateway')['http_listen']}"

    @property
    def operator_bundle(self) -> Path:
        """The operator bundle, for admin calls from elsewhere."""
        return self._state_dir("coordinator") / "operator"

    @property
    def processes(self) -> dict[str, int]:
        """The process id of each component."""
        return self.children.pids

    @property
    def logs(self) -> dict[str, Path]:
        """The log file of each component."""
        return self.children.logs

    def settings_of(self, name: str) -> dict[str, Any]:
        """What one component is set to, `state_dir` included."""
        raise NotImplementedError

    def _state_dir(self, name: str) -> Path:
        return Path(self.settings_of(name)["state_dir"])

    def _environment(self, name: str) -> dict[str, str]:
        """More variables of a component's environment."""
        return {}

    async def start(self) -> None:
        """Starts everything and returns when all nodes are online.

        Raises Unavailable (COMPONENT_ENDED) with the last lines of its log when a component does not stay,
        DeadlineExceeded, and whatever enrolment raises.
        """
        self._say("starting the coordinator")
        self.write_configs()
        await self.start_coordinator()
        self._say(f"enrolling {self._count_nodes()} and a gateway")
        await self.children.or_failure(self.enrol_all())
        self._say("starting the nodes and the gateway")
        await asyncio.gather(*(self.start_one(name) for name in (*self.node_names, "gateway")))
        await self.begun(self.wait_for_nodes())

    async def begun(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Returns once what `waiting` waits for has begun; on a Mac it says why that may take minutes.

        Raises Unavailable (COMPONENT_ENDED), and what `waiting` raises.
        """
        slow: asyncio.TimerHandle | None = None
        if self._host.platform == "darwin":
            slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._say, SLOW_START)
        try:
            await self.children.or_failure(waiting)
        finally:
            if slow is not None:
                slow.cancel()

    async def start_one(self, name: str) -> None:
        """Starts an enrolled component, also one that has ended."""
        component = "node" if name in self.node_names else name
        command = [*self.config_of(name), component, "run"]
        await self.children.start(name, command, self._environment(name))

    async def wait_for_end(self) -> None:
        """Returns never; raises Unavailable (COMPONENT_ENDED) when a component ends by itself."""
        await self.children.failed()

    def _count_nodes(self) -> str:
        return "one node" if len(self.node_names) == 1 else f"{len(self.node_names)} nodes"

    async def start_coordinator(self) -> None:
        """Starts the coordinator, whose keys are made first if there are none, and connects `admin` to it."""
        from sealring.coordinator.init import init
        from sealring.coordinator.settings import CoordinatorSettings
        from sealring.mesh.system.paths import is_enrolled

        settings = CoordinatorSettings(**self.settings_of("coordinator"))
        if not is_enrolled(self.operator_bundle):
            await asyncio.to_thread(make_whole, settings, init)
        await self.start_one("coordinator")
        address = settings.main_address()
        waiting = wait_for_bundle(self.operator_bundle, address, seconds=START_SECONDS)
        await self.begun(waiting)
        host, port = parse_address(settings.listen)
        beside = format_address(_HOST, port) if host == ANY_HOST else None  # which never changes
        await self.administer(self.operator_bundle, beside)
        await self.begun(self.wait_for_coordinator())

    async def administer(self, bundle: Path, address: str | None = None) -> None:
        """Connects `admin` to the coordinator of an operator bundle, at `address` instead of the bundle's."""
        calls = self._host.reach(connect, bundle, address=address, seconds=_ADMIN_SECONDS)
        self.admin = await self._stack.enter_async_context(calls)

    async def wait_for_coordinator(self) -> None:
        """Returns when the coordinator answers."""
        await self.admin.call("ListJoinTokens", wait_for_ready=True)

    async def enrol_all(self) -> None:
        """Enrols the components that are in no roster, and gives the others the coordinator's address."""
        from sealring.mesh.pki.root import decode_chain, verify_root_chain
        from sealring.mesh.roster.reader import check_roster

        bundle, now = read_bundle(self.operator_bundle), time.time()
        answer = await self.admin.call("GetRoster")
        root = verify_root_chain(decode_chain(answer.root_metadata), bundle.root_sha256, now=now)
        roster = check_roster(answer.roster, root, now=now)
        good = {one.id for one in roster.members} | {one.id for one in roster.gateways}
        for name in self.names:
            if name != "coordinator" and is_member(self._state_dir(name), good):
                redirect(self._state_dir(name), bundle.coordinator)
        await asyncio.gather(
            *(
                self.enrol(name)
                for name in self.names
                if name != "coordinator" and not is_member(self._state_dir(name), good)
            )
        )

    async def enrol(self, name: str) -> None:
        """Enrols a node or the gateway with a token of its own."""
        component = "gateway" if name == "gateway" else "node"
        settings = settings_model(component)(**self.settings_of(name))
        await self._host.join(component, settings, await self.join_token(f"ROLE_{component.upper()}"))

    async def join_token(self, role: str) -> str:
        """A new join token for one component of a role."""
        return str((await self.admin.call("CreateJoinToken", role=role, note="this machine")).token)

    async def wait_for_nodes(self) -> None:
        """Returns when all nodes are online. Raises DeadlineExceeded (NODES_NOT_ONLINE)."""
        from sealring.mesh.member.state import load_machine_state

        wanted = {load_machine_state(self._state_dir(name)).peer.id: name for name in self.node_names}
        hint = f"see the logs in {self.state_dir / 'logs'}"
        await wait_until_online(self.admin, wanted, seconds=START_SECONDS, hint=hint, say=self._say)

    def write_configs(self) -> None:
        """Writes what each component is set to, which it reads when it starts."""
        folder = self.state_dir / "config"
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in self.names:
            section = "node" if name in self.node_names else name
            write_atomic(settings_file_of(self.state_dir, name), as_toml(section, self.settings_of(name)))

    def config_of(self, name: str) -> list[str]:
        """The words of the command that lead to a component's settings file."""
        return ["--config", str(settings_file_of(self.state_dir, name))]


def is_member(folder: Path, members: Collection[str]) -> bool:
    """Whether the component with its state in `folder` is one of `members` (ids)."""
    from sealring.mesh.member.state import load_machine_state
    from sealring.mesh.system.paths import is_enrolled

    return is_enrolled(folder) and load_machine_state(folder).peer.id in members


def redirect(folder: Path, coordinator: str) -> None:
    """Stores that the coordinator is at `coordinator` (host:port) now, for a component that does not run."""
    from sealring.mesh.member.state import load_machine_state, save_description

    state = load_machine_state(folder)
    if state.coordinator != coordinator:
        save_description(folder, state.peer, state.name, coordinator, state.root_sha256, join=state.join)


def make_whole(settings: CoordinatorSettings, init: Callable[[CoordinatorSettings], None]) -> None:
    """Makes a coordinator's state beside its place and moves it there: what a crash leaves of it half made is
    in nobody's way the next time. Raises as `init`."""
    beside = settings.state_dir.with_name(f".{settings.state_dir.name}.new")
    if settings.roster_key_files or (settings.state_dir.is_dir() and any(settings.state_dir.iterdir())):
        init(settings)  # which says what is in its way
        return
    shutil.rmtree(beside, ignore_errors=True)
    init(settings.model_copy(update={"state_dir": beside}))
    os.replace(beside, settings.state_dir)


class LocalCluster(Cluster):
    """Coordinator, nodes and a gateway on loopback, in a state folder that may hold an earlier cluster.

    Use it as `async with LocalCluster(...) as cluster: await cluster.start(); await cluster.deploy()`.
    """

    def __init__(
        self,
        state_dir: Path,
        model: Path | str,
        *,
        nodes: int = 3,
        name: str = "demo",
        settings: dict[str, dict[str, Any]] | None = None,
        gpus: int = 0,
        say: Callable[[str], None] = lambda text: None,
        host: Host | None = None,
    ) -> None:
        """`settings` are further settings of the sections coordinator, node and gateway.

        `gpus` NVIDIA GPUs are given out by turns, one to a node; with 0 every node sees all of them.

        Raises InvalidInput (BAD_NODE_COUNT).
        """
        super().__init__(state_dir, say=say, host=host)
        if not 1 <= nodes <= MAX_NODES:
            raise InvalidInput(
                f"{nodes} nodes are not possible", hint=f"choose 1 to {MAX_NODES}", reason="BAD_NODE_COUNT"
            )
        self.names = ["coordinator", "gateway", *(f"node-{number}" for number in range(nodes))]
        self.model = str(model)
        self.name = name
        self._extra = settings or {}
        self._gpus = gpus
        self.ports: dict[str, int] = {}
        """Ports by component, set by `choose_ports`; `join` and `gateway-http` are ports of their own."""

    async def deploy(self, say: Callable[[str], None] | None = None, **spec: Any) -> Any:
        """Deploys the model and waits until the gateway offers it; the deployment as Admin describes it.

        `spec` are further fields of DeploymentSpec; with `name` and `model` it is another model. `say` gets
        what is waited for, in the place of the cluster's own.
        """
        say = say or self._say
        wanted: dict[str, Any] = {"name": self.name, "model": self.model, "strategy": "pipeline"}
        name = spec.get("name", self.name)
        found = await self.children.or_failure(self._deployment(name))
        if found is None:
            say(f"planning {name} over {self._count_nodes()}")
            await self.children.or_failure(
                self.admin.call("CreateDeployment", spec=wanted | spec, seconds=_PLAN_SECONDS)
            )
        serving = await self.children.or_failure(
            wait_until_serving(self.admin, name, seconds=_LOAD_SECONDS, say=say)
        )
        say("waiting for the gateway")
        await self.children.or_failure(self.wait_for_gateway(name))
        return serving

    async def _deployment(self, name: str) -> Any:
        answer = await self.admin.call("ListDeployments")
        return next((one for one in answer.deployments if one.plan.spec.name == name), None)

    async def wait_for_gateway(self, name: str = "") -> None:
        """Returns once the gateway offers the deployment of this name, or the model where it is empty.

        Raises DeadlineExceeded (GATEWAY_NOT_READY).
        """
        hint = f"see {self.logs['gateway']}"
        async with inference(self.grpc_address) as client:
            await wait_until_offered(client, name or self.name, seconds=_OFFER_SECONDS, hint=hint)

    def _environment(self, name: str) -> dict[str, str]:
        if not self._gpus or name not in self.node_names:
            return {}
        return {"CUDA_VISIBLE_DEVICES": str(self.node_names.index(name) % self._gpus)}

    def write_configs(self) -> None:
        self.choose_ports()
        super().write_configs()

    def choose_ports(self) -> None:
        """Free ports, kept for the next time, because members remember where the coordinator is.

        Raises ConfigError (BAD_CLUSTER_FILE).
        """
        file = self.state_dir / PORTS
        names = ["coordinator", "join", "gateway", "gateway-http", *self.node_names]
        try:
            kept = json.loads(file.read_text()) if file.exists() else {}
            self.ports = {name: int(kept[name]) for name in names if name in kept}
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{file} was not written by a local cluster: {type(error).__name__}",
                hint="choose another state folder",
                reason="BAD_CLUSTER_FILE",
            ) from None
        for name in names:
            while name not in self.ports:
                port = free_port(_HOST)
                if port not in self.ports.values():
                    self.ports[name] = port
        write_atomic(file, json.dumps(self.ports).encode())

    def settings_of(self, name: str) -> dict[str, Any]:
        """The settings of one component, on free ports of loopback and below the state folder."""
        section = "node" if name in self.node_names else name
        own: dict[str, dict[str, Any]] = {
            "coordinator": {
                "listen": self.address("coordinator"),
                "join_listen": self.address("join"),
                "software_identity_allowed": True,
            },
            "gateway": {
                "name": "gateway",
                "grpc_listen": self.address("gateway"),
                "http_listen": self.address("gateway-http"),
            },
            "node": {
                "name": name,
                "listen": self.address(name) if section == "node" else "",
                "software_identity_allowed": True,
                "memory_limit": self._memory_share(),
            },
        }
        return {"state_dir": str(self.state_dir / name), **own[section], **self._extra.get(section, {})}

    def _memory_share(self) -> int:
        """Bytes per node: all of them live in one machine."""
        total = psutil.virtual_memory().total
        return max(_MIN_MEMORY, int(total * _MEMORY_FRACTION) // len(self.node_names))

    def address(self, name: str) -> str:
        """host:port of coordinator, join, gateway, gateway-http, or of a node by its name."""
        return f"{_HOST}:{self.ports[name]}"
