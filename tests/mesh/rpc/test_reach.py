"""Connecting to members with several addresses, over real sockets; no test waits for a time to pass."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import grpc.aio
import pytest
from leaftest import material

from sealring.mesh.clock import wall_clock
from sealring.mesh.errors import Unavailable
from sealring.mesh.pki import ClusterCA, PeerIdentity, Role
from sealring.mesh.rpc import Backoff, Reach, TlsStore, reach, server_credentials
from sealring.mesh.system.addresses import free_port

PEER = PeerIdentity("demo", Role.MEMBER, "node-b")
NEVER = 1000.0
"""Seconds; longer than any test may take."""


class Bed:
    """A cluster's authority, and servers of its members."""

    def __init__(self, folder: Path) -> None:
        self._ca = ClusterCA.create(folder, "demo", now=wall_clock())
        self.servers: list[grpc.aio.Server] = []

    def store(self, name: str) -> TlsStore:
        return TlsStore(material(self._ca, PeerIdentity("demo", Role.MEMBER, name)))

    async def serve(self, name: str) -> str:
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", server_credentials(self.store(name)))
        await server.start()
        self.servers.append(server)
        return f"127.0.0.1:{port}"


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    made = Bed(tmp_path / "ca")
    yield made
    for server in made.servers:
        await server.stop(None)


class Dead:
    """An address at which nobody ever answers: connections come, and no TLS."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def came(self) -> list[socket.socket]:
        """The connections that were made since it was asked last."""
        found = []
        while True:
            try:
                found.append(self.listener.accept()[0])
            except BlockingIOError:
                return found

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dead]:
    monkeypatch.setattr(reach, "CONNECT_SECONDS", NEVER)
    with closing(Dead()) as made:
        yield made


async def test_an_address_that_is_dead_holds_up_no_other_and_is_not_first_again(
    bed: Bed, dead: Dead, monkeypatch: pytest.MonkeyPatch
) -> None:
    reaching, alive = Reach(bed.store("node-a")), await bed.serve("node-b")
    channel = await reaching.connect(PEER, [dead.address, alive])
    assert channel.address == alive
    await channel.close()
    for one in dead.came():
        one.close()
    monkeypatch.setattr(reach, "APART_SECONDS", NEVER)  # now nothing but the first is tried
    channel = await reaching.connect(PEER, [dead.address, alive])
    assert (channel.address, dead.came()) == (alive, [])
    await channel.close()


async def test_what_worked_before_and_is_not_advertised_any_more_is_not_tried(bed: Bed) -> None:
    reaching = Reach(bed.store("node-a"))
    first, second = await bed.serve("node-b"), await bed.serve("node-b")
    for address in (first, second):
        channel = await reaching.connect(PEER, [address])
        assert channel.address == address
        await channel.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address is tried before the one before it has failed."""
    for name in ("CONNECT_SECONDS", "APART_SECONDS"):
        monkeypatch.setattr(reach, name, NEVER)


async def test_nothing_is_waited_for_where_connections_are_refused(bed: Bed, patient: None) -> None:
    reaching, alive = Reach(bed.store("node-a")), await bed.serve("node-b")
    refused = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    channel = await reaching.connect(PEER, [*refused, alive])
    assert channel.address == alive
    await channel.close()
    with pytest.raises(Unavailable) as raised:
        await reaching.connect(PEER, refused)
    assert raised.value.reason == "PEER_UNREACHABLE"
    assert raised.value.metadata["addresses"] == ",".join(refused)
    with pytest.raises(Unavailable):
        await reaching.connect(PEER, [])


async def test_another_member_at_an_address_is_passed_over(bed: Bed, patient: None) -> None:
    reaching = Reach(bed.store("node-a"))
    other, alive = await bed.serve("node-c"), await bed.serve("node-b")
    channel = await reaching.connect(PEER, [other, alive])
    assert channel.address == alive
    await channel.close()


async def test_nothing_is_left_of_an_attempt_that_is_given_up(bed: Bed, dead: Dead) -> None:
    connecting = asyncio.create_task(Reach(bed.store("node-a")).connect(PEER, [dead.address]))
    while not (came := dead.came()):
        await asyncio.sleep(0.01)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    with closing(came[0]) as connection:
        connection.setblocking(True)
        while await asyncio.to_thread(connection.recv, 4096):
            pass


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_stream_that_held() -> None:
    backoff = Backoff()
    expected = [0.2, 0.4, 0.8, 1.6, 3.2, 4.0, 4.0]
    for pause in expected:
        assert 0.5 * pause <= backoff.after(0.1) <= 1.5 * pause
    assert 0.1 <= backoff.after(60.0) <= 0.3
    assert 0.2 <= backoff.after(0.1) <= 0.6


def test_pauses_without_spread_are_exact() -> None:
    backoff = Backoff(1.0, 3.0, steady=10.0, spread=0.0)
    assert [backoff.after(9.9) for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
    assert backoff.after(10.0) == 1.0
