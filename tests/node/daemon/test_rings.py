import asyncio
import importlib.util
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from mesh.certificates import Role
from mesh.errors import SealringError
from sealring.v1 import membership_pb2

_spec = importlib.util.spec_from_file_location("ring_harness", Path(__file__).with_name("ring_harness.py"))
harness = importlib.util.module_from_spec(_spec)
sys.modules["ring_harness"] = harness
_spec.loader.exec_module(harness)

texts: dict[str, str] = {}
pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


class Bed:
    def __init__(self, cluster, folder: Path, size: int) -> None:
        self.cluster = cluster
        self.coordinator = harness.Coordinator(cluster)
        self.nodes = [harness.Node(cluster, folder / f"node-{rank}") for rank in range(size)]
        self.gateway_party = cluster.party(Role.GATEWAY)
        self.epoch = 0
        self.profile = None
        self.roster = None

    async def start(self) -> None:
        await self.coordinator.start()
        parties = [node.party for node in self.nodes]
        envelope, _ = self.cluster.roster(members=parties, gateways=[self.gateway_party])
        for node in self.nodes:
            node.start(self.coordinator, envelope)
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
            "ring": harness.RING,
            "epoch": self.epoch,
            "roster_version": self.roster.version,
            "roster_hash": self.roster.hash,
            "model": "model",
            "model_digest": self.profile.digest,
            "context": 512,
            "max_rows": 4,
            "kv_budget": 1 << 28,
            "prefill_chunk": 64,
            **changes,
        }
        for node in self.nodes:
            self.coordinator.send(node.id, prepare=membership_pb2.PrepareEpoch(**fields))

    async def form(self) -> None:
        self.prepare()
        for node in self.nodes:
            await self.coordinator.hears(node.id, "prepared", epoch=self.epoch)
        for node in self.nodes:
            self.coordinator.send(
                node.id, commit=membership_pb2.CommitEpoch(ring=harness.RING, epoch=self.epoch)
            )
        for node in self.nodes:
            await self.coordinator.hears(node.id, "up", epoch=self.epoch)

    async def attach(self):
        gateway = harness.Gateway(self.cluster, self.gateway_party)
        await gateway.attach(self.nodes, self.epoch)
        return gateway

    async def end(self, unload: bool = False) -> None:
        for node in self.nodes:
            message = membership_pb2.EndEpoch(ring=harness.RING, epoch=self.epoch, unload=unload)
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


async def until(condition, seconds: float = 15) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def bed(cluster, folder: Path, size: int):
    found = Bed(cluster, folder, size)
    await found.start()
    try:
        yield found
    finally:
        results = await asyncio.gather(*(node.end() for node in found.nodes), return_exceptions=True)
        await found.coordinator.stop()
        assert [r for r in results if isinstance(r, Exception) and not isinstance(r, SealringError)] == []
        assert not children("node.engine.main")
        assert not children("node.carrier.main")
        for node in found.nodes:
            assert not (node.folder / "run").exists()


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_ring_answers(cluster, tmp_path: Path, size: int) -> None:
    async with bed(cluster, tmp_path, size) as ring:
        await ring.deploy()
        await ring.form()
        assert len(children("node.carrier.main")) == (size if size > 1 else 0)
        gateway = await ring.attach()
        text = await gateway.generate("What is the capital of France?", 24)
        assert text
        assert texts.setdefault("answer", text) == text
        await gateway.close()
        for node in ring.nodes:
            fault = await ring.coordinator.hears(node.id, "fault", epoch=ring.epoch)
            assert fault.problem.reason in {"GATEWAY_GONE", "PEER_LOST", "CHILD_ENDED"}
        await until(lambda: not children("node.carrier.main"))
        engines = {process.pid for process in children("node.engine.main")}
        await ring.form()
        assert {process.pid for process in children("node.engine.main")} == engines
        await ring.end(unload=True)
        await until(lambda: not children("node.engine.main"))
