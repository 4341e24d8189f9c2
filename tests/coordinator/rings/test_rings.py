"""Rings end to end: real servers, real mTLS, nodes that speak the protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from patience import until

from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import EpochEnded, SealringError
from sealring.mesh.member import IDENTITY_KEY
from sealring.mesh.pki import Role
from sealring.mesh.rpc import protocol, to_problem
from sealring.v1 import admin_pb2, membership_pb2, proof_pb2
from tests.coordinator.conftest import DOWN, SERVING, Cluster, FakeNode, deploy, ring_state
from tests.coordinator.test_services import Watcher


async def three(cluster: Cluster) -> list[FakeNode]:
    return [await cluster.node(name) for name in ("alpha", "beta", "gamma")]


async def test_three_members_form_a_ring(cluster: Cluster) -> None:
    nodes = await three(cluster)
    plan = await deploy(cluster, speculate=True)
    assert [(stage.first_layer, stage.end_layer) for stage in plan.rings[0].stages] == [
        (0, 3),
        (3, 6),
        (6, 9),
    ]
    status = await ring_state(cluster, SERVING)
    assert status.epoch == 1
    assert [(link.from_rank, link.to_rank, link.suite) for link in status.links] == [(0, 1, "test")]
    for node in nodes:
        prepare = await node.wait_for("prepare")
        kinds = [message.WhichOneof("message") for message in node.messages]
        assert kinds.index("prepare") < kinds.index("commit")
        ring = node.roster.ring("demo-0")
        assert prepare.roster_version <= node.roster.version
        assert prepare.model_digest == ring.model_digest.hex() == "ab" * 32
        assert (prepare.max_rows, prepare.speculate) == (plan.spec.max_rows, True)
        assert prepare.kv_budget > 0
        assert ring.min_trust == node.roster.min_trust == 10


async def test_a_tensor_ring_whose_group_does_not_come_up_becomes_a_pipeline_and_others_stay(
    cluster: Cluster,
) -> None:
    """Also if the other rank, which lost its peer, reports first, and the next epoch has begun by then."""
    nodes = {one.id: one for one in [await cluster.node(f"node-{number}") for number in range(4)]}
    asked = {"strategy": "tensor", "clear_links": True, "or_pipeline": True, "replicas": 2}
    for node in nodes.values():
        node.commits = False
    plan = await deploy(cluster, stages=2, **asked)
    assert [(stage.first_layer, stage.end_layer) for stage in plan.rings[0].stages] == [(0, 9), (0, 9)]
    stays, first, second = (
        nodes[plan.rings[1].stages[0].member],
        *(nodes[one.member] for one in plan.rings[0].stages),
    )
    lost = membership_pb2.Problem(reason="PEER_LOST", message="the peer is gone")
    problem = membership_pb2.Problem(reason="NO_GROUP", message="no RDMA")
    for epoch in (1, 2):
        prepare = await first.wait_for("prepare", lambda one, epoch=epoch: one.epoch == epoch)
        assert prepare.backend == "ring"
        assert first.roster.ring("demo-0").clear_links
        commit = await first.wait_for("commit", lambda one, epoch=epoch: one.epoch == epoch)
        assert list(commit.group_addresses) == ["10.0.0.1:7000"] * 2
        await second.send(fault=membership_pb2.EpochFault(ring="demo-0", epoch=epoch, problem=lost))
        await first.wait_for("prepare", lambda one, epoch=epoch: one.epoch == epoch + 1)
        await first.send(fault=membership_pb2.EpochFault(ring="demo-0", epoch=epoch, problem=problem))
    await first.wait_for("roster", lambda _: not first.roster.ring("demo-0").clear_links)
    for node in nodes.values():
        node.commits = True
    await ring_state(cluster, SERVING, epoch=4)
    assert [one.prepare.backend for one in first.messages if one.HasField("prepare")] == ["ring"] * 3 + [""]
    assert first.roster.ring("demo-1").clear_links
    assert {one.prepare.epoch for one in stays.messages if one.HasField("prepare")} == {1}
    answer = await cluster.call("ListDeployments", admin_pb2.ListDeploymentsRequest())
    made = answer.deployments[0].plan
    assert [ring.pipeline for ring in made.rings] == [True, False]
    assert [stage.end_layer for stage in made.rings[0].stages] == [5, 9]
    assert "no RDMA" in made.reasons[-1]


@pytest.mark.parametrize("address", ["", "a b:1"])
async def test_an_address_that_is_none_is_passed_on_to_nobody(cluster: Cluster, address: str) -> None:
    nodes = [await cluster.node(name, commit=False) for name in ("alpha", "beta")]
    nodes[1].group_address = address
    await deploy(cluster, stages=2, strategy="tensor", clear_links=True)
    end = await nodes[0].wait_for("end")
    assert end.reason == "beta: it names no address for its group"
    assert not any(one.HasField("commit") for node in nodes for one in node.messages)


async def test_a_deployment_is_called_what_the_contract_promises(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    for name in ("Qwen2.5", "org/Model_7B.v1", "A" * 128):
        plan = await deploy(cluster, name=name, stages=1)
        await ring_state(cluster, SERVING)
        ring = node.roster.ring(plan.rings[0].ring)
        assert (ring.deployment, ring.replica) == (name, 0)
        await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name=name))


async def test_a_fault_ends_the_epoch_everywhere_and_the_next_forms(cluster: Cluster) -> None:
    nodes = await three(cluster)
    await deploy(cluster)
    await ring_state(cluster, SERVING)
    problem = membership_pb2.Problem(reason="CARRIER_DIED", message="the carrier died")
    await nodes[1].send(fault=membership_pb2.EpochFault(ring="demo-0", epoch=1, problem=problem))
    for node in nodes:
        end = await node.wait_for("end", lambda end: end.epoch == 1)
        assert "the carrier died" in end.reason
        assert not end.unload
    status = await ring_state(cluster, SERVING, epoch=2)
    assert status.epoch == 2


async def test_a_silent_member_is_offline(start_cluster: Any) -> None:
    cluster = await start_cluster(heartbeat_timeout=1.0)
    node = await cluster.node("alpha")
    node.beating = False
    assert await node.ended_with() == "SILENT"
    answer = await cluster.call("ListNodes", admin_pb2.ListNodesRequest())
    assert answer.nodes[0].state == admin_pb2.NODE_STATE_OFFLINE


async def test_a_serving_ring_outlives_a_stream_that_comes_back(cluster: Cluster) -> None:
    nodes = await three(cluster)
    await deploy(cluster)
    await ring_state(cluster, SERVING)
    nodes[0].beating = False
    await nodes[0].stop()
    again = await cluster.back(nodes[0])
    again.memory += 1
    await again.beat()
    session = cluster.coordinator.sessions.find(again.id)
    await until(lambda: session.heartbeat and session.heartbeat.memory_usable == again.memory)
    assert (await ring_state(cluster, SERVING)).epoch == 1
    assert not [one for node in (again, nodes[1]) for one in node.messages if one.HasField("end")]
    for reported, unload in (({"demo-0": 7}, False), ({"gone-0": 1}, True)):
        rings = [membership_pb2.RingHealth(ring=name, epoch=epoch) for name, epoch in reported.items()]
        session.heartbeat = None
        cluster.coordinator.driver.beaten(session, membership_pb2.Heartbeat(rings=rings))
        end = await again.wait_for("end", lambda end, told=reported: {end.ring: end.epoch} == told)
        assert (end.reason, end.unload) == ("the epoch is over", unload)


async def test_status_names_the_culprit_and_not_who_noticed_first(cluster: Cluster) -> None:
    _, beta, gamma = await three(cluster)
    await deploy(cluster)
    await ring_state(cluster, SERVING)
    beta.prepares = False

    async def report(node: FakeNode, problem: SealringError) -> None:
        await node.send(fault=membership_pb2.EpochFault(ring="demo-0", epoch=1, problem=to_problem(problem)))
        await beta.wait_for("end")

    await report(gamma, EpochEnded("the connection to a neighbour was lost", reason="PEER_LOST"))
    await report(beta, EpochEnded("the engine process ended", reason="CHILD_ENDED"))
    status = await ring_state(cluster, membership_pb2.RING_PHASE_FORMING, epoch=2)
    while status.reason.startswith("gamma"):
        await asyncio.sleep(0.05)
        status = await ring_state(cluster, membership_pb2.RING_PHASE_FORMING, epoch=2)
    assert status.reason == "beta: the engine process ended"


async def test_an_epoch_number_is_never_used_twice_even_after_a_restart(
    cluster: Cluster, start_cluster: Any
) -> None:
    await three(cluster)
    await deploy(cluster)
    await ring_state(cluster, SERVING)
    version = cluster.coordinator.publisher.current.version
    await cluster.close()
    again = await start_cluster()
    assert again.coordinator.publisher.current.version > version
    for name in ("alpha", "beta", "gamma"):
        await again.node(name, join=False)
    assert (await ring_state(again, SERVING)).epoch == 2


async def test_rings_that_outlived_the_coordinator_go_on(cluster: Cluster, start_cluster: Any) -> None:
    """Gateways see none of them before they are known to serve."""
    nodes = await three(cluster)
    await deploy(cluster)
    await deploy(cluster, name="small", stages=2)
    for number in (0, 1):
        await ring_state(cluster, SERVING, deployment=number)
    await cluster.close()
    again = await start_cluster()
    told = [one.WhichOneof("event") for one in again.coordinator.ring_views.snapshot()]
    assert told == ["roster", "model", "model"]
    back = [await again.back(node) for node in nodes]
    for number in (0, 1):
        assert (await ring_state(again, SERVING, deployment=number)).epoch == 1
        assert again.coordinator.ring_views.snapshot()[1 + number].ring.phase == SERVING
    for node in back:
        node.memory += 1
        await until(lambda node=node: usable(again, node) == node.memory)
    assert not [one for node in back for one in node.messages if one.HasField("end")]


async def test_a_ring_of_which_nothing_is_heard_goes_on_when_its_members_are_back(start_cluster: Any) -> None:
    """The coordinator was cut off: they were silent to it, and not to each other."""
    cluster = await start_cluster(heartbeat_timeout=60)
    nodes = await three(cluster)
    await deploy(cluster)
    await ring_state(cluster, SERVING)
    sessions = cluster.coordinator.sessions
    for session in sessions:
        sessions.closed(session)
        session.close("no heartbeat")
    status = await ring_state(cluster, SERVING)
    assert status.reason == "the coordinator hears nothing of alpha, beta, gamma"
    back = [await cluster.back(node) for node in nodes]
    for node in back:
        node.memory += 1
        await until(lambda node=node: usable(cluster, node) == node.memory)
    status = await ring_state(cluster, SERVING)
    assert (status.epoch, status.reason) == (1, "")
    assert not [one for node in back for one in node.messages if one.HasField("end")]


def usable(cluster: Cluster, node: FakeNode) -> int:
    """What the coordinator last heard of the node's memory."""
    session = cluster.coordinator.sessions.find(node.id)
    return session.heartbeat.memory_usable if session and session.heartbeat else 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model_digest": "cd" * 32},
        {"epoch": 7},
        {"roster_hash": bytes(32)},
        None,
    ],
)
async def test_an_epoch_that_would_not_be_prepared_alike_is_ended(
    cluster: Cluster, start_cluster: Any, changes: dict[str, Any] | None
) -> None:
    """As after a restore; None is a member that has lost it."""
    nodes = [await cluster.node("alpha"), await cluster.node("beta")]
    await deploy(cluster, stages=2)
    await ring_state(cluster, SERVING)
    await cluster.close()
    again = await start_cluster()
    for node in nodes[:1] if changes is None else nodes:
        before = node.serving.pop("demo-0")
        node.running.clear()
        if changes is not None:
            node.serving["demo-0"] = overwritten(before, changes)
            node.running["demo-0"] = node.serving["demo-0"].epoch
    back = [await again.back(node) for node in nodes]
    await back[1].wait_for("end")
    assert (await ring_state(again, SERVING, epoch=2)).epoch == 2


def overwritten(prepare: membership_pb2.PrepareEpoch, changes: dict[str, Any]) -> membership_pb2.PrepareEpoch:
    changed = membership_pb2.PrepareEpoch(**changes)
    for field, value in prepare.ListFields():
        if field.name not in changes:
            setattr(changed, field.name, value)
    return changed


async def test_deleting_a_deployment_ends_its_ring_and_frees_its_members(cluster: Cluster) -> None:
    nodes = await three(cluster)
    await deploy(cluster)
    await ring_state(cluster, SERVING)
    await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="demo"))
    for node in nodes:
        assert (await node.wait_for("end")).unload
    await nodes[0].wait_for("roster", lambda _: not nodes[0].roster.rings)
    await deploy(cluster)
    assert (await ring_state(cluster, SERVING)).epoch == 2


async def test_a_drain_that_was_undone_moves_nothing_though_another_begins(cluster: Cluster) -> None:
    """The first drain has asked the spare for its profile when it is taken back."""
    nodes = await three(cluster)
    await deploy(cluster)
    await ring_state(cluster, SERVING)
    leaving, spare = nodes[1], await cluster.node("spare")
    spare.profiles = False

    async def drain(*, undo: bool = False) -> None:
        await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=leaving.id, undo=undo))

    await drain()
    first = await spare.wait_for("profile")
    await drain(undo=True)
    leaving.busy = True
    sessions = cluster.coordinator.sessions
    while (session := sessions.find(leaving.id)) is None or session.idle:
        await sessions.next_beat()
    await drain()
    await spare.tell_profile(first)
    leaving.busy = False
    second = await spare.wait_for("profile", lambda asked: asked.id != first.id)
    assert spare.roster.ring("demo-0").member(leaving.id), "the ring has not moved before it was idle"
    await spare.tell_profile(second)
    await spare.wait_for("roster", lambda _: spare.roster.rings_of(spare.id))


async def test_a_member_that_never_prepares_is_given_up_on(start_cluster: Any) -> None:
    cluster = await start_cluster(prepare_timeout=1.0)
    await cluster.node("alpha")
    stuck = await cluster.node("beta", prepare=False)
    await deploy(cluster, stages=2)
    reason = "preparing took too long: beta did not finish"
    # on a busy machine alpha may have been late in an epoch before
    await stuck.wait_for("end", lambda end: end.reason == reason)
    stuck.prepares = True
    await ring_state(cluster, SERVING, epoch=2)


async def test_a_ring_speaks_what_all_of_its_members_do(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one they are updated; until the older one is, members without a common protocol are named."""
    oldest = protocol.OLDEST_PROTOCOL
    monkeypatch.setattr(protocol, "PROTOCOL_VERSION", oldest + 2)
    cluster = await start_cluster()
    old, new = [await cluster.node(name, speaks=(oldest, oldest + 1)) for name in ("alpha", "beta")]
    await deploy(cluster, stages=2)
    await ring_state(cluster, SERVING)
    assert (await new.wait_for("prepare")).protocol == oldest + 1
    await new.stop()
    new = await cluster.node("beta", join=False, speaks=(oldest + 2, oldest + 2))
    async with asyncio.timeout(200):
        while "they cannot work together" not in (reason := (await ring_state(cluster, DOWN)).reason):
            await asyncio.sleep(0.05)
    assert "node alpha runs sealring test (protocols" in reason
    assert "update node alpha" in reason
    await old.stop()
    old = await cluster.node("alpha", join=False, speaks=(oldest, oldest + 2))
    await ring_state(cluster, SERVING)
    assert (await old.wait_for("prepare")).protocol == oldest + 2


async def test_a_gateway_that_comes_back_is_spoken_to(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it was away the ring was formed of members that are updated, as after a restart of the
    coordinator."""
    oldest = protocol.OLDEST_PROTOCOL
    monkeypatch.setattr(protocol, "PROTOCOL_VERSION", oldest + 1)
    cluster = await start_cluster()
    node = await cluster.node("alpha", speaks=(oldest, oldest + 1))
    await deploy(cluster, stages=1)
    await ring_state(cluster, SERVING, epoch=1)

    async def come(name: str, newest: int) -> Watcher:
        joined = await cluster.join(name, role=Role.GATEWAY)
        signer = SoftwareSigner.load(cluster.folder / name / IDENTITY_KEY)
        release = proof_pb2.Release(software="test", oldest=oldest, protocol=newest)
        return await Watcher(cluster, joined.state.tls, signer).start(release=release)

    gateways = [await come("updated", oldest + 1)]
    watchers, ahead = cluster.coordinator.watchers, oldest + 9
    watchers.add("far ahead", proof_pb2.Release(software="test", oldest=ahead, protocol=ahead))
    cluster.coordinator.driver.gateway_came()  # nothing can be done for it
    watchers.releases.pop("far ahead")
    gateways.append(await come("older", oldest))
    await ring_state(cluster, SERVING, epoch=2)
    gateways.append(await come("also-older", oldest))
    assert (await ring_state(cluster, SERVING)).epoch == 2
    prepared = [one.prepare.protocol for one in node.messages if one.HasField("prepare")]
    assert prepared == [oldest + 1, oldest]
    for gateway in gateways:
        await gateway.close()
