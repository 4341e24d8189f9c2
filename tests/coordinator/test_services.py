"""Watching gateways, renewed certificates, hellos that do not hold, rosters that renew themselves."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc.aio
import pytest
from patience import until
from prooftest import identity, introduce

from sealring.coordinator.services.certificates import RENEWALS_AT_ONCE
from sealring.mesh.clock import wall_clock
from sealring.mesh.crypto import Ed25519Signer, Label, SoftwareSigner
from sealring.mesh.errors import ConfigError, SealringError
from sealring.mesh.member import (
    IDENTITY_KEY,
    CallerProof,
    Connection,
    HeldRoster,
    MachineState,
    Purpose,
    load_machine_state,
    parse_pem_leaf,
)
from sealring.mesh.pki import (
    LeafKey,
    Role,
    RootMetadata,
    TlsMaterial,
    check_issued_by,
    cosign_root,
    decode_chain,
    draft_root,
    encode_chain,
    expires_at,
    follow_root,
    key_hash,
    load_certificate,
    verify_root_chain,
)
from sealring.mesh.roster import Roster, check_roster
from sealring.mesh.rpc import PROTOCOL_VERSION, Lease, from_rpc_error, to_problem
from sealring.v1 import admin_pb2, membership_pb2, membership_pb2_grpc, proof_pb2
from tests.coordinator.conftest import Cluster, FakeNode, channel_to


class Watcher:
    """A gateway that watches for real."""

    def __init__(self, cluster: Cluster, material: TlsMaterial, signer: SoftwareSigner) -> None:
        self.root = cluster.coordinator.keys.root
        self.channel = channel_to(cluster.coordinator.main_address(), material)
        self.call = membership_pb2_grpc.SchedulingStub(self.channel).Follow()
        self.material = material
        self.identity = identity(signer, cluster.settings.cluster)

    async def start(self, **options: Any) -> Watcher:
        request, certificate = membership_pb2.FollowRequest, self.material.certificate
        self.proof = await introduce(self.call, request, self.identity, certificate, Purpose.WATCH, **options)
        return self

    async def next(self, kind: str) -> Any:
        """The next event of a kind."""
        async with asyncio.timeout(200):
            while True:
                event: Any = await self.call.read()
                assert event is not grpc.aio.EOF
                if event.WhichOneof("event") == kind:
                    return getattr(event, kind)

    async def roster(self) -> Roster:
        return check_roster((await self.next("roster")).envelope, self.root, now=wall_clock())

    async def phase(self, phase: int) -> membership_pb2.RingState:
        while True:
            state: membership_pb2.RingState = await self.next("ring")
            if state.phase == phase:
                return state

    async def error(self) -> SealringError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(200):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
        return from_rpc_error(caught.value)

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


def gate_key(cluster: Cluster) -> SoftwareSigner:
    return SoftwareSigner.load(cluster.folder / "gate" / IDENTITY_KEY)


@pytest.fixture
async def watcher(cluster: Cluster) -> Any:
    joined = await cluster.join("gate", role=Role.GATEWAY)
    watching = await Watcher(cluster, joined.state.tls, gate_key(cluster)).start()
    yield watching
    await watching.close()


def create(**spec: Any) -> admin_pb2.CreateDeploymentRequest:
    return admin_pb2.CreateDeploymentRequest(
        spec=admin_pb2.DeploymentSpec(**({"name": "demo", "model": "demo"} | spec))
    )


async def test_a_gateway_sees_roster_and_rings_come_and_go(cluster: Cluster, watcher: Watcher) -> None:
    first = await watcher.roster()
    assert len(first.gateways) == 1
    await cluster.node("alpha")
    assert len((await watcher.roster()).members) == 1
    plan = (await cluster.call("CreateDeployment", create(max_rows=3, prefill_chunk=64))).plan
    state = await watcher.phase(membership_pb2.RING_PHASE_FORMING)
    assert state.epoch == 1
    state = await watcher.phase(membership_pb2.RING_PHASE_SERVING)
    assert (state.ring, state.deployment, state.epoch) == ("demo-0", "demo", 1)
    assert (state.max_rows, state.prefill_chunk, state.model_type) == (3, 64, "llama")
    assert state.context == plan.spec.context == 512
    node = cluster.nodes[0]
    await node.send(goodbye=membership_pb2.Goodbye(reason="off"))
    assert (await watcher.phase(membership_pb2.RING_PHASE_DOWN)).reason == "alpha is offline"
    await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="demo"))
    assert (await watcher.next("gone")).ring == "demo-0"


async def test_a_late_gateway_sees_what_there_is(cluster: Cluster) -> None:
    await cluster.node("alpha")
    await cluster.call("CreateDeployment", create())
    joined = await cluster.join("gate", role=Role.GATEWAY)
    watching = await Watcher(cluster, joined.state.tls, gate_key(cluster)).start()
    assert len((await watching.roster()).rings) == 1
    await watching.phase(membership_pb2.RING_PHASE_SERVING)
    await watching.close()


@pytest.mark.parametrize("proven", [False, True])
async def test_a_stream_that_says_nothing_ends_with_its_members_eviction(
    cluster: Cluster, proven: bool
) -> None:
    """It has not said hello, nor perhaps who it is, and would have ten seconds to do so."""
    await cluster.join("alpha")
    node = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
    call = membership_pb2_grpc.MembershipStub(node.channel).Session()
    if proven:
        await node.prove(call)
    async with asyncio.timeout(200):
        await until(lambda: cluster.coordinator.sessions.waiting)
        await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=node.id))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while not (await call.read()).HasField("goodbye"):
                pass
            await call.done_writing()
            await call.read()
    assert from_rpc_error(caught.value).reason == "NOT_ENROLLED"
    assert not cluster.coordinator.sessions.waiting
    await node.channel.close()


async def trouble(cluster: Cluster) -> str:
    """What the list of nodes says of the only one."""
    (node,) = (await cluster.call("ListNodes", admin_pb2.ListNodesRequest())).nodes
    return str(node.trouble)


async def test_what_keeps_a_node_from_coming_online_is_told(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    assert await trouble(cluster) == ""

    async def attempt(**first: Any) -> SealringError:
        again = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
        call = membership_pb2_grpc.MembershipStub(again.channel).Session()
        await again.prove(call)
        await call.write(membership_pb2.MemberMessage(**first))
        while not (await call.read()).HasField("goodbye"):
            pass
        for _ in range(20):
            await call.write(membership_pb2.MemberMessage(heartbeat=membership_pb2.Heartbeat()))
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        await again.channel.close()
        return from_rpc_error(caught.value)

    broken = ConfigError("the installed package has no version", reason="BROKEN_INSTALLATION")
    assert (await attempt(trouble=to_problem(broken))).reason == "BROKEN_INSTALLATION"
    assert "has no version" in await trouble(cluster)
    assert cluster.coordinator.sessions.find(node.id) is not None, "who is online stays so"


NEWER = proof_pb2.Release(software="99.0.0", protocol=PROTOCOL_VERSION + 1)


async def test_a_node_of_another_release_is_refused_and_told_which(cluster: Cluster) -> None:
    await cluster.join("alpha")
    node = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
    call = membership_pb2_grpc.MembershipStub(node.channel).Session()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.prove(call, release=NEWER)
    error = from_rpc_error(caught.value)
    assert error.reason == "INCOMPATIBLE_VERSION"
    assert f"runs sealring 99.0.0 (protocol {NEWER.protocol}) and the coordinator runs" in error.message
    assert error.hint.startswith("update the coordinator;")
    assert await trouble(cluster) == str(error)
    await node.channel.close()


async def test_a_gateway_of_another_release_is_refused_and_listed_so(cluster: Cluster) -> None:
    joined = await cluster.join("gate", role=Role.GATEWAY)
    watching = Watcher(cluster, joined.state.tls, gate_key(cluster))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watching.start(release=proof_pb2.Release(software="0.0.1"))
    error = from_rpc_error(caught.value)
    assert error.reason == "INCOMPATIBLE_VERSION"
    assert error.hint.startswith(f"update gateway {joined.state.peer.id};")
    (gateway,) = (await cluster.call("ListNodes", admin_pb2.ListNodesRequest())).gateways
    assert gateway.trouble == str(error)
    await watching.close()


async def test_an_identity_that_is_used_twice_is_told_to_the_second_and_in_status(cluster: Cluster) -> None:
    first = await cluster.node("alpha")
    second = await cluster.node("alpha", join=False)
    await first.wait_closed()
    returning = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
    returning.instance = first.instance
    call = membership_pb2_grpc.MembershipStub(returning.channel).Session()
    await returning.prove(call)
    await call.write(membership_pb2.MemberMessage(hello=returning.hello()))
    assert await end_of(call) == "IDENTITY_IN_USE"
    assert "in use twice" in await trouble(cluster)
    held = cluster.coordinator.sessions.find(second.id)
    assert held is not None
    assert held.instance == second.instance, "the two do not push each other out for ever"
    await returning.channel.close()
    await second.stop()
    async with asyncio.timeout(200):
        while cluster.coordinator.sessions.find(second.id) is not None:
            await cluster.coordinator.sessions.next_beat()
    third = await cluster.node("alpha", join=False, instance=first.instance)
    assert third.roster.version, "once the other is gone it comes back"


async def test_who_does_not_prove_itself_gets_no_stream(cluster: Cluster) -> None:
    """Neither a session nor a watch, whatever comes in the proof's place."""
    await cluster.join("alpha")
    await cluster.join("gate", role=Role.GATEWAY)
    for name, follow in (("alpha", False), ("gate", True)):
        state = load_machine_state(cluster.folder / name)
        async with channel_to(cluster.coordinator.main_address(), state.tls) as channel:
            stub = membership_pb2_grpc.SchedulingStub(channel)
            purpose = Purpose.WATCH if follow else Purpose.SESSION
            own = Connection(purpose, "test", state.peer.id, "", key_hash(state.tls.certificate))
            for offers in (False, True):
                method = stub.Follow if follow else membership_pb2_grpc.MembershipStub(channel).Session
                request = membership_pb2.FollowRequest if follow else membership_pb2.MemberMessage
                call = method()
                if offers:
                    await call.write(request(offer=CallerProof(own, HeldRoster()).offer))
                    assert (await call.read()).HasField("proof")
                await call.write(request())
                assert await end_of(call) in ("NO_PROOF", "BAD_PROOF")


async def test_an_evicted_gateway_is_cut_off(cluster: Cluster, watcher: Watcher) -> None:
    roster = await watcher.roster()
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=roster.gateways[0].id))
    assert (await watcher.error()).reason == "EVICTED"
    assert cluster.coordinator.store.members.all(Role.GATEWAY) == []


async def test_watches_end_when_the_coordinator_stops(cluster: Cluster, watcher: Watcher) -> None:
    await watcher.roster()
    stopping = asyncio.create_task(cluster.close())
    async with asyncio.timeout(200):
        while await watcher.call.read() is not grpc.aio.EOF:
            pass
    await stopping


async def renew(cluster: Cluster, name: str, csr: bytes, signature: bytes) -> Any:
    from sealring.mesh.member import load_machine_state

    state = load_machine_state(cluster.folder / name)
    async with channel_to(cluster.coordinator.main_address(), state.tls) as channel:
        stub = membership_pb2_grpc.CertificatesStub(channel)
        try:
            return await stub.Renew(membership_pb2.RenewRequest(csr=csr, signature=signature), timeout=200)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


async def test_a_certificate_is_renewed_for_the_callers_own_identity(cluster: Cluster) -> None:
    joined = await cluster.join("alpha")
    signer = SoftwareSigner.load(cluster.folder / "alpha" / IDENTITY_KEY)
    leaf = LeafKey()
    csr = leaf.csr()
    answer = await renew(cluster, "alpha", csr, signer.sign(Label.CSR, csr))
    new = load_certificate(parse_pem_leaf(answer.certificate_chain))
    old = load_certificate(joined.state.tls.certificate)
    assert new.serial_number != old.serial_number
    assert new.extensions[0].value == old.extensions[0].value
    material = TlsMaterial(
        leaf.private_pem(), parse_pem_leaf(answer.certificate_chain), joined.state.tls.authorities
    )
    node = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
    await node.channel.close()
    node.channel = channel_to(cluster.coordinator.main_address(), material)
    node.state = dataclasses.replace(node.state, tls=material)
    cluster.nodes.append(node)
    await node.start()


async def test_a_renewal_needs_the_identity_keys_signature(cluster: Cluster) -> None:
    await cluster.join("alpha")
    signer = SoftwareSigner.load(cluster.folder / "alpha" / IDENTITY_KEY)
    csr, other = LeafKey().csr(), LeafKey().csr()
    good = signer.sign(Label.CSR, csr)
    for request, signature in (
        (csr, SoftwareSigner.generate().sign(Label.CSR, csr)),
        (csr, signer.sign(Label.JOIN, csr)),
        (other, good),
        (b"", good),
        (b"x" * 5000, good),
    ):
        with pytest.raises(SealringError) as caught:
            await renew(cluster, "alpha", request, signature)
        assert caught.value.reason in ("BAD_SIGNATURE", "BAD_CSR")


async def test_renewals_have_a_rate_for_each_member(cluster: Cluster) -> None:
    """Also those with a wrong signature."""
    for name in ("alpha", "beta"):
        await cluster.join(name)
    csr = LeafKey().csr()
    reasons: list[str] = []
    while "RATE_LIMITED" not in reasons:
        with pytest.raises(SealringError) as caught:
            await renew(cluster, "alpha", csr, SoftwareSigner.generate().sign(Label.CSR, csr))
        reasons.append(caught.value.reason)
    assert reasons.index("RATE_LIMITED") >= RENEWALS_AT_ONCE
    assert caught.value.hint
    own = SoftwareSigner.load(cluster.folder / "beta" / IDENTITY_KEY)
    assert (await renew(cluster, "beta", csr, own.sign(Label.CSR, csr))).certificate_chain


async def test_the_operator_has_no_identity_key_to_renew_with(cluster: Cluster) -> None:
    from sealring.mesh.member import load_machine_state

    state = load_machine_state(cluster.settings.state_dir / "operator")
    async with channel_to(cluster.coordinator.main_address(), state.tls) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await membership_pb2_grpc.CertificatesStub(channel).Renew(
                membership_pb2.RenewRequest(), timeout=100
            )
    assert from_rpc_error(caught.value).reason == "WRONG_ROLE"


async def end_of(call: Any) -> str:
    """Why a stream is refused on which nothing more is said."""
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return from_rpc_error(caught.value).reason


async def test_a_bad_hello_is_refused(cluster: Cluster) -> None:
    await cluster.join("alpha")
    before = cluster.coordinator.publisher.current.version
    for spoilt, reason in (
        ({}, "BAD_HELLO"),
        ({"heartbeat": membership_pb2.Heartbeat()}, "BAD_HELLO"),
        ({"hello": membership_pb2.Hello(software_version="1")}, "BAD_ADDRESS"),
    ):
        node = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
        call = membership_pb2_grpc.MembershipStub(node.channel).Session()
        await node.prove(call)
        await call.write(membership_pb2.MemberMessage(**spoilt))
        assert await end_of(call) == reason
        await node.channel.close()
    assert cluster.coordinator.publisher.current.version == before


async def test_a_bad_message_ends_the_session(cluster: Cluster) -> None:
    await cluster.join("alpha")
    for message, reason in (
        ({"heartbeat": membership_pb2.Heartbeat(memory_usable=1 << 60)}, "BAD_HEARTBEAT"),
        ({"hello": membership_pb2.Hello()}, "BAD_MESSAGE"),
        ({"roster_seen": membership_pb2.RosterSeen(version=1, hash=bytes(32))}, "ROSTER_EQUIVOCATION"),
        ({"roster_seen": membership_pb2.RosterSeen(version=999)}, "ROSTER_EQUIVOCATION"),
    ):
        node = await cluster.node("alpha", join=False)
        await node.send(**message)
        assert await node.ended_with() == reason


async def test_who_is_refused_may_go_on_writing_and_reads_why_but_is_not_heard(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    node.parts = node.beating = False
    await node.send(hello=membership_pb2.Hello())
    await node.wait_for("goodbye")
    for _ in range(20):
        await node.send(roster_seen=membership_pb2.RosterSeen(version=999))
    await node.part()
    assert await node.ended_with() == "BAD_MESSAGE"
    entries = cluster.coordinator.store.audit.entries(after=0, limit=100)
    assert "roster_equivocation" not in [entry.action for entry in entries]


async def test_an_error_of_our_own_ends_one_session_and_no_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, other = await cluster.node("alpha"), await cluster.node("beta")

    def broken(*_: object) -> None:
        raise RuntimeError("of our own")

    monkeypatch.setattr(cluster.coordinator.driver, "reported", broken)
    await node.send(progress=membership_pb2.EpochProgress(ring="no", epoch=1))
    assert (await node.wait_for("goodbye")).reason == "an internal error"
    assert cluster.coordinator.sessions.find(other.id) is not None


@pytest.mark.parametrize("ahead", [-0.6, 0.6], ids=["past half of its life", "made by a clock ahead"])
async def test_certificates_of_the_server_rotate_without_dropping_a_stream(
    start_cluster: Any, ahead: float
) -> None:
    """One that a clock ahead has made would not be believed until then."""
    cluster = await start_cluster()
    node = await cluster.node("alpha")
    coordinator, settings = cluster.coordinator, cluster.settings
    first = coordinator.tls.current()[1].certificate
    coordinator.rotate_certificates()
    assert coordinator.tls.current()[1].certificate == first
    lifetime = settings.certificate_lifetime
    made = wall_clock() + ahead * lifetime
    material = coordinator.keys.server_material(settings.hosts(), lifetime=lifetime, now=made)
    coordinator.tls.replace(material)
    coordinator.rotate_certificates()
    assert coordinator.tls.current()[1].certificate != material.certificate
    await cluster.join("beta")
    assert cluster.coordinator.sessions.find(node.id) is not None


async def test_rosters_stay_in_one_chain_over_restarts(cluster: Cluster, start_cluster: Any) -> None:
    joined = await cluster.join("alpha")
    version, digest = joined.roster.version, joined.roster.hash
    await cluster.close()
    again = await start_cluster()
    node = await again.node("alpha", join=False)
    found = again.coordinator.store.rosters.find(version)
    assert found is not None
    assert found.hash == digest
    assert node.roster.version > version
    assert dataclasses.replace(node.roster, version=version).version == version


async def test_a_rotated_root_is_followed_from_the_old_pin(cluster: Cluster, start_cluster: Any) -> None:
    """Offline root keys take over; a member that knows the first root only follows the chain."""
    joined = await cluster.join("alpha")
    await cluster.close()
    folder = cluster.settings.state_dir
    first = cluster.coordinator.keys.root
    old = Ed25519Signer.load(folder / "root.key")
    new = [Ed25519Signer.generate() for _ in range(3)]
    draft = dataclasses.replace(
        first, version=2, root_keys=tuple(one.public_key for one in new), root_threshold=2, chain=()
    )
    envelope = draft_root(draft)
    for signer in (old, *new[:2]):
        envelope = cosign_root(envelope, signer)
    second = follow_root(envelope, first)
    (folder / "root.dsse").write_bytes(encode_chain(second.chain))
    (folder / "root.key").unlink()
    again = await start_cluster()
    signer = SoftwareSigner.load(cluster.folder / "alpha" / IDENTITY_KEY)
    csr = LeafKey().csr()
    answer = await renew(again, "alpha", csr, signer.sign(Label.CSR, csr))
    chain = decode_chain(answer.root_metadata)
    root = verify_root_chain(chain, joined.state.root_sha256, now=wall_clock())
    assert (root.version, root.root_threshold) == (2, 2)
    assert load_machine_state(folder / "operator").root == root
    current = check_roster(again.coordinator.publisher.current.envelope, root, now=wall_clock())
    assert (current.root_version, current.version > joined.roster.version) == (2, True)
    await again.join("beta")


async def test_members_follow_a_root_that_was_extended(
    cluster: Cluster, start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that know only the first one are let in, and learn the next."""
    joined = await cluster.join("alpha")
    await cluster.close()
    monkeypatch.setattr(RootMetadata, "ends", property(lambda root: float(root.issued)))
    again = await start_cluster()
    assert again.coordinator.keys.root.version == 2
    assert again.coordinator.keys.ca.certificate not in joined.state.root.authorities
    signer = SoftwareSigner.load(cluster.folder / "alpha" / IDENTITY_KEY)
    csr = LeafKey().csr()
    answer = await renew(again, "alpha", csr, signer.sign(Label.CSR, csr))
    chain = decode_chain(answer.root_metadata)
    root = verify_root_chain(chain, joined.state.root_sha256, now=wall_clock())
    assert root == again.coordinator.keys.root
    certificate = load_certificate(parse_pem_leaf(answer.certificate_chain))
    assert check_issued_by(certificate, root.authorities, now=wall_clock()) == joined.state.peer
    entries = again.coordinator.store.audit.entries(after=0, limit=100)
    assert [one.details["version"] for one in entries if one.action == "extend_root"] == ["2"]


@pytest.fixture
def lease_ends(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the streams that are open would end, whenever that changes."""
    ends: list[float] = []
    extend = Lease.extend

    def noting(lease: Lease, until: float) -> None:
        extend(lease, until)
        ends.append(lease.ends)

    monkeypatch.setattr(Lease, "extend", noting)
    return ends


def later(cluster: Cluster, state: MachineState) -> bytes:
    """A certificate for the same machine that ends a minute after the one that it has."""
    left = expires_at(state.tls.certificate) - wall_clock()
    return cluster.coordinator.keys.ca.issue(
        LeafKey().csr(), state.peer, lifetime=left + 60, now=wall_clock()
    )


async def test_a_session_outlives_the_certificate_that_it_was_opened_with(
    cluster: Cluster, lease_ends: list[float]
) -> None:
    node = await cluster.node("alpha")
    certificate = later(cluster, node.state)
    sign = identity(node.signer, "test").sign
    await node.send(renewal=await node.proof.renew(certificate, sign))
    await node.send(hello=node.hello())  # no second one is allowed: by then the renewal was taken
    assert (await node.ended_with(), lease_ends[-1]) == ("BAD_MESSAGE", expires_at(certificate))


async def test_a_session_ends_with_a_proof_that_does_not_hold(
    cluster: Cluster, lease_ends: list[float]
) -> None:
    node = await cluster.node("alpha")
    before = lease_ends[-1]
    sign = identity(SoftwareSigner.generate(), "test").sign
    await node.send(renewal=await node.proof.renew(later(cluster, node.state), sign))
    assert (await node.ended_with(), lease_ends[-1]) == ("BAD_PROOF", before)


async def test_a_gateway_says_what_keeps_it_from_its_work(cluster: Cluster) -> None:
    joined = await cluster.join("gateway", role=Role.GATEWAY)
    signer = SoftwareSigner.load(cluster.folder / "gateway" / IDENTITY_KEY)
    watcher = await Watcher(cluster, joined.state.tls, signer).start()
    for problem in (membership_pb2.Problem(message="no space", reason="FULL"), membership_pb2.Problem()):
        await watcher.call.write(membership_pb2.FollowRequest(trouble=problem))
        async with asyncio.timeout(200):
            while True:
                (gateway,) = (await cluster.call("ListNodes", admin_pb2.ListNodesRequest())).gateways
                if gateway.watching and bool(gateway.trouble) == bool(problem.message):
                    break
        assert gateway.trouble == problem.message
    watcher.call.cancel()
    await watcher.channel.close()


@pytest.mark.parametrize("honest", [True, False])
async def test_a_watch_outlives_its_certificate_by_a_proof_alone(
    cluster: Cluster, lease_ends: list[float], honest: bool
) -> None:
    joined = await cluster.join("gateway", role=Role.GATEWAY)
    signer = SoftwareSigner.load(cluster.folder / "gateway" / IDENTITY_KEY)
    watcher = await Watcher(cluster, joined.state.tls, signer).start()
    await watcher.roster()
    certificate, before = later(cluster, joined.state), lease_ends[-1]
    sign = identity(signer if honest else SoftwareSigner.generate(), "test").sign
    renewal = await watcher.proof.renew(certificate, sign)
    await watcher.call.write(membership_pb2.FollowRequest(renewal=renewal))
    if honest:
        await watcher.call.write(membership_pb2.FollowRequest(offer=watcher.proof.offer))
    error = await watcher.error()
    assert error.reason == ("BAD_MESSAGE" if honest else "BAD_PROOF")
    assert lease_ends[-1] == (expires_at(certificate) if honest else before)
