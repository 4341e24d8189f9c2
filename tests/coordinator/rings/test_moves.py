"""Rings whose members go for good: moved to the nodes that are there, or waiting for what they lack."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.rings import moves
from sealring.coordinator.rings.actions import Drained, Move
from sealring.coordinator.rings.moves import Moves
from sealring.coordinator.rings.state import Known, State, Wanted
from sealring.coordinator.store import StoredDeployment
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.clock import AwakeClock
from sealring.mesh.errors import SealringError, Unavailable
from sealring.v1 import admin_pb2, membership_pb2
from tests.coordinator.conftest import DOWN, SERVING, Cluster, FakeNode, deploy, ring_state
from tests.coordinator.rings.test_rings import three

QUICK = {"replace_after": 1.0}
TIGHT = 13_000
"""Bytes, of which three nodes hold the model at its whole context, and two do not."""


async def members(cluster: Cluster) -> set[str]:
    """The names of the ring's planned members."""
    answer = await cluster.call("ListDeployments", admin_pb2.ListDeploymentsRequest())
    return {stage.member_name for stage in answer.deployments[0].plan.rings[0].stages}


async def says(cluster: Cluster, phase: int, *words: str) -> str:
    """The ring's reason once all the words are in it."""
    while True:
        reason = str((await ring_state(cluster, phase)).reason)
        if all(word in reason for word in words):
            return reason
        await asyncio.sleep(0.05)


async def leave(node: FakeNode) -> None:
    await node.send(goodbye=membership_pb2.Goodbye(reason="off"))
    await node.wait_closed()
    await node.stop()


async def test_fewer_nodes_take_over_until_there_are_as_many_again(start_cluster: Any) -> None:
    cluster = await start_cluster(**QUICK)
    nodes = await three(cluster)
    await deploy(cluster)
    await ring_state(cluster, SERVING)
    for node in nodes:
        node.busy = True
    await leave(nodes[0])
    await ring_state(cluster, SERVING, epoch=2)
    fewer = await members(cluster)
    assert fewer <= {"beta", "gamma"}
    entry = cluster.coordinator.store.audit.entries(after=0, limit=100)[-1]
    assert (entry.action, entry.details["leaving"]) == ("move_ring", nodes[0].id)
    await cluster.node("alpha", join=False)
    for node in nodes:
        node.busy = False
    while await members(cluster) != {"alpha", "beta", "gamma"}:
        await asyncio.sleep(0.05)
    await ring_state(cluster, SERVING, epoch=3)


async def test_a_model_that_does_not_fit_any_more_waits_for_another_node(start_cluster: Any) -> None:
    cluster = await start_cluster(**QUICK)
    nodes = [await cluster.node(name, memory=TIGHT) for name in ("alpha", "beta", "gamma")]
    await deploy(cluster, context=256)
    await ring_state(cluster, SERVING)
    await leave(nodes[2])
    await says(cluster, DOWN, "gamma is offline; others could not take over: the model needs", "nodes have")
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=nodes[2].id))
    await says(cluster, DOWN, "gamma was evicted; others could not take over")
    told = [one.ring for one in cluster.coordinator.ring_views.snapshot() if one.HasField("ring")]
    assert [(one.phase, one.deployment) for one in told] == [(DOWN, "demo")], "for gateways that start now"
    await cluster.node("spare", memory=TIGHT)
    assert (await ring_state(cluster, SERVING, epoch=2)).reason == ""
    assert await members(cluster) == {"alpha", "beta", "spare"}


async def test_a_ring_without_room_takes_that_of_a_deployment_that_is_deleted(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: that its move has failed says nothing any more."""
    monkeypatch.setattr(moves, "RETRY_SECONDS", 3600.0)
    cluster = await start_cluster(**QUICK)
    nodes = {node.id: node for node in [await cluster.node(name, memory=100_000) for name in ("a", "b")]}
    tight = {"stages": 1, "context": 256, "max_rows": 1}
    first = await deploy(cluster, **tight)
    await deploy(cluster, name="other", **tight)
    await ring_state(cluster, SERVING)
    await leave(nodes[first.rings[0].stages[0].member])
    await says(cluster, DOWN, "others could not take over")
    await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="other"))
    await ring_state(cluster, SERVING, epoch=2)


async def test_what_was_asked_for_by_hand_is_kept(start_cluster: Any) -> None:
    """The nodes, or the layers; with both the ring waits for its members."""
    cluster = await start_cluster(**QUICK)
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
    back = [await again.back(node) for node in nodes]
    sessions = again.coordinator.sessions
    while (session := sessions.find(leaving.id)) is None or not session.steps or session.idle:
        await sessions.next_beat()
    status = await ring_state(again, SERVING)
    assert status.epoch == 1
    assert not any(one.HasField("end") for node in back for one in node.messages)
    back[1].busy = False
    await ring_state(again, SERVING, epoch=2)
    assert leaving.name not in await members(again)
    assert again.coordinator.store.members.get(leaving.id).draining == 1


# When a move is due, without a cluster

GRACE = 30.0


class Scene:
    """The rings r-0 and s-0 of members a and b, and a node c."""

    def __init__(self, *, drained: int = 0, stages: int = 0) -> None:
        self.state = State(Sessions(), Watchers(), GRACE)
        self.machine = SimpleNamespace(awaited=list[str]())
        self.rings = [
            admin_pb2.RingPlan(ring=name, stages=[admin_pb2.StagePlan(member=one) for one in "ab"])
            for name in ("r-0", "s-0")
        ]
        self.planned = {"r": self.rings[0]}
        self.stages = stages
        self.members = {one: Known(one, 10) for one in "abc"} | {"a": Known("a", 10, draining=drained)}
        for one in "abc":
            self.come(one)
        self.moves = Moves(self.state, GRACE)
        self.store(0)

    def come(self, member: str) -> NodeSession:
        session = NodeSession(member, bytes(16), clock=lambda: 0.0)
        session.idle = {"r-0", "s-0"}
        self.state.sessions.open(session)
        return session

    def go(self, member: str) -> None:
        session = self.state.sessions.find(member)
        assert session is not None
        self.state.sessions.closed(session)

    def busy(self, member: str, *, busy: bool = True) -> None:
        session = self.state.sessions.find(member)
        assert session is not None
        session.idle = set() if busy else {"r-0", "s-0"}

    def store(self, now: float, *, wall: float = 100.0, first: bool = False, **members: Known | None) -> None:
        """Stores these members; None is one that was evicted."""
        for name, known in members.items():
            self.members.pop(name, None)
            self.members |= {name: known} if known else {}
        deployments = [
            StoredDeployment(
                name=name,
                asked=admin_pb2.DeploymentSpec(name=name, stages=self.stages),
                plan=admin_pb2.DeploymentPlan(rings=[ring], spec={"name": name}),
            )
            for name, ring in self.planned.items()
        ]
        self.state.wanted = Wanted(members=self.members, deployments=deployments)
        parked = any(one not in self.members for one in "ab")
        running: Any = (
            {} if parked else {ring.ring: SimpleNamespace(machine=self.machine) for ring in self.rings}
        )
        self.state.running = running
        self.moves.stored(now, wall, first=first)

    def look(self, *times: float) -> list[Any]:
        """What is done at these times."""
        done: list[Any] = []
        for now in times:
            self.moves.note(now)
            found = self.moves.due(now)
            assert not self.moves.due(now), "nothing is due twice"
            done += found
        return done

    def fail(self, move: Move, now: float = 0.0) -> None:
        list(self.moves.moved(move, Unavailable("no room")))


def test_who_is_away_is_given_time_and_who_was_removed_is_not() -> None:
    scene = Scene()
    scene.machine.awaited = ["a"]
    assert scene.look(0, 29.9) == []
    scene.machine.awaited = []
    assert scene.look(30) == []
    scene.machine.awaited = ["a"]
    assert scene.look(40, 69.9) == []
    assert scene.moves.note(70) == [("r-0", "a")]
    (move,) = scene.look(70)
    assert (move.deployment, move.ring, move.lost) == ("r", scene.rings[0], {"a"})
    scene = Scene()
    scene.store(0, b=None)
    (move,) = scene.look(0)
    assert move.lost == {"b"}
    assert scene.moves.note(0) == [], "what is parked has no epochs"


def test_nobody_is_away_while_the_coordinator_hears_of_no_node() -> None:
    scene = Scene()
    scene.machine.awaited = ["a", "b"]
    for one in "abc":
        scene.go(one)
    assert scene.look(0, 100) == []
    scene.come("c")
    assert scene.look(101, 130.9) == []
    assert len(scene.look(131)) == 1


def test_a_move_is_tried_again_when_nodes_are_there_and_from_time_to_time() -> None:
    scene = Scene()
    scene.store(0, a=None)
    (move,) = scene.look(0, 1, 59)
    assert scene.look(60, 200) == [], "it is under way"
    scene.fail(move)
    assert scene.state.not_moved == {"r-0": "no room"}
    (move,) = scene.look(201, 202, 260)
    scene.fail(move)
    (move,) = scene.look(261)
    scene.moves.look_anew()
    scene.fail(move)
    (move,) = scene.look(262)
    scene.fail(move)
    assert scene.look(263) == []
    scene.store(263)
    assert len(scene.look(263)) == 1


def test_a_move_that_has_lost_its_reason_is_due_again_with_the_next() -> None:
    scene = Scene()
    scene.machine.awaited = ["a"]
    (move,) = scene.look(0, 30)
    scene.fail(move)
    scene.machine.awaited = []
    assert scene.look(31) == []
    scene.machine.awaited = ["a"]
    assert scene.look(32, 61) == []
    assert len(scene.look(62)) == 1, "it was well meanwhile"


def test_a_ring_grows_when_it_was_quiet_for_long() -> None:
    assert Scene(stages=2).look(0, 31) == []
    scene = Scene(stages=3)
    scene.busy("b")
    assert scene.look(0, 31) == []
    scene.busy("b", busy=False)
    assert scene.look(32, 61.9) == []
    (move,) = scene.look(62, 63)
    assert move.lost == set()
    assert scene.moves.still(move, 63)
    scene.busy("a")
    scene.look(64)
    assert not scene.moves.still(move, 64)


def test_nobody_is_lost_for_the_time_that_the_coordinator_slept() -> None:
    """Each look comes after a long sleep, of which two seconds count."""
    scene, raw, looks = Scene(), 0.0, 0
    awake = AwakeClock(lambda: raw)
    scene.machine.awaited = ["a"]
    while not scene.look(awake()):
        raw, looks = raw + 1000.0, looks + 1
    assert looks == 15, "30 s of being awake"


@pytest.mark.parametrize(
    ("meanwhile", "goes_on"), [("nothing", True), ("back", False), ("also b", True), ("deleted", False)]
)
def test_a_move_goes_on_while_its_member_is_lost(meanwhile: str, goes_on: bool) -> None:
    scene = Scene()
    scene.store(0, a=None)
    (move,) = scene.look(0)
    if meanwhile == "back":
        scene.store(0, a=Known("a", 10))
    elif meanwhile == "also b":
        scene.store(0, b=None)
    elif meanwhile == "deleted":
        scene.planned = {}
        scene.store(0)
    assert scene.moves.still(move, 1) == goes_on


def test_a_ring_without_a_group_becomes_a_pipeline_unless_it_moves() -> None:
    scene = Scene()
    (move,) = scene.moves.fall_back("r-0", "no RDMA", 0)
    assert isinstance(move, Move)
    assert (move.pipeline, move.lost) == ("no RDMA", set())
    assert scene.moves.still(move, 0)
    assert scene.moves.fall_back("r-0", "again", 0) == []
    assert [one.event for one in scene.moves.moved(move, None)] == ["tensor_fell_back"]
    scene.store(0, a=None)
    assert len(scene.look(0)) == 1
    assert scene.moves.fall_back("r-0", "no RDMA", 0) == []


def drain(until: int) -> Known:
    return Known("a", 10, draining=until)


def test_a_drain_moves_all_rings_one_after_another_and_is_then_over() -> None:
    scene = Scene()
    scene.planned["s"] = scene.rings[1]
    scene.store(0, wall=100, a=drain(161))
    assert scene.moves.draining == {"a"}
    (first,) = scene.look(0)
    assert (first.ring.ring, first.lost) == ("r-0", {"a"})
    assert scene.moves.still(first, 0)
    scene.fail(first)
    (second,) = scene.look(1)
    assert second.ring.ring == "s-0", "one that fails keeps no other"
    assert list(scene.moves.moved(second, None)) == []
    assert scene.look(2) == [Drained("a")]
    assert scene.moves.draining == set()
    scene.store(3, wall=103)
    assert scene.look(3) == [], "also if its end could not be stored"


def test_a_drain_has_a_time_and_is_taken_back() -> None:
    scene = Scene()
    scene.busy("a")
    scene.store(0, wall=100.5, a=drain(161))
    assert scene.look(0, 60) == [], "it computes"
    scene.store(60, a=Known("a", 10))
    assert (scene.moves.draining, scene.look(1000)) == (set(), [])
    scene.store(1000, wall=100, a=drain(161))
    note, move = scene.look(1060.9, 1061)
    assert (note.event, move.lost) == ("drain_timeout", {"a"})
    scene.store(1062, a=Known("a", 10))
    assert not scene.moves.still(move, 1062)
    scene.store(1063, wall=100, a=drain(161))
    assert scene.look(1063) == [], "the move of the former drain says nothing of this one"
    assert not scene.moves.still(move, 1063)
    scene.busy("a", busy=False)
    (again,) = scene.look(1064)
    scene.fail(move)
    assert scene.moves.still(again, 1064)


@pytest.mark.parametrize(("until", "resumed"), [(0, False), (1, False), (100, False), (160, True)])
def test_a_drain_that_a_stop_interrupts_is_resumed_until_its_end(until: int, resumed: bool) -> None:
    """Its member has the grace period to come back."""
    scene = Scene()
    scene.go("a")
    scene.store(0, wall=100.0, first=True, a=drain(until))
    assert scene.look(0, 29.9) == []
    assert scene.moves.draining == ({"a"} if resumed else set())
    assert len(scene.look(30)) == resumed


def test_a_drain_whose_member_comes_back_waits_until_it_is_idle() -> None:
    scene = Scene()
    scene.go("a")
    scene.store(0, wall=100.0, first=True, a=drain(160))
    scene.come("a").idle = set()
    assert scene.look(0, 31) == []
    scene.busy("a", busy=False)
    assert len(scene.look(32)) == 1


def test_who_is_evicted_in_a_drain_is_lost() -> None:
    scene = Scene()
    scene.busy("a")
    scene.store(0, wall=100.0, a=drain(160))
    scene.store(1, a=None)
    assert scene.moves.draining == set()
    (move,) = scene.look(1)
    assert move.lost == {"a"}
