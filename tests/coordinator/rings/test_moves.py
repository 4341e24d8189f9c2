"""Rings whose members go for good: moved to the nodes that are there, or waiting for what they lack."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sealring.coordinator.rings.moves import Moves
from sealring.coordinator.rings.pace import READINGS
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.errors import SealringError
from sealring.v1 import admin_pb2, membership_pb2
from tests.coordinator.rings.test_rings import DOWN, SERVING, deploy, ring_state, three

if TYPE_CHECKING:
    from tests.coordinator.conftest import Cluster, FakeNode

QUICK = {"replace_after": 1.0}
TIGHT = 13_000
"""Bytes, of which three nodes hold the model at its whole context, and two do not."""


async def members(cluster: Cluster) -> set[str]:
    """The names of who is planned to be in the ring."""
    answer = await cluster.call("ListDeployments", admin_pb2.ListDeploymentsRequest())
    return {stage.member_name for stage in answer.deployments[0].plan.rings[0].stages}


async def says(cluster: Cluster, phase: int, *words: str) -> str:
    """The ring's reason once all the words are in it."""
    while True:
        reason = str((await ring_state(cluster, phase)).reason)
        if all(word in reason for word in words):
            return reason


async def leave(node: FakeNode) -> None:
    await node.send(goodbye=membership_pb2.Goodbye(reason="off"))
    await node.wait_closed()
    await node.stop()


async def test_an_evicted_member_is_cut_off_and_its_ring_moves(cluster: Cluster) -> None:
    nodes = await three(cluster)
    spare = await cluster.node("spare")
    plan = await deploy(cluster)
    serving = {stage.member for stage in plan.rings[0].stages}
    everyone = [*nodes, spare]
    leaving = next(node for node in everyone if node.id in serving)
    replacement = next(node for node in everyone if node.id not in serving)
    await ring_state(cluster, SERVING)
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=leaving.id))
    error = await leaving.wait_closed()
    assert error is not None
    assert error.reason == "EVICTED"
    await ring_state(cluster, SERVING, epoch=2)
    assert replacement.roster.ring("demo-0").member(replacement.id)
    assert leaving.id in {one.id for one in replacement.roster.revoked}


async def test_who_is_away_for_long_is_replaced(start_cluster: Any) -> None:
    cluster = await start_cluster(**QUICK)
    try:
        nodes = await three(cluster)
        await deploy(cluster)
        await ring_state(cluster, SERVING)
        await cluster.node("spare")
        await leave(nodes[1])
        await ring_state(cluster, SERVING, epoch=2)
        assert await members(cluster) == {"alpha", "gamma", "spare"}
        entry = cluster.coordinator.store.audit.entries(after=0, limit=100)[-1]
        assert (entry.action, entry.details["leaving"]) == ("move_ring", nodes[1].id)
    finally:
        await cluster.close()


async def test_who_has_become_slow_is_replaced_once_nobody_uses_the_ring(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await start_cluster(**QUICK)
    try:
        nodes = await three(cluster)
        for node in nodes:
            node.step_us, node.busy = 1000, True
        await deploy(cluster)
        await ring_state(cluster, SERVING)
        await beaten(nodes, 2 * READINGS)
        spare = await cluster.node("spare")
        nodes[1].step_us = 5000
        while cluster.coordinator.rings.slow("demo-0") != {nodes[1].id}:
            await beaten(nodes, 1)
        await beaten([spare], 15)  # longer than the time after which an idle ring is quiet
        assert await members(cluster) == {"alpha", "beta", "gamma"}, "it is in use"
        moves = cluster.coordinator.moves
        (deployment,) = cluster.coordinator.store.deployments.all()
        asked = admin_pb2.DeploymentSpec()
        asked.CopyFrom(deployment.asked)
        asked.members.extend(node.id for node in nodes)
        pinned = dataclasses.replace(deployment, asked=asked)
        with monkeypatch.context() as quiet:
            quiet.setattr(moves, "_is_quiet", lambda ring, now: True)
            found = [moves._slow(one, one.plan.rings[0], 0.0) for one in (deployment, pinned)]
        assert found == [{nodes[1].id}, set()]
        nodes[0].busy = nodes[1].busy = nodes[2].busy = False
        while await members(cluster) != {"alpha", "gamma", "spare"}:
            await beaten([spare], 1)
        await ring_state(cluster, SERVING, epoch=2)
        entry = cluster.coordinator.store.audit.entries(after=0, limit=100)[-1]
        assert (entry.action, entry.details["leaving"]) == ("move_ring", nodes[1].id)
    finally:
        await cluster.close()


async def beaten(nodes: list[FakeNode], times: int) -> None:
    """Waits until each of them has sent so many more heartbeats."""
    until = {node: node.beats + times for node in nodes}
    while any(node.beats < beats for node, beats in until.items()):
        await asyncio.sleep(0.02)


async def test_fewer_nodes_take_over_until_there_are_as_many_again(start_cluster: Any) -> None:
    cluster = await start_cluster(**QUICK)
    try:
        nodes = await three(cluster)
        await deploy(cluster)
        await ring_state(cluster, SERVING)
        for node in nodes:
            node.busy = True
        await leave(nodes[0])
        await ring_state(cluster, SERVING, epoch=2)
        fewer = await members(cluster)
        assert fewer <= {"beta", "gamma"}
        await cluster.node("alpha", join=False)
        for node in nodes:
            node.busy = False
        while await members(cluster) != {"alpha", "beta", "gamma"}:
            pass
        await ring_state(cluster, SERVING, epoch=3)
    finally:
        await cluster.close()


async def test_a_model_that_does_not_fit_any_more_waits_for_another_node(start_cluster: Any) -> None:
    cluster = await start_cluster(**QUICK)
    try:
        nodes = [await cluster.node(name, memory=TIGHT) for name in ("alpha", "beta", "gamma")]
        await deploy(cluster, context=256)
        await ring_state(cluster, SERVING)
        await leave(nodes[2])
        await says(
            cluster, DOWN, "gamma is offline; others could not take over: the model needs", "nodes have"
        )
        await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=nodes[2].id))
        await says(cluster, DOWN, "gamma was evicted; others could not take over")
        assert cluster.coordinator.rings.obstacles("another-0") == {}
        told = [one.ring for one in cluster.coordinator.rings.snapshot() if one.HasField("ring")]
        assert [(one.phase, one.deployment) for one in told] == [(DOWN, "demo")], (
            "for gateways that start now"
        )
        await cluster.node("spare", memory=TIGHT)
        assert (await ring_state(cluster, SERVING, epoch=2)).reason == ""
        assert await members(cluster) == {"alpha", "beta", "spare"}
    finally:
        await cluster.close()


async def test_what_was_asked_for_by_hand_is_kept(start_cluster: Any) -> None:
    """The nodes, or the layers; with both the ring waits for its members."""
    cluster = await start_cluster(**QUICK)
    try:
        nodes = await three(cluster)
        await cluster.node("spare")
        ids = [node.id for node in nodes]
        await deploy(cluster, stages=0, split=[4, 3, 2], members=ids)
        await ring_state(cluster, SERVING)
        await leave(nodes[1])
        await says(cluster, DOWN, "beta is offline; others could not take over: node beta cannot serve")
        await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="demo"))
        nodes[1] = await cluster.node("beta", join=False)
        for kept, left in (({"members": ids}, {"alpha", "gamma"}), ({"split": [4, 3, 2]}, None)):
            await deploy(cluster, **{"stages": 0 if "split" in kept else 3, **kept})
            epoch = (await ring_state(cluster, SERVING)).epoch
            before = await members(cluster)
            gone = nodes[1] if "beta" in before else nodes[0]
            await leave(gone)
            await ring_state(cluster, SERVING, epoch=epoch + 1)
            now = await members(cluster)
            if left is None:
                assert now == {"alpha", "beta", "gamma", "spare"} - {gone.name}
            else:
                assert now <= left
            await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="demo"))
            nodes[nodes.index(gone)] = await cluster.node(gone.name, join=False)
    finally:
        await cluster.close()


async def test_a_drained_member_hands_all_its_rings_over_to_a_free_one(cluster: Cluster) -> None:
    await three(cluster)
    plan = await deploy(cluster)
    leaving = (await deploy(cluster, name="small", stages=1)).rings[0].stages[0].member
    spare = await cluster.node("spare")
    for number in (0, 1):
        await ring_state(cluster, SERVING, deployment=number)
    await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=leaving))
    for number in (0, 1):
        await ring_state(cluster, SERVING, epoch=2, deployment=number)
    answer = await cluster.call("ListDeployments", admin_pb2.ListDeploymentsRequest())
    large, small = ([one.member for one in made.plan.rings[0].stages] for made in answer.deployments)
    assert leaving not in {*large, *small}
    assert spare.id in large
    assert answer.deployments[0].plan.plan_hash != plan.plan_hash


async def test_draining_without_a_substitute_stops_the_ring_until_it_is_undone(cluster: Cluster) -> None:
    nodes = [await cluster.node(name, memory=TIGHT) for name in ("alpha", "beta", "gamma")]
    await deploy(cluster, context=256)
    await ring_state(cluster, SERVING)
    await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=nodes[0].id))
    await says(cluster, DOWN, "alpha is draining; others could not take over")
    with pytest.raises(SealringError, match="draining"):
        await deploy(cluster, name="other", members=[nodes[0].id], stages=1)
    await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=nodes[0].id, undo=True))
    await ring_state(cluster, SERVING, epoch=2)


async def test_a_coordinator_that_is_restarted_in_a_drain_goes_on_with_it(start_cluster: Any) -> None:
    """The ring is not touched before it is idle; a drain that is over is not begun again."""
    cluster = await start_cluster()
    nodes = [*await three(cluster), await cluster.node("spare")]
    plan = await deploy(cluster)
    await ring_state(cluster, SERVING)
    ids = [stage.member for stage in plan.rings[0].stages]
    nodes.sort(key=lambda node: (node.id not in ids, ids.index(node.id) if node.id in ids else 0))
    leaving = nodes[1]
    leaving.busy = True
    sessions = cluster.coordinator.sessions
    while (session := sessions.find(leaving.id)) is None or session.idle:
        await sessions.next_beat()
    await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=leaving.id))
    await cluster.close()
    again = await start_cluster()
    try:
        back = [await again.back(node) for node in nodes]
        sessions = again.coordinator.sessions
        while (session := sessions.find(leaving.id)) is None or not session.steps or session.idle:
            await sessions.next_beat()
        status = await ring_state(again, SERVING)
        assert (status.epoch, again.coordinator.moves._drains.keys()) == (1, {leaving.id})
        assert not any(one.HasField("end") for node in back for one in node.messages)
        back[1].busy = False
        await ring_state(again, SERVING, epoch=2)
        assert leaving.name not in await members(again)
        assert again.coordinator.store.members.get(leaving.id).draining == 1
    finally:
        await again.close()


# When a move is due, without a cluster

RING = admin_pb2.RingPlan(
    ring="r-0", stages=[admin_pb2.StagePlan(member="a"), admin_pb2.StagePlan(member="b")]
)


class Scene:
    """A planned ring of which `awaited` members are away, and the moves that were begun for it."""

    def __init__(self, *, stages: int = 0) -> None:
        self.begun: list[set[str]] = []
        self.awaited: list[str] = []
        self.obstacles: dict[str, str] = {}
        self.sessions = {name: SimpleNamespace(idle={"r-0"}) for name in "abc"}
        self.free = frozenset("c")
        asked = admin_pb2.DeploymentSpec(stages=stages)
        deployment = SimpleNamespace(name="r", asked=asked)
        rings: Any = SimpleNamespace(
            planned=[(deployment, RING)],
            awaited=lambda ring: self.awaited,
            obstacles=lambda ring: self.obstacles,
            slow=lambda ring: frozenset(),
            offline=lambda member: None,
        )
        unused: Any = None
        survey: Any = SimpleNamespace(free=lambda ring: self.free, able=lambda deployment, ring: self.free)
        settings = CoordinatorSettings(replace_after=30)
        sessions: Any = self
        self.moves = Moves(unused, unused, sessions, survey, rings, unused, settings, clock=lambda: 0.0)
        self.moves._spawn = self._begin  # type: ignore[method-assign,assignment]

    def __iter__(self) -> Any:
        return iter(self.sessions.values())

    def find(self, member: str) -> Any:
        return self.sessions.get(member)

    def _begin(self, move: Any) -> None:
        self.begun.append(move.cr_frame.f_locals["lost"])
        move.close()

    def look(self, *times: float) -> int:
        for now in times:
            self.moves.look(now)
        return len(self.begun)


def test_who_is_away_is_given_time_and_who_was_removed_is_not() -> None:
    scene = Scene()
    scene.awaited = ["a"]
    assert scene.look(0, 29.9) == 0
    scene.awaited = []
    assert scene.look(30) == 0
    scene.awaited = ["a"]
    assert scene.look(40, 69.9) == 0
    scene.obstacles = {"b": "was evicted"}
    assert scene.look(69.9) == 1
    assert scene.begun == [{"b"}]


def test_nobody_is_away_while_the_coordinator_hears_of_no_node() -> None:
    scene = Scene()
    scene.awaited = ["a", "b"]
    scene.sessions = {}
    assert scene.look(0, 100) == 0
    scene.sessions = {"c": SimpleNamespace(idle=set())}
    assert scene.look(101, 130.9) == 0
    assert scene.look(131) == 1


def test_a_move_is_tried_again_when_other_nodes_are_there_and_from_time_to_time() -> None:
    scene = Scene()
    scene.obstacles = {"a": "was evicted"}
    assert scene.look(0, 1, 59) == 1
    assert scene.look(60, 61) == 2
    scene.free = frozenset("cd")
    assert scene.look(62, 63) == 3


def test_a_ring_grows_when_it_was_quiet_for_long_and_there_are_nodes() -> None:
    scene = Scene(stages=3)
    scene.free = frozenset("ab")
    assert scene.look(0, 31) == 0
    scene.free = frozenset("abc")
    scene.sessions["b"].idle = set()
    assert scene.look(32) == 0
    scene.sessions["b"].idle = {"r-0"}
    assert scene.look(33, 62.9) == 0
    assert scene.look(63, 64) == 1
    assert Scene(stages=2).look(0, 31) == 0


def moves(**parts: Any) -> Any:
    made: Any = Moves.__new__(Moves)
    for name, part in {"_tasks": set(), "_drains": {}, **parts}.items():
        setattr(made, name, part)
    return made


async def test_a_drain_that_a_stop_interrupts_is_not_over() -> None:
    """The next run of the coordinator resumes it."""
    over: list[str] = []
    moving = asyncio.Event()

    async def move(*_: Any) -> None:
        moving.set()
        await asyncio.Event().wait()

    made = moves(
        _rings=SimpleNamespace(keep_serving=lambda *_: None),
        _clock=lambda: 0.0,
        _idle=lambda member: True,
        _rings_of=lambda member: [("demo", "demo-0")],
        _move=move,
        _over=over.append,
    )
    made._begin_drain("a", 600.0)
    async with asyncio.timeout(200):
        await moving.wait()
    await made.close()
    assert (over, made._tasks) == ([], set())


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("split", [[], [4, 5]])
def test_a_ring_is_planned_anew_as_it_was_asked_for(pipeline: bool, split: list[int]) -> None:
    """With what clients were promised, and as a pipeline where it has become one."""
    asked = admin_pb2.DeploymentSpec(
        name="demo", strategy="tensor", backend="ring", clear_links=True, or_pipeline=True
    )
    asked.replicas, asked.members[:], asked.split[:] = 2, ["a", "b"], split
    plan = admin_pb2.DeploymentPlan(spec={"context": 512, "max_rows": 8})
    deployment: Any = SimpleNamespace(asked=asked, plan=plan)
    made = moves(_survey=SimpleNamespace(check=lambda spec: spec))
    spec = made._spec(deployment, ["c", "d"], pipeline=pipeline)
    assert (spec.strategy, spec.backend) == (("pipeline", "") if pipeline else ("tensor", "ring"))
    assert spec.clear_links == spec.or_pipeline == (not pipeline)
    assert (spec.replicas, spec.context, spec.max_rows) == (1, 512, 8)
    assert list(spec.members) == (["c", "d"] if split else ["a", "b"])
    assert (asked.strategy, asked.replicas) == ("tensor", 2), "which itself stays as it was"
