"""The certificate of a member's programs: got, renewed, checked, and kept apart from the member's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import grpc.aio
import pytest
from actedcoordinator import ActedCoordinator
from leaftest import material

from sealring.mesh.crypto import Label, SoftwareSigner, verify
from sealring.mesh.member import ClientKeeper, MachineState, load_machine_state, save_machine_state
from sealring.mesh.pki import PeerIdentity, Role, certificate_peer, load_certificate
from sealring.mesh.rpc import Server
from sealring.v1 import membership_pb2

PEER = PeerIdentity("demo", Role.MEMBER, "one")
CLIENT = PeerIdentity("demo", Role.CLIENT, "one")


class Enough(Exception):
    """A test has seen what it waits for."""


class Coordinator(ActedCoordinator):
    """Issues a certificate to the peer `to`."""

    def __init__(self, authority: Any, clock: Any, signer: SoftwareSigner) -> None:
        super().__init__(authority, {PEER.id: signer.public_key})
        self.clock, self.signer = clock, signer
        self.to = CLIENT
        self.asked: list[membership_pb2.RenewRequest] = []

    async def Renew(self, request: Any, context: Any) -> membership_pb2.RenewResponse:
        verify(self.signer.public_key, Label.CSR, request.csr, request.signature)
        self.asked.append(request)
        return self.renew(request, self.to)


class Machine:
    """A keeper whose pauses turn the clock, until they are over."""

    def __init__(self, folder: Path, authority: Any, clock: Any, coordinator: Coordinator, way: Any) -> None:
        own = material(authority.ca, PEER, lifetime=3600, now=clock())
        pin = authority.root.fingerprint
        state = MachineState(PEER, "one", "127.0.0.1:1", pin, authority.root, own, "127.0.0.1:2")
        save_machine_state(folder, state)
        self.folder, self.clock, self.coordinator, self.way = folder / "client", clock, coordinator, way
        self.state, self.pauses = state, 0
        self.keeper = ClientKeeper(self.folder, state, coordinator.signer, way, clock=clock)
        way.on_pause = self.pause

    def pause(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.pauses -= 1
        if self.pauses < 0:
            raise Enough

    async def run(self, pauses: int) -> None:
        self.pauses = pauses
        with contextlib.suppress(Enough):
            await self.keeper.run()


@pytest.fixture
async def machine(tmp_path: Path, authority: Any, clock: Any) -> AsyncIterator[Machine]:
    coordinator = Coordinator(authority, clock, SoftwareSigner.generate())
    server = Server(coordinator.services())
    reached = f"127.0.0.1:{server.listen('127.0.0.1:0', None)}"
    await server.start()

    class Way:
        address = reached
        on_pause: Callable[[float], None]

        @property
        def channel(self) -> Self:
            return self

        def get(self) -> grpc.aio.Channel:
            return opened

        async def pause(self, address: str, seconds: float) -> None:
            if self.address == address:
                self.on_pause(seconds)

    async with grpc.aio.insecure_channel(reached) as opened:
        yield Machine(tmp_path / "state", authority, clock, coordinator, Way())
    await server.stop(0)


async def test_it_is_the_members_as_a_client_and_holds_none_of_its_keys(machine: Machine) -> None:
    await machine.run(2)
    (asked,) = machine.coordinator.asked
    assert asked.client
    kept = load_machine_state(machine.folder)
    assert (kept.peer, kept.coordinator, kept.root) == (CLIENT, machine.way.address, machine.state.root)
    assert certificate_peer(load_certificate(kept.tls.certificate)) == CLIENT
    assert kept.tls.private_key != machine.state.tls.private_key
    assert {one.name for one in machine.folder.iterdir()} == {
        "tls.key",
        "tls.pem",
        "root.dsse",
        "member.json",
    }
    assert machine.folder.stat().st_mode & 0o077 == 0
    assert load_machine_state(machine.folder.parent).tls == machine.state.tls


async def test_it_is_renewed_at_half_of_its_life(machine: Machine) -> None:
    await machine.run(200)
    lasted = machine.coordinator.asked
    assert len(lasted) > 2
    assert len({one.csr for one in lasted}) == len(lasted), "a new key each time"
    assert len(lasted) < 10


@pytest.mark.parametrize(
    "to", [PEER, PeerIdentity("demo", Role.CLIENT, "two"), PeerIdentity("other", Role.CLIENT, "one")]
)
async def test_the_certificate_of_another_is_not_kept(machine: Machine, to: PeerIdentity) -> None:
    """An earlier coordinator issues one of the member's own role."""
    machine.coordinator.to = to
    await machine.run(12)
    assert not (machine.folder / "member.json").exists()
    assert 3 < len(machine.coordinator.asked) <= 13


async def test_it_names_the_coordinators_address_of_now(machine: Machine) -> None:
    await machine.run(2)
    machine.way.__class__.address = "127.0.0.1:9"
    await machine.run(2)
    assert load_machine_state(machine.folder).coordinator == "127.0.0.1:9"
    await asyncio.sleep(0)
