"""A whole cluster in one process and in virtual time: coordinator, gateways, nodes, and what befalls them."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from virtualloop import VirtualLoop

from sealring.coordinator.init import init
from sealring.coordinator.main import Coordinator
from sealring.coordinator.settings import CoordinatorSettings
from sealring.gateway.main import serve as serve_gateway
from sealring.gateway.settings import GatewaySettings
from sealring.mesh.clock import MachineClocks, machine_clocks
from sealring.mesh.crypto.identity import SoftwareSigner
from sealring.mesh.member.enrolment import NodeEvidence, enrol
from sealring.mesh.member.state import IDENTITY_KEY, load_machine_state
from sealring.mesh.pki.certificates import Role, role_server_name
from sealring.mesh.rpc.memory import Network, Process
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import channel_options, secure_channel
from sealring.node.main import serve as serve_node
from sealring.node.settings import NodeSettings
from sealring.v1 import admin_pb2, admin_pb2_grpc, membership_pb2

T = TypeVar("T")

BEGINNING = 1_790_000_000.0
"""What the machines' clocks show first, in seconds since 1970."""


class Machine:
    """A computer with its clock. Its programs run in processes of its own."""

    def __init__(self, name: str, host: str, loop: VirtualLoop) -> None:
        self.name, self.host = name, host
        self._loop = loop
        self.wrong = 0.0
        """Seconds by which somebody has set its clock wrong."""
        self.processes: dict[str, Process] = {}

    def clocks(self) -> MachineClocks:
        """The clocks of a process that starts now."""
        loop = self._loop
        return MachineClocks.of(
            system=lambda: BEGINNING + loop.everywhere + self.wrong,
            monotonic=loop.time,
            boot=lambda: loop.everywhere,
        )


@dataclass
class Program:
    """A program that runs on a machine, or has run."""

    process: Process
    task: asyncio.Task[None]
    stop: asyncio.Event


class EdgeInMemory:
    """In the place of the HTTP server: its application is called, and no socket is opened."""

    def __init__(self, app: Any, *, tls: object = None) -> None:
        del tls
        self.app = app

    def listen(self, address: str) -> int:
        return int(address.rpartition(":")[2])

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Cluster:
    """Machines by name; their programs start, stop, are killed, stand still and go on."""

    def __init__(
        self, folder: Path, seed: int, loop: VirtualLoop, children: Callable[[Machine], Any]
    ) -> None:
        """`children` gives what spawns the engines and carriers of a node's machine."""
        self.folder, self.loop = folder, loop
        self.random = random.Random(seed)
        self.network = Network(self.random)
        self._children = children
        self.machines: dict[str, Machine] = {}
        self.programs: dict[str, Program] = {}
        self.edges: dict[str, EdgeInMemory] = {}
        self.coordinator: Coordinator | None = None
        self._folder_of: dict[str, Path] = {}
        self._settings = CoordinatorSettings(
            state_dir=folder / "coordinator",
            listen="10.0.0.1:7700",
            join_listen="10.0.0.1:7701",
            hidden=True,
            software_identity_allowed=True,
        )
        self.machine("coordinator", "10.0.0.1")

    # Machines and programs

    def machine(self, name: str, host: str) -> Machine:
        """A new machine."""
        made = self.machines[name] = Machine(name, host, self.loop)
        return made

    def process(self, name: str) -> Process:
        """A new process on the machine of that name."""
        machine = self.machines[name]
        made = Process(name, machine.host, self.network)
        made.context.run(machine_clocks.set, made.context.run(machine.clocks))
        machine.processes[name] = made
        return made

    async def run(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` in a process of its own on that machine, as a command there."""
        process = self.process(name)
        try:
            return await self.loop.create_task(work, context=process.context)
        finally:
            self.network.end(process)

    def start(self, name: str) -> Program:
        """Starts the program of a machine: coordinator, node or gateway."""
        process, stop = self.process(name), asyncio.Event()
        work: Coroutine[Any, Any, None]
        if name == "coordinator":
            work = self._coordinate(stop)
        elif name.startswith("gateway"):
            work = self._gateway(name, stop)
        else:
            work = serve_node(self._node_settings(name), stop, spawn=self._children(self.machines[name]))
        task = self.loop.create_task(work, context=process.context)
        made = self.programs[name] = Program(process, task, stop)
        return made

    async def stop(self, name: str) -> None:
        """Stops a program in order. Raises what it ends with."""
        program = self.programs.pop(name)
        program.stop.set()
        await program.task
        self.network.end(program.process)

    def kill(self, name: str) -> None:
        """Ends a program as SIGKILL does."""
        program = self.programs.pop(name)
        self.network.end(program.process)
        self.loop.bury(program.process)

    def stand(self, name: str) -> None:
        """Stops a program as SIGSTOP does."""
        self.network.stand(self.programs[name].process)

    def go_on(self, name: str, *, asleep: float = 0.0) -> None:
        """Lets a program go on, after a sleep of its machine of `asleep` seconds."""
        program = self.programs[name]
        self.loop.go_on(program.process, asleep=asleep)
        self.network.go_on(program.process)

    # What runs

    async def _coordinate(self, stop: asyncio.Event) -> None:
        self.coordinator = coordinator = Coordinator(self._settings)
        try:
            await coordinator.start()
            stopped = asyncio.ensure_future(stop.wait())
            failed = asyncio.ensure_future(coordinator.failed())
            await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        finally:
            await coordinator.stop()

    async def _gateway(self, name: str, stop: asyncio.Event) -> None:
        def edge(app: Any, *, tls: object = None) -> Any:
            made = self.edges[name] = EdgeInMemory(app, tls=tls)
            return made

        await serve_gateway(GatewaySettings(state_dir=self.folder / name, name=name), stop, http=edge)

    def _node_settings(self, name: str) -> NodeSettings:
        host = self.machines[name].host
        return NodeSettings(
            state_dir=self.folder / name,
            name=name,
            listen=f"{host}:7710",
            software_identity_allowed=True,
            prefix_disk=0,
        )

    # What an operator does

    async def begin(self) -> None:
        """Makes the cluster, and starts its coordinator."""
        await self.run("coordinator", _at_once(lambda: init(self._settings)))
        self.start("coordinator")
        await self.until(lambda: self.coordinator is not None and self.coordinator.port > 0)

    async def join(self, name: str, host: str) -> None:
        """Enrols a machine as a gateway or as a node, by its name."""
        self.machine(name, host)
        role = Role.GATEWAY if name.startswith("gateway") else Role.MEMBER
        number = membership_pb2.ROLE_GATEWAY if role is Role.GATEWAY else membership_pb2.ROLE_NODE
        token = (await self.admin("CreateJoinToken", role=number)).token
        state = self.folder / name
        evidence = NodeEvidence(
            sealing_key=secrets.token_bytes(32), manifest_hash=bytes(32), addresses=(f"{host}:7710",)
        )
        joining = enrol(
            token=token,
            role=role,
            signer=SoftwareSigner.load_or_create(state / IDENTITY_KEY),
            state_dir=state,
            name=name,
            evidence=evidence if role is Role.MEMBER else None,
        )
        await self.run(name, joining)

    async def admin(self, method: str, *, seconds: float = 200.0, **fields: Any) -> Any:
        """An admin call. Raises the error of the tree."""
        return await self.run("coordinator", self._admin(method, seconds, fields))

    async def _admin(self, method: str, seconds: float, fields: dict[str, Any]) -> Any:
        state = load_machine_state(self._settings.state_dir / "operator")
        options = channel_options(role_server_name(Role.COORDINATOR))
        request = getattr(admin_pb2, _REQUESTS.get(method, f"{method}Request"))(**fields)
        async with secure_channel("10.0.0.1:7700", state.tls, options) as channel:
            try:
                return await getattr(admin_pb2_grpc.AdminStub(channel), method)(request, timeout=seconds)
            except Exception as error:
                if hasattr(error, "trailing_metadata"):
                    raise from_rpc_error(error) from None
                raise

    async def until(self, holds: Callable[[], object], seconds: float = 600.0) -> None:
        """Waits until something holds. Raises TimeoutError after `seconds` of virtual time."""
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.05)


_REQUESTS = {"GetRoster": "GetAdminRosterRequest"}


async def _at_once(do: Callable[[], T]) -> T:
    return do()
