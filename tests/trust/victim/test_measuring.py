"""Members that abuse the measurements of links in a serving cluster: they ask without end, send without
end, and lie about what they measured."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from attackertest import nodes, serves_on
from patience import until
from ringtest import CLUSTER, LIMIT_SECONDS, Ring

from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import SealringError
from sealring.mesh.member import IDENTITY_KEY, MachineState, enrol, load_machine_state
from sealring.mesh.pki import PeerIdentity, Role
from sealring.mesh.rpc import PeerChannel, TlsStore, from_rpc_error
from sealring.mesh.system.addresses import parse_address
from sealring.v1 import links_pb2, links_pb2_grpc, membership_pb2
from tests.coordinator.conftest import FakeNode, evidence

pytestmark = CLUSTER
MOST_BYTES = 32 << 20
BLOCK = 4 << 20
BUFFERS = 16 << 20
"""What the kernel may hold of a connection, with room to spare."""


@asynccontextmanager
async def calling(ring: Ring, state: MachineState, called: Any) -> AsyncIterator[links_pb2_grpc.WaysStub]:
    """The calls of an enrolled machine to another member."""
    peer = PeerIdentity(state.peer.cluster, Role.MEMBER, called.id)
    channel = PeerChannel(ring.cluster.address(called.name), TlsStore(state.tls), peer.server_name)
    try:
        yield links_pb2_grpc.WaysStub(channel.get())
    finally:
        await channel.close()


async def refusal(stub: links_pb2_grpc.WaysStub) -> str:
    """Why a call for a port is refused; "" if it is given one."""
    call: Any = stub.Measure(links_pb2.MeasureRequest(), timeout=LIMIT_SECONDS)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    finally:
        call.cancel()
    return ""


async def admitted(stub: links_pb2_grpc.WaysStub) -> tuple[Any, Any]:
    """An open call and its answer, once the ring has been idle for long enough."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            call: Any = stub.Measure(links_pb2.MeasureRequest(), timeout=LIMIT_SECONDS)
            try:
                return call, await call.read()
            except grpc.aio.AioRpcError as error:
                if from_rpc_error(error).reason != "RING_BUSY":
                    raise
            await asyncio.sleep(0.2)


def sent_until_cut(address: str, tag: bytes) -> int:
    """The bytes that a port takes of a caller that never ends."""
    total, block = 0, struct.pack(">I", BLOCK) + bytes(BLOCK)
    with socket.create_connection(parse_address(address), timeout=LIMIT_SECONDS) as connection:
        connection.sendall(tag)
        with contextlib.suppress(OSError):
            while total < 4 * MOST_BYTES:
                connection.sendall(block)
                total += BLOCK
    return total


async def test_a_member_that_asks_and_sends_without_end_is_cut_off_and_the_ring_answers(victim: Ring) -> None:
    epoch = (await victim.status()).epoch
    found = await nodes(victim)
    spare = next(node for node in found.values() if not node.rings)
    called = next(node for node in found.values() if node.rings)
    state = load_machine_state(victim.cluster.state_dir / spare.name)
    async with calling(victim, state, called) as stub:
        call, answer = await admitted(stub)
        address = answer.addresses[0]
        assert await asyncio.to_thread(sent_until_cut, address, answer.tag) <= MOST_BYTES + BLOCK + BUFFERS
        assert await asyncio.to_thread(sent_until_cut, address, bytes(len(answer.tag))) <= BLOCK + BUFFERS
        reasons = await asyncio.gather(*(refusal(stub) for _ in range(100)))
        assert "" not in reasons, "one port for a caller and a minute"
        assert "MEASURED_LATELY" in reasons
        await serves_on(victim, epoch)
        with contextlib.suppress(grpc.aio.AioRpcError):  # RING_BUSY
            while await call.read() is not grpc.aio.EOF:
                pass
        async with asyncio.timeout(LIMIT_SECONDS):  # a question takes the port away
            while await asyncio.to_thread(listens, address):
                await asyncio.sleep(0.05)
        assert "" not in await asyncio.gather(*(refusal(stub) for _ in range(100)))
    await serves_on(victim, epoch)


def listens(address: str) -> bool:
    try:
        socket.create_connection(parse_address(address), timeout=LIMIT_SECONDS).close()
    except ConnectionError:
        return False
    return True


def lies() -> Iterator[membership_pb2.MeasuredWay]:
    """Impossible figures, malformed addresses, and one that is no member's."""
    good = {"address": "127.0.0.1:9", "round_trip_us": 1, "bytes_per_second": 1 << 30}
    for lie in (
        {"bytes_per_second": (1 << 64) - 1},
        {"bytes_per_second": 0},
        {"round_trip_us": (1 << 32) - 1},
        {"address": "\x1b[2J:1"},
        {"address": "a" * 100_000 + ":1"},
        {"address": "8.8.8.8:53"},
    ):
        yield membership_pb2.MeasuredWay(**(good | lie))


class Liar(FakeNode):
    """Answers each question for a measurement with the next lie, and says more that nobody asked for."""

    lies: Iterator[membership_pb2.MeasuredWay]
    asked: set[frozenset[str]]

    async def _take(self, message: membership_pb2.CoordinatorMessage) -> None:
        if message.WhichOneof("message") == "measure":
            pair = frozenset((self.id, message.measure.member))
            way = next(self.lies, membership_pb2.MeasuredWay(address="127.0.0.1:9", bytes_per_second=1))
            for number in (message.measure.id, message.measure.id, *range(50)):
                await self.send(measured=membership_pb2.MeasureAnswer(id=number, way=way))
            self.asked.add(pair)
        await super()._take(message)


async def test_members_that_lie_about_links_say_nothing_of_others_and_the_ring_answers(
    victim: Ring, tmp_path: Path
) -> None:
    epoch = (await victim.status()).epoch
    honest = {node.id for node in (await nodes(victim)).values()}
    liars: list[Liar] = []
    told, asked = lies(), set[frozenset[str]]()
    try:
        for number in range(4):
            folder = tmp_path / f"liar-{number}"
            await enrol(
                token=await victim.cluster.join_token("ROLE_NODE"),
                role=Role.MEMBER,
                signer=SoftwareSigner.load_or_create(folder / IDENTITY_KEY),
                state_dir=folder,
                name=folder.name,
                evidence=evidence(),
            )
            liar = Liar(folder, victim.cluster.address("coordinator"), measures=True)
            liar.lies, liar.asked = told, asked
            liars.append(liar)
            await liar.start()
        await until(lambda: len(asked) >= 6, pause=0.1)
        listed = await victim.cluster.admin.call("ListNodes")
        assert {one.caller for one in listed.links} | {one.called for one in listed.links} <= {
            one.id for one in liars
        }
        assert {one.host for one in listed.links} <= {"127.0.0.1", "8.8.8.8"}
        assert all(0 < one.bytes_per_second <= 1 << 40 for one in listed.links)
        spec = {"name": "planned", "model": victim.cluster.model, "stages": 2, "strategy": "pipeline"}
        planned = await victim.cluster.admin.call("PlanDeployment", spec=spec, seconds=LIMIT_SECONDS)
        assert len(planned.plan.rings[0].stages) == 2
        await serves_on(victim, epoch)
    finally:
        for liar in liars:
            with contextlib.suppress(SealringError):
                await victim.cluster.admin.call("EvictNode", id=liar.id)
            await liar.stop()
    assert {node.id for node in (await nodes(victim)).values()} == honest
    await serves_on(victim, epoch)
