"""Ways between two daemons, measured over real connections on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from sealring.mesh.errors import SealringError
from sealring.mesh.pki import Role
from sealring.mesh.rpc import PeerChannel, Server, server_credentials
from sealring.mesh.system.addresses import parse_address
from sealring.node.carrier.ways import TAG_BYTES
from sealring.node.daemon.measuring import CALLER_SECONDS, SERVICE, Measuring
from sealring.v1 import links_pb2, links_pb2_grpc

PATIENCE = 200.0


class Daemon:
    def __init__(self, party: Any) -> None:
        self.party, self.quiet, self.now, self.roster = party, True, 0.0, None
        self.looks: list[bool] = []
        self.measuring = Measuring(
            *("testbed", party.store(), "127.0.0.1", lambda: self.roster, self._is_quiet),
            everywhere=False,
            clock=lambda: self.now,
        )
        self.server = Server([(links_pb2_grpc.add_WaysServicer_to_server, self.measuring, SERVICE)])

    def _is_quiet(self) -> bool:
        return self.looks.pop(0) if self.looks else self.quiet


@pytest.fixture
async def two(cluster: Any) -> AsyncIterator[tuple[Daemon, Daemon]]:
    found = Daemon(cluster.party()), Daemon(cluster.party())
    for daemon in found:
        port = daemon.server.listen("127.0.0.1:0", server_credentials(daemon.party.store()))
        daemon.party.address = f"127.0.0.1:{port}"
        await daemon.server.start()
    _, roster = cluster.roster([daemon.party for daemon in found])
    for daemon in found:
        daemon.roster = roster
    yield found
    for daemon in found:
        await daemon.server.stop(0)


async def reason(work: Any) -> str:
    with pytest.raises(SealringError) as caught:
        await work
    return caught.value.reason


async def test_a_member_measures_its_way_to_another_and_the_port_is_closed_then(
    two: tuple[Daemon, Daemon],
) -> None:
    found = await two[0].measuring.measure(two[1].party.id)
    host, port = parse_address(found.address)
    assert host == "127.0.0.1"
    assert found.bytes_per_second > 0
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                socket.create_connection((host, port), timeout=PATIENCE).close()
            except ConnectionError:
                break
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("busy", [0, 1])
async def test_nothing_is_measured_while_a_ring_of_either_is_at_work(
    two: tuple[Daemon, Daemon], busy: int
) -> None:
    two[busy].quiet = False
    assert await reason(two[0].measuring.measure(two[1].party.id)) == "RING_BUSY"


async def test_a_measurement_during_which_a_ring_begins_does_not_count(two: tuple[Daemon, Daemon]) -> None:
    """At either end. A way that was found in vain is not one that there is not."""
    for busy in two:
        busy.looks, busy.quiet = [True], False
        assert await reason(two[0].measuring.measure(two[1].party.id)) == "RING_BUSY"
        busy.quiet, two[1].now = True, two[1].now + CALLER_SECONDS


async def test_a_member_is_measured_by_another_once_a_minute(two: tuple[Daemon, Daemon]) -> None:
    await two[0].measuring.measure(two[1].party.id)
    assert await reason(two[0].measuring.measure(two[1].party.id)) == "MEASURED_LATELY"
    two[1].now = CALLER_SECONDS
    await two[0].measuring.measure(two[1].party.id)
    assert await reason(two[0].measuring.measure("somebody")) == "UNKNOWN_NODE"


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.OPERATOR, Role.MEMBER])
async def test_only_members_of_the_roster_are_given_a_port(
    cluster: Any, two: tuple[Daemon, Daemon], role: Role
) -> None:
    stranger = cluster.party(role)
    name = two[1].party.peer.server_name
    channel = PeerChannel(two[1].party.address, stranger.store(), name)
    call = links_pb2_grpc.WaysStub(channel.get()).Measure(links_pb2.MeasureRequest(), timeout=PATIENCE)
    with pytest.raises(grpc.RpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await channel.close()


Answer = Callable[[], links_pb2.MeasureResponse]


@pytest.mark.parametrize(
    ("addresses", "tag"),
    [
        (["127.0.0.1:9"], bytes(TAG_BYTES - 1)),
        ([], bytes(TAG_BYTES)),
        (["127.0.0.1:0"], bytes(TAG_BYTES)),
        (["mac.local:9"], bytes(TAG_BYTES)),
        (["127.0.0.1:9"] * 9, bytes(TAG_BYTES)),
        (["127.0.0.1:9,127.0.0.1:\x1b"], bytes(TAG_BYTES)),
        ([], b""),
    ],
)
async def test_an_answer_that_is_malformed_is_refused(
    cluster: Any, two: tuple[Daemon, Daemon], addresses: list[str], tag: bytes
) -> None:
    class Liar(links_pb2_grpc.WaysServicer):
        async def Measure(self, request: Any, context: Any) -> AsyncIterator[Any]:
            if addresses or tag:
                yield links_pb2.MeasureResponse(addresses=addresses, tag=tag)

    liar = cluster.party()
    server = Server([(links_pb2_grpc.add_WaysServicer_to_server, Liar(), SERVICE)])
    port = server.listen("127.0.0.1:0", server_credentials(liar.store()))
    liar.address = f"127.0.0.1:{port}"
    await server.start()
    _, two[0].roster = cluster.roster([two[0].party, liar])
    assert await reason(two[0].measuring.measure(liar.id)) in ("BAD_ANSWER", "BAD_RING_ADDRESS")
    await server.stop(0)
