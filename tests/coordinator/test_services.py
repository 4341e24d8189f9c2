"""Watching gateways, renewed certificates, hellos that do not hold, rosters that renew themselves."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from prooftest import identity, introduce

from mesh.certificates import LeafKey, Role, load_certificate
from mesh.clock import wall_clock
from mesh.dsse import Ed25519Signer
from mesh.errors import SealringError
from mesh.identity import Label, SoftwareSigner
from mesh.memberstate import IDENTITY_KEY, parse_pem_leaf
from mesh.proof import Purpose
from mesh.rootmeta import (
    cosign_root,
    decode_chain,
    draft_root,
    encode_chain,
    follow_root,
    verify_root_chain,
)
from mesh.roster import Roster
from mesh.roster_reader import check_roster
from mesh.rpc import from_rpc_error
from mesh.tls import TlsMaterial
from sealring.v1 import admin_pb2, membership_pb2, membership_pb2_grpc

if TYPE_CHECKING:
    from tests.coordinator.conftest import Cluster


class Watcher:
    """A gateway that watches for real."""

    def __init__(self, cluster: Cluster, material: TlsMaterial, signer: SoftwareSigner) -> None:
        from tests.coordinator.conftest import channel_to

        self.root = cluster.coordinator.keys.root
        self.channel = channel_to(cluster.coordinator.main_address(), material)
        self.call = membership_pb2_grpc.SchedulingStub(self.channel).Follow()
        self.material = material
        self.identity = identity(signer, cluster.settings.cluster)

    async def start(self) -> Watcher:
        request, certificate = membership_pb2.FollowRequest, self.material.certificate
        await introduce(self.call, request, self.identity, certificate, Purpose.WATCH)
        return self

    async def next(self, kind: str) -> Any:
        """The next event of a kind."""
        async with asyncio.timeout(10):
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
            async with asyncio.timeout(5):
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
    assert (await watcher.phase(membership_pb2.RING_PHASE_DOWN)).reason == "a member is offline"
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


async def test_a_stream_that_says_nothing_ends_with_its_members_eviction(cluster: Cluster) -> None:
    """It has not even said hello, and would have ten seconds to do so."""
    from tests.coordinator.conftest import FakeNode

    await cluster.join("alpha")
    node = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
    call = membership_pb2_grpc.MembershipStub(node.channel).Session()
    async with asyncio.timeout(5):
        while not cluster.coordinator.sessions._arriving:
            await asyncio.sleep(0.01)
        await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=node.id))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert from_rpc_error(caught.value).reason == "NOT_ENROLLED"
    assert not cluster.coordinator.sessions._arriving
    await node.channel.close()


async def test_an_evicted_gateway_is_cut_off(cluster: Cluster, watcher: Watcher) -> None:
    roster = await watcher.roster()
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=roster.gateways[0].id))
    assert (await watcher.error()).reason == "EVICTED"
    assert cluster.coordinator.store.members.all(Role.GATEWAY) == []


async def test_watches_end_when_the_coordinator_stops(cluster: Cluster, watcher: Watcher) -> None:
    await watcher.roster()
    stopping = asyncio.create_task(cluster.close())
    async with asyncio.timeout(10):
        while await watcher.call.read() is not grpc.aio.EOF:
            pass
    await stopping


async def renew(cluster: Cluster, name: str, csr: bytes, signature: bytes) -> Any:
    from mesh.memberstate import load_member_state
    from tests.coordinator.conftest import channel_to

    state = load_member_state(cluster.folder / name)
    async with channel_to(cluster.coordinator.main_address(), state.tls) as channel:
        stub = membership_pb2_grpc.CertificatesStub(channel)
        try:
            return await stub.Renew(membership_pb2.RenewRequest(csr=csr, signature=signature), timeout=5)
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
    from tests.coordinator.conftest import FakeNode

    node = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
    await node.channel.close()
    from tests.coordinator.conftest import channel_to

    node.channel = channel_to(cluster.coordinator.main_address(), material)
    node.state = dataclasses.replace(node.state, tls=material)
    cluster.nodes.append(node)
    await node.start()


@pytest.mark.parametrize("how", ["other key", "other label", "other request", "empty", "too long"])
async def test_a_renewal_needs_the_identity_keys_signature(cluster: Cluster, how: str) -> None:
    await cluster.join("alpha")
    signer = SoftwareSigner.load(cluster.folder / "alpha" / IDENTITY_KEY)
    csr = LeafKey().csr()
    signature = signer.sign(Label.CSR, csr)
    if how == "other key":
        signature = SoftwareSigner.generate().sign(Label.CSR, csr)
    elif how == "other label":
        signature = signer.sign(Label.JOIN, csr)
    elif how == "other request":
        csr = LeafKey().csr()
    else:
        csr = b"" if how == "empty" else b"x" * 5000
    with pytest.raises(SealringError) as caught:
        await renew(cluster, "alpha", csr, signature)
    assert caught.value.reason in ("BAD_SIGNATURE", "BAD_CSR")


async def test_the_operator_has_no_identity_key_to_renew_with(cluster: Cluster) -> None:
    from mesh.memberstate import load_member_state
    from tests.coordinator.conftest import channel_to

    state = load_member_state(cluster.settings.state_dir / "operator")
    async with channel_to(cluster.coordinator.main_address(), state.tls) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await membership_pb2_grpc.CertificatesStub(channel).Renew(
                membership_pb2.RenewRequest(), timeout=5
            )
    assert from_rpc_error(caught.value).reason == "WRONG_ROLE"


async def hello_error(cluster: Cluster, spoil: Any) -> str:
    from tests.coordinator.conftest import FakeNode

    node = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
    call = membership_pb2_grpc.MembershipStub(node.channel).Session()
    message = membership_pb2.MemberMessage(hello=node.hello())
    spoil(message)
    await node.prove(call)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.write(message)
        await call.read()
    await node.channel.close()
    return from_rpc_error(caught.value).reason


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda message: message.Clear(), "BAD_HELLO"),
        (lambda message: message.heartbeat.SetInParent(), "BAD_HELLO"),
        (lambda message: message.hello.ClearField("software_version"), "BAD_HELLO"),
        (lambda message: setattr(message.hello, "software_version", "x" * 65), "BAD_HELLO"),
        (lambda message: message.hello.ClearField("addresses"), "BAD_ADDRESS"),
        (lambda message: setattr(message.hello, "sealing_key", bytes(32)), "SEALING_KEY_SIGNATURE"),
        (lambda message: message.hello.ClearField("sealing_key_signature"), "SEALING_KEY_SIGNATURE"),
        (lambda message: setattr(message.hello, "roster_version", 1000), "COORDINATOR_ROLLED_BACK"),
    ],
)
async def test_a_bad_hello_is_refused(cluster: Cluster, spoil: Any, reason: str) -> None:
    await cluster.join("alpha")
    before = cluster.coordinator.authority.current.version
    assert await hello_error(cluster, spoil) == reason
    assert cluster.coordinator.authority.current.version == before


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"heartbeat": membership_pb2.Heartbeat(memory_usable=1 << 60)}, "BAD_HEARTBEAT"),
        ({"hello": membership_pb2.Hello()}, "BAD_MESSAGE"),
        ({"roster_seen": membership_pb2.RosterSeen(version=1, hash=bytes(32))}, "ROSTER_EQUIVOCATION"),
        ({"roster_seen": membership_pb2.RosterSeen(version=999)}, "ROSTER_EQUIVOCATION"),
    ],
)
async def test_a_bad_message_ends_the_session(cluster: Cluster, message: Any, reason: str) -> None:
    node = await cluster.node("alpha")
    await node.send(**message)
    error = await node.wait_closed()
    assert error is not None
    assert error.reason == reason


async def test_messages_about_unknown_rings_and_questions_are_dropped(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await node.send(roster_seen=membership_pb2.RosterSeen(version=node.roster.version, hash=node.roster.hash))
    for message in (
        {"fault": membership_pb2.EpochFault(ring="no", epoch=1)},
        {"up": membership_pb2.EpochUp(ring="no", epoch=1)},
        {"prepared": membership_pb2.EpochPrepared(ring="no", epoch=1)},
        {"progress": membership_pb2.EpochProgress(ring="no", epoch=1)},
        {"profile": membership_pb2.ProfileResult(id=77)},
    ):
        await node.send(**message)
    await cluster.call("CreateDeployment", create())
    await node.wait_for("commit")


async def test_the_newest_session_of_a_member_wins(cluster: Cluster) -> None:
    older = await cluster.node("alpha")
    older.beating = False
    newer = await cluster.node("alpha", join=False)
    await older.wait_closed()
    goodbye = await older.wait_for("goodbye")
    assert "newer" in goodbye.reason
    await cluster.call("CreateDeployment", create())
    await newer.wait_for("commit")


async def test_a_new_sealing_key_is_in_the_next_roster(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    assert node.roster.member(node.id).sealing_key == node.sealing_key
    again = await cluster.node("alpha", join=False)
    assert again.sealing_key != node.sealing_key
    assert again.roster.member(node.id).sealing_key == again.sealing_key


async def test_rosters_renew_themselves_in_one_chain(start_cluster: Any) -> None:
    cluster = await start_cluster(roster_lifetime=4)
    try:
        node = await cluster.node("alpha")
        first = node.roster
        async with asyncio.timeout(20):
            while node.reader.current.version < first.version + 2:
                await asyncio.sleep(0.1)
        assert node.reader.current.issued > first.issued
    finally:
        await cluster.close()


async def test_certificates_of_the_server_rotate_without_dropping_a_stream(start_cluster: Any) -> None:
    cluster = await start_cluster(certificate_lifetime=4)
    try:
        node = await cluster.node("alpha")
        first = cluster.coordinator.tls.current()[1].certificate
        async with asyncio.timeout(20):
            while cluster.coordinator.tls.current()[1].certificate == first:
                await asyncio.sleep(0.1)
        await cluster.join("beta")
        assert cluster.coordinator.sessions.find(node.id) is not None
    finally:
        await cluster.close()


async def test_rosters_stay_in_one_chain_over_restarts(cluster: Cluster, start_cluster: Any) -> None:
    joined = await cluster.join("alpha")
    version, digest = joined.roster.version, joined.roster.hash
    await cluster.close()
    again = await start_cluster()
    try:
        node = await again.node("alpha", join=False)
        found = again.coordinator.store.rosters.find(version)
        assert found is not None
        assert found.hash == digest
        assert node.roster.version > version
        assert dataclasses.replace(node.roster, version=version).version == version
    finally:
        await again.close()


async def test_an_equivocation_stands_once_in_the_audit_log(cluster: Cluster) -> None:
    await cluster.join("alpha")
    for _ in range(3):
        node = await cluster.node("alpha", join=False)
        await node.send(roster_seen=membership_pb2.RosterSeen(version=1, hash=bytes(32)))
        error = await node.wait_closed()
        assert error is not None
        assert error.reason == "ROSTER_EQUIVOCATION"
    entries = cluster.coordinator.store.audit.entries(after=0, limit=100)
    assert [entry.action for entry in entries].count("roster_equivocation") == 1


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
    try:
        signer = SoftwareSigner.load(cluster.folder / "alpha" / IDENTITY_KEY)
        csr = LeafKey().csr()
        answer = await renew(again, "alpha", csr, signer.sign(Label.CSR, csr))
        chain = decode_chain(answer.root_metadata)
        root = verify_root_chain(chain, joined.state.root_sha256, now=wall_clock())
        assert (root.version, root.root_threshold) == (2, 2)
        current = check_roster(again.coordinator.authority.current.envelope, root, now=wall_clock())
        assert (current.root_version, current.version > joined.roster.version) == (2, True)
        await again.join("beta")
    finally:
        await again.close()
