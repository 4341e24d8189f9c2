"""Renewal of an mTLS certificate: what comes back is verified before anything is stored or used."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import grpc.aio
import pytest
from actedcoordinator import ActedCoordinator
from leaftest import material
from refusals import refused

from sealring.mesh.crypto import Ed25519Signer, Label, SoftwareSigner
from sealring.mesh.errors import PermissionDenied, SealringError, Unauthenticated, Unavailable
from sealring.mesh.member import (
    CertificateKeeper,
    MachineState,
    by_roster_keys,
    certificate_keeper,
    load_machine_state,
    refusal,
    save_machine_state,
)
from sealring.mesh.pki import (
    ClusterCA,
    LeafKey,
    PeerIdentity,
    Role,
    RootMetadata,
    expires_at,
    sign_root,
    to_pem,
)
from sealring.mesh.rpc import Server, TlsStore
from sealring.v1 import membership_pb2

PEER = PeerIdentity("demo", Role.MEMBER, "one")
LIFETIME = 3600.0
JOIN = "127.0.0.1:7701"
AT = [JOIN, "192.168.1.9:7701"]
"""The join port of each host where the coordinator may be."""


class Coordinator(ActedCoordinator):
    """Its callers are one machine, and show no certificate."""

    def __init__(self, authority: Any, clock: Any, signer: SoftwareSigner) -> None:
        super().__init__(authority, {PEER.id: signer.public_key})
        self.clock, self.signer = clock, signer
        self.asked_by: list[str] = []

    async def Renew(self, request: Any, context: Any) -> membership_pb2.RenewResponse:
        self.asked_by.append("mtls")
        return self.renew(request, PEER)


class Machine:
    """An enrolled machine whose keeper asks `coordinator`."""

    def __init__(
        self, folder: Path, authority: Any, clock: Any, coordinator: Coordinator, channel: Any
    ) -> None:
        own = material(authority.ca, PEER, lifetime=LIFETIME, now=clock())
        pin = authority.root.fingerprint
        self.state = MachineState(PEER, "one", "127.0.0.1:1", pin, authority.root, own, JOIN)
        save_machine_state(folder, self.state)
        self.folder, self.clock, self.coordinator = folder, clock, coordinator
        self.store = TlsStore(own)
        self.roots: list[RootMetadata] = []
        self.answered_by = coordinator.asked_by
        self.by_identity: SealringError | None = None
        self.sleeper: Callable[[float], Any] = asyncio.sleep
        self.keeper = CertificateKeeper(
            folder,
            self.state,
            self.store,
            coordinator.signer,
            channel,
            self.roots.append,
            clock=clock,
            sleep=lambda seconds: self.sleeper(seconds),
        )

    def issue(self, lifetime: float) -> None:
        """Another certificate to begin with, from now on."""
        self.store.replace(material(self.coordinator.ca, PEER, lifetime=lifetime, now=self.clock()))

    async def renew_by_identity(
        self, addresses: list[str], pin: bytes, signer: SoftwareSigner, csr: bytes, **_: Any
    ) -> membership_pb2.RenewResponse:
        """In the place of `mesh/member/renewal.py`, which `tests/coordinator/test_renewal.py` tries."""
        assert (addresses, pin) == (AT, self.state.root_sha256)
        self.answered_by.append("identity")
        if self.by_identity is not None:
            raise self.by_identity
        request = membership_pb2.RenewRequest(csr=csr, signature=signer.sign(Label.CSR, csr))
        return self.coordinator.renew(request, PEER)

    def unchanged(self) -> bool:
        stored = load_machine_state(self.folder)
        return (self.store.current(), stored.tls, stored.root, self.roots) == (
            (0, self.state.tls),
            self.state.tls,
            self.state.root,
            [],
        )


@pytest.fixture
async def machine(
    tmp_path: Path, authority: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Machine]:
    coordinator = Coordinator(authority, clock, SoftwareSigner.generate())
    server = Server(coordinator.services())
    address = f"127.0.0.1:{server.listen('127.0.0.1:0', None)}"
    await server.start()

    class Channel:
        addresses = ("127.0.0.1:7700", "192.168.1.9:7700")

        @property
        def channel(self) -> Self:
            return self

        def get(self) -> grpc.aio.Channel:
            return opened

    async with grpc.aio.insecure_channel(address) as opened:
        made = Machine(tmp_path / "state", authority, clock, coordinator, Channel())
        monkeypatch.setattr(certificate_keeper, "renew_by_identity", made.renew_by_identity)
        yield made
    await server.stop(0)


async def test_a_renewed_certificate_is_stored_and_used(machine: Machine) -> None:
    machine.clock.advance(100)
    await machine.keeper.renew()
    generation, now = machine.store.current()
    stored = load_machine_state(machine.folder)
    assert (generation, stored.tls) == (1, now)
    assert now.private_key != machine.state.tls.private_key
    assert expires_at(now.certificate) == machine.clock() + LIFETIME
    assert [root.version for root in machine.roots] == [1]


async def test_newer_root_metadata_comes_with_it(machine: Machine, authority: Any, tmp_path: Path) -> None:
    """A new authority, with the old one beside it; then the old metadata again, which is refused."""
    other = ClusterCA.create(tmp_path / "next", "demo", now=machine.clock())
    draft = dataclasses.replace(
        authority.root, version=2, authorities=(other.certificate, authority.ca.certificate), chain=()
    )
    root = sign_root(draft, authority.root_signers, previous=authority.root)
    machine.coordinator.root, machine.coordinator.ca = root, other
    await machine.keeper.renew()
    assert machine.roots == [root]
    assert machine.store.current()[1].authorities == root.authorities
    assert load_machine_state(machine.folder).root == root
    machine.coordinator.root, machine.coordinator.ca = authority.root, authority.ca
    with refused("ROOT_ROLLBACK"):
        await machine.keeper.renew()
    assert machine.store.current()[0] == 1


def other_key(machine: Machine) -> Any:
    leaf = LeafKey()
    der = machine.coordinator.ca.issue(leaf.csr(), PEER, lifetime=LIFETIME, now=machine.clock())
    return {"spoil": lambda answer: setattr(answer, "certificate_chain", to_pem(der))}


def spoilt(field: str, value: bytes) -> Callable[[Machine], dict[str, Any]]:
    return lambda machine: {"spoil": lambda answer: setattr(answer, field, value)}


def stranger(machine: Machine) -> Any:
    return {"ca": ClusterCA.create(machine.folder.parent / "stranger", "demo", now=machine.clock())}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_key, "BAD_CERTIFICATE"),
        (lambda machine: {"peer": PeerIdentity("demo", Role.MEMBER, "two")}, "BAD_CERTIFICATE"),
        (lambda machine: {"peer": PeerIdentity("demo", Role.GATEWAY, "one")}, "BAD_CERTIFICATE"),
        (lambda machine: {"peer": PeerIdentity("other", Role.MEMBER, "one")}, "BAD_CERTIFICATE"),
        (stranger, "NOT_ISSUED_HERE"),
        (lambda machine: {"clock": lambda: machine.clock() - 10 * LIFETIME}, "CERTIFICATE_EXPIRED"),
        (spoilt("certificate_chain", b""), "BAD_PROOF"),
        (spoilt("certificate_chain", b"junk"), "BAD_CERTIFICATE"),
        (spoilt("root_metadata", b""), "ROOT_CHAIN_LENGTH"),
        (spoilt("root_metadata", b"\x00\x00\x00\x01x"), "ENVELOPE_MALFORMED"),
        (lambda machine: {"refusal": PermissionDenied("out", reason="NOT_ENROLLED")}, "NOT_ENROLLED"),
    ],
)
async def test_what_does_not_hold_changes_nothing(
    machine: Machine, change: Callable[[Machine], dict[str, Any]], reason: str
) -> None:
    for name, value in change(machine).items():
        setattr(machine.coordinator, name, value)
    with refused(reason):
        await machine.keeper.renew()
    assert machine.unchanged()


async def test_a_file_that_cannot_be_written_is_an_error_and_the_next_renewal_works(machine: Machine) -> None:
    certificate = machine.folder / "tls.pem"
    kept = certificate.rename(machine.folder / "kept.pem")
    certificate.mkdir()
    with refused("STATE_UNWRITABLE"):
        await machine.keeper.renew()
    certificate.rmdir()
    kept.rename(certificate)
    assert machine.unchanged()
    await machine.keeper.renew()
    assert machine.store.current()[0] == 1


async def test_another_clusters_root_is_refused(machine: Machine, make_authority: Any) -> None:
    other = make_authority()
    machine.coordinator.root, machine.coordinator.ca = other.root, other.ca
    with refused("ROOT_PIN"):
        await machine.keeper.renew()
    assert machine.unchanged()


class Sleeper:
    """Turns the clock by what the keeper sleeps, and stops it at the end of the time it was given."""

    def __init__(self, machine: Machine, seconds: float) -> None:
        self.clock = machine.clock
        self.ends = machine.clock() + seconds

    async def __call__(self, seconds: float) -> None:
        if self.clock() + seconds > self.ends:
            raise asyncio.CancelledError
        self.clock.advance(seconds)


async def run_for(machine: Machine, seconds: float) -> list[float]:
    """The times at which the keeper asked the coordinator, in seconds since the beginning."""
    start, asked = machine.clock(), []
    keeper, renew = machine.keeper, machine.keeper.renew

    async def noting() -> None:
        asked.append(machine.clock() - start)
        await renew()

    keeper.renew = noting  # type: ignore[method-assign]
    machine.sleeper = Sleeper(machine, seconds)
    with contextlib.suppress(asyncio.CancelledError):
        await keeper.run()
    keeper.renew = renew  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("lifetime", [300.0, LIFETIME, 86400.0])
async def test_it_renews_at_half_of_what_the_certificate_says(machine: Machine, lifetime: float) -> None:
    machine.issue(lifetime)
    asked = await run_for(machine, lifetime / 2 + 60)
    assert asked == [lifetime / 2]
    assert machine.store.current()[0] == 2


async def test_what_fails_is_tried_again_and_oftener_once_the_certificate_has_ended(machine: Machine) -> None:
    machine.issue(300)
    machine.coordinator.refusal = Unauthenticated("not now")
    machine.by_identity = Unavailable("not here")
    asked = await run_for(machine, 310)
    assert asked == [150, 180, 210, 240, 270, 300, 302, 304, 306, 308, 310]
    assert machine.answered_by == ["mtls"] * 5 + ["identity"] * 6


async def test_what_was_issued_by_clocks_ahead_is_renewed_by_identity_once_they_are_right(
    machine: Machine,
) -> None:
    """Nobody would believe it until then, for hours or days: not even a coordinator that renews."""
    machine.clock.advance(86400.0)
    machine.issue(86400.0)
    machine.clock.advance(-86400.0)
    machine.by_identity = Unavailable("not here")
    assert await run_for(machine, 4) == [0, 2, 4]
    machine.by_identity = None
    assert await run_for(machine, 60) == [0]
    assert set(machine.answered_by) == {"identity"}
    assert expires_at(machine.store.current()[1].certificate) == machine.clock() - 60 + LIFETIME


async def test_who_was_thrown_out_hears_it_signed_and_ends(machine: Machine) -> None:
    machine.clock.advance(3 * LIFETIME)
    machine.coordinator.refused = machine.coordinator.signer.public_key
    with refused("REMOVED", PermissionDenied):
        await machine.keeper.run()
    assert machine.unchanged()


@pytest.mark.parametrize("wrong", ["another key", "another request", "no proof", "another signer"])
async def test_a_refusal_that_is_not_proved_stops_nobody(machine: Machine, wrong: str) -> None:
    def spoil(answer: membership_pb2.RenewResponse) -> None:
        if wrong == "another request":
            said = refusal(b"an earlier one", machine.coordinator.signer.public_key)
            answer.proof = by_roster_keys(machine.coordinator.signers, Label.RENEWAL)(said)
        elif wrong == "no proof":
            answer.proof = b"x"

    machine.coordinator.refused = machine.coordinator.signer.public_key
    machine.coordinator.spoil = spoil
    if wrong == "another key":
        machine.coordinator.refused = SoftwareSigner.generate().public_key
    elif wrong == "another signer":
        machine.coordinator.signers = [Ed25519Signer.generate()]
    machine.clock.advance(3 * LIFETIME)
    with refused("BAD_PROOF"):
        await machine.keeper.renew()
    assert len(await run_for(machine, 10)) == 6, "it asks again every 2 s"


async def test_what_has_ended_renews_by_identity(machine: Machine) -> None:
    machine.clock.advance(3 * LIFETIME)
    await machine.keeper.renew()
    assert machine.answered_by == ["identity"]
    assert expires_at(machine.store.current()[1].certificate) == machine.clock() + LIFETIME
    assert load_machine_state(machine.folder).tls == machine.store.current()[1]
    machine.clock.advance(LIFETIME / 2)
    await machine.keeper.renew()
    assert machine.answered_by == ["identity", "mtls"]


async def test_an_answer_to_a_renewal_by_identity_is_verified_alike(machine: Machine) -> None:
    machine.clock.advance(3 * LIFETIME)
    machine.coordinator.peer = PeerIdentity("demo", Role.MEMBER, "two")
    with refused("BAD_CERTIFICATE"):
        await machine.keeper.renew()
    assert machine.store.current()[0] == 0


async def test_two_renewals_come_one_after_the_other(machine: Machine) -> None:
    await asyncio.gather(machine.keeper.renew(), machine.keeper.renew())
    assert machine.store.current()[0] == 2
    stored = load_machine_state(machine.folder)
    assert stored.tls == machine.store.current()[1]
