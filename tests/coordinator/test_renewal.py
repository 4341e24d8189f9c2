"""Renewal by identity, on the join port: who gets a certificate, and everybody who does not."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import storekit
from expired import expire

from sealring.coordinator.auth.nonces import Nonces
from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.services.certificates import Issuer, RenewalService
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, revocation_of
from sealring.mesh.crypto import Ed25519Signer, Label, SoftwareSigner, member_id
from sealring.mesh.errors import SealringError
from sealring.mesh.member import (
    IDENTITY_KEY,
    CertificateKeeper,
    Coordinators,
    by_roster_keys,
    check_proof,
    load_machine_state,
    of_coordinator,
    parse_pem_leaf,
    refusal,
    renewal_content,
    save_machine_state,
)
from sealring.mesh.member.proof import renewal
from sealring.mesh.pki import (
    LeafKey,
    PeerIdentity,
    Role,
    TlsMaterial,
    certificate_peer,
    expires_at,
    key_hash,
    load_certificate,
    to_pem,
)
from sealring.mesh.rpc import Server, TlsStore, from_rpc_error, joining_channel, server_credentials
from sealring.v1 import admin_pb2, membership_pb2, membership_pb2_grpc

CLUSTER = "test"
OWN_CERTIFICATE_SECONDS = 600


class Caller:
    """The service's view of a caller: an address without a certificate."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host

    def peer(self) -> str:
        return f"ipv4:{self.host}:4711"


@dataclass
class Machine:
    """An identity, and what it asks for unless a test changes it."""

    signer: SoftwareSigner = field(default_factory=SoftwareSigner.generate)
    leaf: LeafKey = field(default_factory=LeafKey)

    @property
    def id(self) -> str:
        return member_id(self.signer.public_key)


class Desk:
    """The service over a real store, with the clocks turned by hand."""

    def __init__(self, folder: Path) -> None:
        self.now = 1_800_000_000.0
        self.monotonic = 0.0
        settings = CoordinatorSettings(state_dir=folder / "coordinator", cluster=CLUSTER)
        init(settings, clock=self.clock)
        self.keys = ClusterKeys.load(settings, now=self.now)
        self.store = Store.open(settings.state_dir)
        self.settings = settings
        self.tls = self.server_material()
        issuer = Issuer(self.keys, settings, clock=self.clock)
        self.service = RenewalService(
            CLUSTER, self.store, issuer, lambda: self.tls.certificate, clock=lambda: self.monotonic
        )

    def clock(self) -> float:
        return self.now

    def server_material(self) -> TlsMaterial:
        return self.keys.server_material(("127.0.0.1",), lifetime=OWN_CERTIFICATE_SECONDS, now=self.now)

    def enrol(self, role: Role = Role.MEMBER) -> Machine:
        machine = Machine()
        key = machine.signer.public_key
        self.store.members.enrol(storekit.changed(storekit.gateway(key, now=self.now), role=role))
        return machine

    async def nonce(self, caller: Caller | None = None) -> bytes:
        answer = await self.service.GetNonce(membership_pb2.GetNonceRequest(), caller or Caller())
        return answer.nonce

    def request(
        self,
        machine: Machine,
        nonce: bytes,
        /,
        *,
        label: Label = Label.CSR_BY_IDENTITY,
        signer: SoftwareSigner | None = None,
        claimed: bytes = b"",
        sent: bytes | None = None,
        **signed: Any,
    ) -> membership_pb2.RenewByIdentityRequest:
        """`signed` replaces what is signed, `signer` who signs it; else what is `claimed` and `sent`."""
        key, own = machine.signer.public_key, sent if sent is not None else machine.leaf.csr()
        content = {
            "cluster": CLUSTER,
            "nonce": nonce,
            "server_key": key_hash(self.tls.certificate),
            "identity_key": key,
            "csr": own,
        }
        signature = (signer or machine.signer).sign(label, renewal_content(**(content | signed)))
        return membership_pb2.RenewByIdentityRequest(
            identity_key=claimed or key, csr=own, nonce=nonce, signature=signature
        )

    async def ask(self, request: Any, caller: Caller | None = None) -> membership_pb2.RenewResponse:
        return await self.service.RenewByIdentity(request, caller or Caller())

    async def refused(self, request: Any) -> str:
        """Why there is no certificate; that somebody is not enrolled is signed."""
        try:
            answer = await self.ask(request)
        except SealringError as error:
            return error.reason
        assert not answer.certificate_chain
        said = refusal(request.csr, request.identity_key)
        check_proof(said, answer.proof, of_coordinator(self.keys.root, Label.RENEWAL))
        return "NOT_ENROLLED"


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.store.close()


@pytest.mark.parametrize("role", [Role.MEMBER, Role.GATEWAY])
async def test_who_is_enrolled_gets_a_certificate_for_its_new_key(desk: Desk, role: Role) -> None:
    machine = desk.enrol(role)
    desk.now += 3 * desk.settings.certificate_lifetime
    request = desk.request(machine, await desk.nonce())
    answer = await desk.ask(request)
    der = parse_pem_leaf(answer.certificate_chain)
    peer = certificate_peer(load_certificate(der))
    assert (peer.cluster, peer.role, peer.id) == (CLUSTER, role, machine.id)
    assert expires_at(der) == desk.now + desk.settings.certificate_lifetime
    said = renewal(request.csr, answer.certificate_chain, answer.root_metadata)
    check_proof(said, answer.proof, of_coordinator(desk.keys.root, Label.RENEWAL))


async def test_an_old_renewal_said_again_is_refused(desk: Desk) -> None:
    request = desk.request(desk.enrol(), await desk.nonce())
    await desk.ask(request)
    assert await desk.refused(request) == "RENEWAL_REFUSED"


async def test_strangers_do_not_make_an_old_renewal_good_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest used nonces are remembered; refused attempts use none up."""
    monkeypatch.setattr(Nonces, "_MAX_USED", 2)
    request = desk.request(desk.enrol(), await desk.nonce())
    await desk.ask(request)
    for _ in range(3):
        assert await desk.refused(desk.request(Machine(), await desk.nonce())) == "NOT_ENROLLED"
    assert await desk.refused(request) == "RENEWAL_REFUSED"


async def test_a_nonce_has_to_be_fresh_and_from_here(desk: Desk) -> None:
    machine = desk.enrol()
    stale = await desk.nonce()
    desk.monotonic += 31
    assert await desk.refused(desk.request(machine, stale)) == "RENEWAL_REFUSED"
    assert await desk.refused(desk.request(machine, bytes(32))) == "RENEWAL_REFUSED"
    assert await desk.refused(desk.request(machine, b"")) == "RENEWAL_REFUSED"


@pytest.mark.parametrize("banned", [False, True])
async def test_who_was_thrown_out_gets_nothing(desk: Desk, banned: bool) -> None:
    machine = desk.enrol()
    member = desk.store.members.get(machine.id)
    desk.store.members.revoke(revocation_of(member, int(desk.now), banned=banned))
    assert await desk.refused(desk.request(machine, await desk.nonce())) == "NOT_ENROLLED"


async def test_a_stranger_learns_nothing_of_who_is_enrolled(desk: Desk) -> None:
    """A stranger gets the same reply for a key that is enrolled, banned or unknown."""
    stranger, enrolled, banned = Machine(), desk.enrol(), desk.enrol()
    member = desk.store.members.get(banned.id)
    desk.store.members.revoke(revocation_of(member, int(desk.now), banned=True))
    heard = set()
    for machine in (enrolled, banned, Machine()):
        request = desk.request(machine, await desk.nonce(), signer=stranger.signer)
        with pytest.raises(SealringError) as caught:
            await desk.ask(request)
        heard.add(str(caught.value))
    assert len(heard) == 1
    assert await desk.refused(desk.request(stranger, await desk.nonce())) == "NOT_ENROLLED"


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": "other"},
        {"nonce": b"\x01" * 32},
        {"server_key": bytes(32)},
        {"identity_key": b"\x04" + bytes(64)},
        {"csr": b"another"},
        {"label": Label.JOIN},
        {"label": Label.CONNECTION},
        {"label": Label.RENEWAL},
        {"claimed": b"\x04" + bytes(64)},
        {"claimed": b"short"},
    ],
    ids=["cluster", "nonce", "server", "identity", "csr", "join", "proof", "root", "point", "short"],
)
async def test_a_signature_over_anything_else_is_refused(desk: Desk, change: dict[str, Any]) -> None:
    machine = desk.enrol()
    assert await desk.refused(desk.request(machine, await desk.nonce(), **change)) == "RENEWAL_REFUSED"


async def test_the_signature_of_a_renewal_over_mtls_is_of_no_use_here(desk: Desk) -> None:
    machine = desk.enrol()
    request = desk.request(machine, await desk.nonce())
    request.signature = machine.signer.sign(Label.CSR, request.csr)
    assert await desk.refused(request) == "RENEWAL_REFUSED"


async def test_a_request_for_the_key_of_a_former_certificate_of_the_coordinator_is_refused(
    desk: Desk,
) -> None:
    """Somebody in between with a certificate of the authority has another key; so has who rotated."""
    request = desk.request(desk.enrol(), await desk.nonce())
    desk.tls = desk.server_material()
    assert await desk.refused(request) == "RENEWAL_REFUSED"


async def test_a_refused_attempt_does_not_use_up_somebody_elses_nonce(desk: Desk) -> None:
    machine, nonce = desk.enrol(), await desk.nonce()
    assert await desk.refused(desk.request(machine, nonce, label=Label.JOIN)) == "RENEWAL_REFUSED"
    await desk.ask(desk.request(machine, nonce))


@pytest.mark.parametrize("csr", [b"", b"junk", b"x" * 4097])
async def test_a_malformed_signing_request_is_refused(desk: Desk, csr: bytes) -> None:
    """Also a signed one."""
    request = desk.request(desk.enrol(), await desk.nonce(), sent=csr)
    assert await desk.refused(request) == "BAD_CSR"


async def test_one_host_gets_only_so_many_attempts(desk: Desk) -> None:
    host, other = Caller("10.0.0.1"), Caller("10.0.0.2")
    for _ in range(200):
        nonce = await desk.nonce(host)
    with pytest.raises(SealringError) as caught:
        await desk.ask(desk.request(desk.enrol(), nonce), host)
    assert caught.value.reason == "RATE_LIMITED"
    await desk.ask(desk.request(desk.enrol(), await desk.nonce(other)), other)


async def keeper_of(folder: Path, join: str = "") -> CertificateKeeper:
    """As a daemon that starts in this folder has it; `join` in the place of the join address on record."""
    state = load_machine_state(folder)
    state = dataclasses.replace(state, join=join or state.join)
    store = TlsStore(state.tls)
    coordinators = Coordinators(state.coordinator, store, tuple, nobody)
    signer = SoftwareSigner.load(folder / IDENTITY_KEY)
    return CertificateKeeper(folder, state, store, signer, coordinators, lambda root: None)


async def nobody() -> list[str]:
    return []


async def reason_of(keeper: CertificateKeeper) -> str:
    with pytest.raises(SealringError) as caught:
        await keeper.renew()
    return caught.value.reason


async def test_a_machine_that_was_off_for_three_lifetimes_comes_back(cluster: Any) -> None:
    await cluster.join("alpha")
    expire(cluster.folder / "alpha", cluster.coordinator.keys.ca)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.node("alpha", join=False)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await (await keeper_of(cluster.folder / "alpha")).renew()
    node = await cluster.node("alpha", join=False)
    assert cluster.coordinator.sessions.find(node.id) is not None


async def test_a_machine_that_was_evicted_meanwhile_does_not(cluster: Any) -> None:
    joined = await cluster.join("alpha")
    expire(cluster.folder / "alpha", cluster.coordinator.keys.ca)
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=joined.state.peer.id))
    before = load_machine_state(cluster.folder / "alpha").tls
    assert await reason_of(await keeper_of(cluster.folder / "alpha")) == "REMOVED"
    assert load_machine_state(cluster.folder / "alpha").tls == before


class InBetween(membership_pb2_grpc.RenewalServicer):
    """Holds the authority's key and stands before the coordinator: passes on, or answers by itself."""

    def __init__(self, cluster: Any, *, answers: bool) -> None:
        self.cluster, self.answers = cluster, answers
        self.heard: list[str] = []
        self.told: list[str] = []
        keys: ClusterKeys = cluster.coordinator.keys
        self.keys = keys
        material = keys.server_material(("127.0.0.1",), lifetime=600, now=time.time())
        self.server = Server([(membership_pb2_grpc.add_RenewalServicer_to_server, self, "x")])
        self.address = f"127.0.0.1:{self.listen(material)}"
        self.upstream = joining_channel(cluster.join_address, keys.root.authorities)
        self.stub = membership_pb2_grpc.RenewalStub(self.upstream)

    def listen(self, material: TlsMaterial) -> int:
        credentials = server_credentials(TlsStore(material), require_client=False)
        return self.server.listen("127.0.0.1:0", credentials)

    async def GetNonce(self, request: Any, context: Any) -> membership_pb2.GetNonceResponse:
        self.heard.append("GetNonce")
        return await self.stub.GetNonce(request)

    async def RenewByIdentity(self, request: Any, context: Any) -> membership_pb2.RenewResponse:
        self.heard.append("RenewByIdentity")
        if not self.answers:
            try:
                return await self.stub.RenewByIdentity(request)
            except grpc.aio.AioRpcError as error:
                self.told.append(from_rpc_error(error).reason)
                raise from_rpc_error(error) from None
        peer = PeerIdentity(self.keys.root.cluster, Role.MEMBER, member_id(request.identity_key))
        certificate = self.keys.ca.issue(request.csr, peer, lifetime=600, now=time.time())
        chain, root = to_pem(certificate), self.keys.root_chain
        thief = by_roster_keys([Ed25519Signer.generate()], Label.RENEWAL)
        return membership_pb2.RenewResponse(
            certificate_chain=chain, root_metadata=root, proof=thief(renewal(request.csr, chain, root))
        )


@pytest.mark.parametrize(("answers", "reason"), [(False, "RENEWAL_REFUSED"), (True, "BAD_PROOF")])
async def test_who_is_on_the_path_with_the_authoritys_key_gets_nothing_through(
    cluster: Any, answers: bool, reason: str
) -> None:
    """The machine's signature names the server key that it was shown: the coordinator refuses it."""
    await cluster.join("alpha")
    folder = cluster.folder / "alpha"
    expire(folder, cluster.coordinator.keys.ca)
    before = load_machine_state(folder).tls
    between = InBetween(cluster, answers=answers)
    await between.server.start()
    try:
        assert await reason_of(await keeper_of(folder, between.address)) == reason
    finally:
        await between.upstream.close()
        await between.server.stop(0)
    assert between.heard == ["GetNonce", "RenewByIdentity"]
    assert between.told == ([] if answers else ["RENEWAL_REFUSED"])
    assert load_machine_state(folder).tls == before


async def test_nothing_is_sent_to_the_coordinator_of_another_root(cluster: Any, tmp_path: Path) -> None:
    await cluster.join("alpha")
    folder = cluster.folder / "alpha"
    expire(folder, cluster.coordinator.keys.ca)
    settings = CoordinatorSettings(state_dir=tmp_path / "other", cluster="test")
    init(settings)
    keys = ClusterKeys.load(settings, now=time.time())
    between = InBetween(cluster, answers=False)
    await between.server.stop(0)
    between.server = Server([(membership_pb2_grpc.add_RenewalServicer_to_server, between, "x")])
    material = keys.server_material(("127.0.0.1",), lifetime=600, now=time.time())
    port = between.listen(material)
    await between.server.start()
    try:
        assert await reason_of(await keeper_of(folder, f"127.0.0.1:{port}")) == "ROOT_PIN"
    finally:
        await between.upstream.close()
        await between.server.stop(0)
    assert between.heard == []


async def test_where_no_join_address_is_on_record_it_says_what_to_do(cluster: Any) -> None:
    await cluster.join("alpha")
    folder = cluster.folder / "alpha"
    expire(folder, cluster.coordinator.keys.ca)
    save_machine_state(folder, dataclasses.replace(load_machine_state(folder), join=""))
    assert await reason_of(await keeper_of(folder)) == "NO_JOIN_ADDRESS"
