"""Renewal of an mTLS certificate: what comes back is verified before anything is stored or used."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from mesh import certificate_keeper
from mesh.certificate_keeper import CertificateKeeper
from mesh.certificates import ClusterCA, LeafKey, PeerIdentity, Role, expires_at, to_pem
from mesh.errors import PermissionDenied, SealringError, Unauthenticated
from mesh.identity import Label, SoftwareSigner, verify
from mesh.memberstate import MemberState, load_member_state, save_member_state
from mesh.proof import by_roster_keys, renewal
from mesh.rootmeta import RootMetadata, encode_chain, sign_root
from mesh.rpc import Server
from mesh.tls import TlsMaterial, TlsStore
from sealring.v1 import membership_pb2, membership_pb2_grpc

PEER = PeerIdentity("demo", Role.MEMBER, "one")
LIFETIME = 3600.0


class Coordinator(membership_pb2_grpc.CertificatesServicer):
    """Renews as the real one does, unless a test spoils the answer."""

    def __init__(self, authority: Any, clock: Any, signer: SoftwareSigner) -> None:
        self.ca, self.clock, self.signer = authority.ca, clock, signer
        self.roster_signers = authority.roster_signers
        self.root: RootMetadata = authority.root
        self.peer = PEER
        self.asked = 0
        self.error: SealringError | None = None
        self.spoil: Callable[[membership_pb2.RenewResponse], None] = lambda answer: None

    async def Renew(self, request: Any, context: Any) -> membership_pb2.RenewResponse:
        self.asked += 1
        if self.error is not None:
            raise self.error
        verify(self.signer.public_key, Label.CSR, request.csr, request.signature)
        der = self.ca.issue(request.csr, self.peer, lifetime=LIFETIME, now=self.clock())
        answer = membership_pb2.RenewResponse(
            certificate_chain=to_pem(der), root_metadata=encode_chain(self.root.chain)
        )
        self.spoil(answer)
        if not answer.proof:
            said = renewal(request.csr, answer.certificate_chain, answer.root_metadata)
            answer.proof = by_roster_keys(self.roster_signers, Label.RENEWAL)(said)
        return answer


class Machine:
    """An enrolled machine whose keeper asks `coordinator`."""

    def __init__(
        self, folder: Path, authority: Any, clock: Any, coordinator: Coordinator, channel: Any
    ) -> None:
        leaf = LeafKey()
        der = authority.ca.issue(leaf.csr(), PEER, lifetime=LIFETIME, now=clock())
        material = TlsMaterial(leaf.private_pem(), der, authority.root.authorities)
        pin = authority.root.fingerprint
        self.state = MemberState(PEER, "one", "127.0.0.1:1", pin, authority.root, material)
        save_member_state(folder, self.state)
        self.folder, self.clock, self.coordinator = folder, clock, coordinator
        self.store = TlsStore(material)
        self.roots: list[RootMetadata] = []
        self.keeper = CertificateKeeper(
            folder, self.state, self.store, coordinator.signer, channel, self.roots.append, clock=clock
        )

    def unchanged(self) -> bool:
        stored = load_member_state(self.folder, clock=self.clock)
        return (self.store.current(), stored.tls, stored.root, self.roots) == (
            (0, self.state.tls),
            self.state.tls,
            self.state.root,
            [],
        )


@pytest.fixture
async def machine(tmp_path: Path, authority: Any, clock: Any) -> AsyncIterator[Machine]:
    coordinator = Coordinator(authority, clock, SoftwareSigner.generate())
    server = Server([(membership_pb2_grpc.add_CertificatesServicer_to_server, coordinator, "x")])
    address = f"127.0.0.1:{server.listen('127.0.0.1:0', None)}"
    await server.start()

    class Channel:
        def get(self) -> grpc.aio.Channel:
            return opened

    async with grpc.aio.insecure_channel(address) as opened:
        yield Machine(tmp_path / "state", authority, clock, coordinator, Channel())
    await server.stop(0)


async def test_a_renewed_certificate_is_stored_and_used(machine: Machine) -> None:
    machine.clock.advance(100)
    await machine.keeper.renew()
    generation, material = machine.store.current()
    stored = load_member_state(machine.folder, clock=machine.clock)
    assert (generation, stored.tls) == (1, material)
    assert material.private_key != machine.state.tls.private_key
    assert expires_at(material.certificate) == machine.clock() + LIFETIME
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
    assert load_member_state(machine.folder, clock=machine.clock).root == root
    machine.coordinator.root, machine.coordinator.ca = authority.root, authority.ca
    with pytest.raises(SealringError) as caught:
        await machine.keeper.renew()
    assert caught.value.reason == "ROOT_ROLLBACK"
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
        (spoilt("certificate_chain", b""), "BAD_CERTIFICATE"),
        (spoilt("certificate_chain", b"junk"), "BAD_CERTIFICATE"),
        (spoilt("root_metadata", b""), "ROOT_CHAIN_LENGTH"),
        (spoilt("root_metadata", b"\x00\x00\x00\x01x"), "ENVELOPE_MALFORMED"),
        (lambda machine: {"error": PermissionDenied("out", reason="NOT_ENROLLED")}, "NOT_ENROLLED"),
    ],
)
async def test_what_does_not_hold_changes_nothing(
    machine: Machine, change: Callable[[Machine], dict[str, Any]], reason: str
) -> None:
    for name, value in change(machine).items():
        setattr(machine.coordinator, name, value)
    with pytest.raises(SealringError) as caught:
        await machine.keeper.renew()
    assert caught.value.reason == reason
    assert machine.unchanged()


async def test_a_full_disk_is_told_and_tried_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, material: TlsMaterial) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(certificate_keeper, "save_tls", full)
        with pytest.raises(SealringError) as caught:
            await machine.keeper.renew()
    assert caught.value.reason == "STATE_UNWRITABLE"
    assert machine.unchanged()
    await machine.keeper.renew()
    assert machine.store.current()[0] == 1


async def test_another_clusters_root_is_refused(machine: Machine, make_authority: Any) -> None:
    other = make_authority()
    machine.coordinator.root, machine.coordinator.ca = other.root, other.ca
    with pytest.raises(SealringError) as caught:
        await machine.keeper.renew()
    assert caught.value.reason == "ROOT_PIN"
    assert machine.unchanged()


async def test_it_renews_at_half_life_and_tries_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_keeper, "_LOOK_SECONDS", 0.01)
    running = asyncio.create_task(machine.keeper.run())
    await asyncio.sleep(0.1)
    assert machine.coordinator.asked == 0
    machine.coordinator.error = Unauthenticated("not now")
    machine.clock.advance(LIFETIME / 2)
    async with asyncio.timeout(10):
        while machine.coordinator.asked < 3:
            await asyncio.sleep(0.01)
        assert machine.unchanged()
        machine.coordinator.error = None
        while machine.store.current()[0] == 0:
            await asyncio.sleep(0.01)
    asked = machine.coordinator.asked
    await asyncio.sleep(0.1)
    assert machine.coordinator.asked == asked
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_two_renewals_come_one_after_the_other(machine: Machine) -> None:
    await asyncio.gather(machine.keeper.renew(), machine.keeper.renew())
    assert machine.store.current()[0] == 2
    stored = load_member_state(machine.folder, clock=machine.clock)
    assert stored.tls == machine.store.current()[1]
