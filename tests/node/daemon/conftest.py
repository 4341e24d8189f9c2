"""A scripted coordinator and gateway, and real daemons in this process with real engines and carriers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from actedcoordinator import ActedCoordinator
from patience import until
from prooftest import identity, introduce

from sealring.mesh.errors import SealringError
from sealring.mesh.member import Purpose
from sealring.mesh.pki import Role
from sealring.mesh.rpc import PROTOCOL_VERSION, PeerChannel, Server, TlsStore, server_credentials
from sealring.mesh.system.addresses import free_port
from sealring.node.main import serve
from sealring.node.settings import NodeSettings
from sealring.v1 import control_pb2, control_pb2_grpc, membership_pb2
from sealring.v1 import inference_pb2 as inference

MODEL = Path(__file__).parents[3] / "examples" / "demo_model" / "model"
RING = "demo-0"


class Coordinator(ActedCoordinator):
    """At an address that stays, with a word for each of the members of a bed."""

    def __init__(self, cluster: Any) -> None:
        super().__init__(cluster.authority)
        self.store = TlsStore(cluster.coordinator)
        self.server: Server | None = None
        self.address = f"127.0.0.1:{free_port()}"

    async def start(self) -> None:
        self.server = Server(self.services())
        self.server.listen(self.address, server_credentials(self.store))
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            for session in self.sessions.values():
                if session.talks:
                    session.say.put_nowait(None)
            await self.server.stop(0.2)
            self.server = None

    def send(self, member: str, **message: Any) -> None:
        self.sessions[member].say.put_nowait(membership_pb2.CoordinatorMessage(**message))

    async def hears(self, member: str, kind: str, **fields: Any) -> Any:
        """Raises AssertionError for a fault that nobody asks for."""
        return await self.sessions[member].hears(kind, unless="fault", **fields)


class Node:
    """A daemon in this process."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.party = cluster.party()
        self.party.address = f"127.0.0.1:{free_port()}"
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.party.id

    def enrol(self, coordinator: Coordinator, envelope: bytes) -> None:
        self.cluster.enrol(self.party, self.folder, coordinator.address, envelope)

    def choose(self, **settings: Any) -> NodeSettings:
        return NodeSettings(
            state_dir=self.folder,
            name="node",
            listen=self.party.address,
            models=[MODEL.parent],
            software_identity_allowed=True,
            **settings,
        )

    def start(self, coordinator: Coordinator, envelope: bytes, **settings: Any) -> None:
        if self.task is None:
            self.enrol(coordinator, envelope)
        self.stop.clear()
        self.task = asyncio.create_task(serve(self.choose(**settings), self.stop))

    async def end(self) -> None:
        self.stop.set()
        if self.task is not None:
            async with asyncio.timeout(200):
                await self.task


class ProcessNode(Node):
    """A daemon in a process of its own."""

    process: subprocess.Popen[bytes]

    def start(self, coordinator: Coordinator, envelope: bytes, **settings: Any) -> None:
        if envelope:
            self.enrol(coordinator, envelope)
        chosen = self.choose(**settings).model_dump_json()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, chosen], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )

    async def end(self) -> None:
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 30)


PROGRAM = """
import asyncio, sys
from sealring.mesh.system.logging import configure
from sealring.node.main import run
from sealring.node.settings import NodeSettings
configure("node")
asyncio.run(run(NodeSettings.model_validate_json(sys.argv[1])))
"""


class Gateway:
    """Attaches to every member and gives each the same steps."""

    def __init__(self, cluster: Any, party: Any) -> None:
        self.party = party
        self.store = party.store()
        self.channels: list[PeerChannel] = []
        self.calls: list[Any] = []
        self.number = 0

    async def attach(self, nodes: list[Node], epoch: int) -> list[control_pb2.Attached]:
        attached = []
        for node in nodes:
            name = node.party.peer.server_name
            channel = PeerChannel(node.party.address, self.store, name)
            self.channels.append(channel)
            call = control_pb2_grpc.ControlStub(channel.get()).Schedule()
            own = identity(self.party.signer, "testbed")
            certificate, request = self.party.material.certificate, control_pb2.ScheduleRequest
            await introduce(call, request, own, certificate, Purpose.SCHEDULE, called=node.id)
            await call.write(control_pb2.ScheduleRequest(attach=control_pb2.Attach(ring=RING, epoch=epoch)))
            self.calls.append(call)
            attached.append((await self.next(call)).attached)
        return attached

    async def next(self, call: Any, seconds: float = 200) -> control_pb2.ScheduleResponse:
        async with asyncio.timeout(seconds):
            answer = await call.read()
        if answer is grpc.aio.EOF:
            raise EOFError(await call.code())
        return answer

    async def to_head(self, **message: Any) -> None:
        await self.calls[0].write(control_pb2.ScheduleRequest(**message))

    async def step(self, **fields: Any) -> None:
        self.number += 1
        step = control_pb2.Step(number=self.number, **fields)
        for call in self.calls:
            await call.write(control_pb2.ScheduleRequest(step=step))

    async def close(self) -> None:
        for call in self.calls:
            call.cancel()
        for channel in self.channels:
            await channel.close()

    async def generate(self, question: str, tokens: int, *, row: int = 1) -> str:
        """One row, greedily, one step at a time."""
        chat = inference.Chat(messages=[inference.ChatMessage(role="user", content=question)])
        envelope = inference.Envelope(clear=inference.Prompt(chat=chat))
        await self.to_head(
            open=control_pb2.OpenRow(row=row, request_id="r", deployment="demo", envelope=envelope)
        )
        opened = (await self.next(self.calls[0])).opened
        done, text = 0, ""
        while done < opened.prompt_tokens:
            end = min(done + 64, opened.prompt_tokens)
            chunk = control_pb2.Chunk(
                row=row,
                start=done,
                end=end,
                prompt_tokens=opened.prompt_tokens,
                params_bytes=opened.params_bytes if done == 0 else 0,
            )
            await self.step(prefill=control_pb2.Prefill(chunks=[chunk]))
            answer = (await self.next(self.calls[0])).done
            done = end
        text += answer.outputs[0].delta.text
        changes = [control_pb2.Change(admit=control_pb2.Admit(row=row, lane=0))]
        for _ in range(tokens):
            if answer.outputs[0].finish:
                break
            await self.step(changes=changes, decode=control_pb2.Decode(lane=0))
            changes = []
            answer = (await self.next(self.calls[0])).done
            text += answer.outputs[0].delta.text
        await self.step(changes=[control_pb2.Change(evict=control_pb2.Evict(row=row))])
        assert not (await self.next(self.calls[0])).done.outputs
        return text


class Bed:
    def __init__(self, cluster, folder: Path, size: int, kind: type[Node]) -> None:
        self.cluster = cluster
        self.coordinator = Coordinator(cluster)
        self.nodes = [kind(cluster, folder / f"node-{rank}") for rank in range(size)]
        self.gateway_party = cluster.party(Role.GATEWAY)
        self.epoch = 0
        self.profile = None
        self.roster = None

    async def start(self, **settings: Any) -> None:
        await self.coordinator.start()
        parties = [node.party for node in self.nodes]
        envelope, _ = self.cluster.roster(members=parties, gateways=[self.gateway_party])
        for node in self.nodes:
            node.start(self.coordinator, envelope, **settings)
        for node in self.nodes:
            await self.coordinator.hears(node.id, "hello")

    async def deploy(self) -> None:
        first = self.nodes[0].id
        self.coordinator.send(first, profile=membership_pb2.ProfileRequest(id=7, model="model"))
        result = await self.coordinator.hears(first, "profile", id=7)
        assert not result.HasField("problem"), result.problem
        self.profile = result.profile
        await self.send_roster()

    async def send_roster(self, **changes) -> None:
        parties = [node.party for node in self.nodes]
        fields = {
            "gateways": [self.gateway_party],
            "layers": self.profile.layers,
            "model": "model",
            "digest": bytes.fromhex(self.profile.digest),
            **changes,
        }
        envelope, self.roster = self.cluster.roster(fields.pop("ring", parties), **fields)
        for node in self.nodes:
            self.coordinator.send(node.id, roster=membership_pb2.RosterUpdate(envelope=envelope))

    def prepare(self, **changes) -> None:
        self.epoch += 1
        fields = {
            "ring": RING,
            "epoch": self.epoch,
            "roster_version": self.roster.version,
            "roster_hash": self.roster.hash,
            "model": "model",
            "model_digest": self.profile.digest,
            "context": 512,
            "max_rows": 4,
            "kv_budget": 1 << 28,
            "prefill_chunk": 64,
            "protocol": PROTOCOL_VERSION,
            **changes,
        }
        for node in self.nodes:
            self.coordinator.send(node.id, prepare=membership_pb2.PrepareEpoch(**fields))

    async def form(self, ring: str = RING) -> None:
        self.prepare(ring=ring)
        for node in self.nodes:
            await self.coordinator.hears(node.id, "prepared", epoch=self.epoch)
        for node in self.nodes:
            self.coordinator.send(node.id, commit=membership_pb2.CommitEpoch(ring=ring, epoch=self.epoch))
        for node in self.nodes:
            await self.coordinator.hears(node.id, "up", epoch=self.epoch)

    async def attach(self):
        gateway = Gateway(self.cluster, self.gateway_party)
        await gateway.attach(self.nodes, self.epoch)
        return gateway

    async def settle(self) -> None:
        """All daemons have another roster, and what they said until then is forgotten."""
        await self.send_roster()
        for node in self.nodes:
            await until(partial(self._seen, node.id))
        for session in self.coordinator.sessions.values():
            session.heard.clear()

    def _seen(self, node: str) -> bool:
        told = self.coordinator.sessions[node].heard
        return any(one.roster_seen.version == self.roster.version for one in told)

    async def stop(self) -> None:
        """Ends the daemons; nothing of them may be left."""
        results = await asyncio.gather(*(node.end() for node in self.nodes), return_exceptions=True)
        await self.coordinator.stop()
        assert [r for r in results if isinstance(r, Exception) and not isinstance(r, SealringError)] == []
        assert not children("sealring.node.engine.main")
        assert not children("sealring.node.carrier.main")
        for node in self.nodes:
            assert not (node.folder / "run").exists()

    async def end(self, unload: bool = False) -> None:
        for node in self.nodes:
            message = membership_pb2.EndEpoch(ring=RING, epoch=self.epoch, unload=unload)
            self.coordinator.send(node.id, end=message)


def children(module: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        try:
            if module in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def time_for_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine a goodbye is not written within the second that a stopping node gives it."""
    monkeypatch.setattr("sealring.node.daemon.session._GOODBYE_SECONDS", 100.0)


@pytest.fixture
async def make_bed(cluster, tmp_path: Path):
    """Starts a coordinator and `size` daemons; at the end nothing of them may be left."""
    beds: list[Bed] = []

    async def make(size: int, *, processes: bool = False, **settings: Any) -> Bed:
        found = Bed(cluster, tmp_path, size, ProcessNode if processes else Node)
        beds.append(found)
        await found.start(**settings)
        return found

    yield make
    for found in beds:
        await found.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _kept_bed(request, create_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bed")
    found = Bed(create_cluster(), folder, request.param, Node)
    await found.start()
    await found.deploy()
    yield found
    await found.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def kept_bed(_kept_bed):
    """A bed with the demo model, shared by the tests of a module; the parameter is its number of daemons.

    All daemons run and know a current roster. At the end of a test no epoch is left.
    """
    await _kept_bed.settle()
    yield _kept_bed
    await _kept_bed.end()
    await until(lambda: not children("sealring.node.carrier.main"), pause=0.05)


@pytest.fixture
def children_of():
    return children


@pytest.fixture
def eventually():
    """Waits for what concerns children: to look for them reads of all processes."""
    return partial(until, pause=0.05)


@pytest.fixture
def make_gateway(cluster):
    def make(party: Any) -> Gateway:
        return Gateway(cluster, party)

    return make
