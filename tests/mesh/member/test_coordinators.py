"""A machine finds its coordinator at any address, over real sockets, and passes over what is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
from leaftest import material

from sealring.mesh.clock import wall_clock
from sealring.mesh.member import Coordinators
from sealring.mesh.pki import ClusterCA, PeerIdentity, Role
from sealring.mesh.rpc import TlsStore, server_credentials
from sealring.mesh.system.addresses import free_port, parse_address

COORDINATOR = PeerIdentity("demo", Role.COORDINATOR, "main")
MEMBER = PeerIdentity("demo", Role.MEMBER, "node-b")
OLD = "192.0.2.1:7700"
"""An address for documentation (RFC 5737): nobody answers there."""


class Bed:
    """Servers on loopback, by the certificates that they have."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = ClusterCA.create(folder / "own", "demo", now=wall_clock())
        self.servers: list[grpc.aio.Server] = []

    def another_authority(self) -> ClusterCA:
        """One of a cluster with the same name."""
        return ClusterCA.create(self._folder / "other", "demo", now=wall_clock())

    async def serve(
        self, peer: PeerIdentity = COORDINATOR, ca: ClusterCA | None = None, port: int = 0
    ) -> str:
        server = grpc.aio.server()
        credentials = server_credentials(TlsStore(material(ca or self.ca, peer)))
        port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
        await server.start()
        self.servers.append(server)
        return f"127.0.0.1:{port}"

    def machine(
        self, address: str, *known: str, find: Callable[[], Awaitable[list[str]]] | None = None
    ) -> Coordinators:
        """A member that was enrolled at `address` and has a roster with the addresses `known`."""
        store = TlsStore(material(self.ca, PeerIdentity("demo", Role.MEMBER, "node-a")))
        roster = partial(tuple, known)
        return Coordinators(
            address, store, roster, find or nothing, seconds=2.0, search_after=0.0, search_every=0.0
        )


async def nothing() -> list[str]:
    return []


def hearsay(address: str) -> tuple[Callable[[], Awaitable[list[str]]], asyncio.Event]:
    """A question to the network that brings this address, and whether it was asked."""
    asked = asyncio.Event()

    async def find() -> list[str]:
        asked.set()
        return [address]

    return find, asked


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    made = Bed(tmp_path)
    yield made
    for server in made.servers:
        await server.stop(None)


@pytest.fixture
def dead() -> Iterator[Callable[[], str]]:
    """Addresses where connections are taken and nobody speaks."""
    with ExitStack() as listening:

        def make() -> str:
            server = listening.enter_context(socket.create_server(("127.0.0.1", 0)))
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield make


async def test_a_dead_first_address_keeps_no_machine_from_its_coordinator(
    bed: Bed, dead: Callable[[], str]
) -> None:
    alive = await bed.serve()
    machine = bed.machine(dead(), dead(), alive)
    assert await machine.lead()
    assert machine.channel.address == alive
    await machine.channel.get().channel_ready()
    await machine.close()


async def test_a_coordinator_beside_the_machine_is_found_where_there_is_no_network(bed: Bed) -> None:
    port = parse_address(await bed.serve())[1]
    machine = bed.machine(f"192.0.2.1:{port}")
    assert await machine.lead()
    assert machine.channel.address == f"127.0.0.1:{port}"
    await machine.close()


async def test_a_coordinator_of_no_use_is_left_for_another_one_and_taken_again_where_it_is_alone(
    bed: Bed,
) -> None:
    first, standby = await bed.serve(), await bed.serve()
    machine = bed.machine(first, standby)
    for elsewhere, expected in ((False, first), (True, standby), (True, first), (False, first)):
        assert await machine.lead(elsewhere=elsewhere)
        assert machine.channel.address == expected
    await bed.servers[1].stop(None)
    assert await machine.lead(elsewhere=True)
    assert machine.channel.address == first
    await machine.close()


async def test_a_coordinator_that_has_moved_is_found_by_asking_the_network(bed: Bed) -> None:
    moved = await bed.serve()
    find, asked = hearsay(moved)
    machine = bed.machine(OLD, find=find)
    assert not await machine.lead()
    await asked.wait()
    assert await machine.lead()
    assert machine.channel.address == moved
    await machine.close()


@pytest.mark.parametrize("liar", ["of another cluster", "a member", "silent", "nobody"])
async def test_what_only_says_to_be_the_coordinator_is_passed_over(
    bed: Bed, dead: Callable[[], str], liar: str
) -> None:
    """Wherever the machine heard of it; and the true one is taken beside it."""
    lies = {
        "of another cluster": lambda: bed.serve(ca=bed.another_authority()),
        "a member": lambda: bed.serve(MEMBER),
    }
    if liar in lies:
        lie = await lies[liar]()
    else:
        lie = dead() if liar == "silent" else f"127.0.0.1:{free_port()}"
    find, asked = hearsay(lie)
    machine = bed.machine(OLD, find=find)
    assert not await machine.lead()
    await asked.wait()
    assert lie in machine.addresses
    assert not await machine.lead()
    assert machine.channel.address == OLD
    await machine.close()

    both = bed.machine(lie, await bed.serve())
    assert await both.lead()
    assert both.channel.address != lie
    await both.close()


async def test_no_network_is_asked_about_a_cluster_on_loopback(bed: Bed) -> None:
    async def find() -> list[str]:
        raise AssertionError("the network is asked")

    machine = bed.machine(f"127.0.0.1:{free_port()}", find=find)
    for _ in range(3):
        assert not await machine.lead()
        await asyncio.sleep(0.05)
    await machine.close()


async def test_a_pause_ends_when_the_coordinator_answers_elsewhere(bed: Bed, dead: Callable[[], str]) -> None:
    before, now = dead(), await bed.serve()
    machine = bed.machine(before, now)
    pausing = asyncio.create_task(machine.pause(before, 1e6))
    await asyncio.sleep(0)
    assert await machine.lead()
    await pausing
    await machine.pause(before, 1e6)
    await machine.pause(now, 0)
    await machine.close()
