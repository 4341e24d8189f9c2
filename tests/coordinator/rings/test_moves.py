"""Rings whose members go for good: moved to the nodes that are there, or waiting for what they lack."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from sealring.coordinator.rings import moves
from sealring.coordinator.rings.moves import Moves
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredDeployment, StoredMember
from sealring.mesh.clock import AwakeClock
from sealring.mesh.errors import FailedPrecondition, ResourceExhausted, SealringError, Unavailable
from sealring.mesh.pki import Role
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
    assert cluster.coordinator.ring_views.obstacles("another-0") == {}
    told = [one.ring for one in cluster.coordinator.ring_views.snapshot() if one.HasField("ring")]
    assert [(one.phase, one.deployment) for one in told] == [(DOWN, "demo")], "for gateways that start now"
    await cluster.node("spare", memory=TIGHT)
    assert (await ring_state(cluster, SERVING, epoch=2)).reason == ""
    assert await members(cluster) == {"alpha", "beta", "spare"}


async def test_a_ring_without_room_takes_that_of_a_deployment_that_is_deleted(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: that its move has failed says nothing any more."""
    monkeypatch.setattr(moves, "_RETRY_SECONDS", 3600.0)
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


# When a move is due and what it asks for, without a cluster

RING = admin_pb2.RingPlan(
    ring="r-0", stages=[admin_pb2.StagePlan(member="a"), admin_pb2.StagePlan(member="b")]
)


class Scene:
    """A planned ring of members a and b. `asked` and `planned` are the specifications of moves; a move waits
    between the two until `go` is set."""

    def __init__(self, *, drained: int = 0, pipeline: bool = False, **asked: Any) -> None:
        ring = admin_pb2.RingPlan()
        ring.CopyFrom(RING)
        ring.pipeline = pipeline
        spec = admin_pb2.DeploymentSpec(name="r", **asked)
        plan = admin_pb2.DeploymentPlan(rings=[ring], spec={"name": "r", "context": 512, "max_rows": 8})
        self.now, self.slept = 100.5, False
        self.deployments = {"r": StoredDeployment(name="r", asked=spec, plan=plan)}
        self.asked: list[admin_pb2.DeploymentSpec] = []
        self.planned: list[admin_pb2.DeploymentSpec] = []
        self.errors: list[Exception] = []
        self.told: list[Any] = []
        self.log: list[dict[str, Any]] = []
        self.awaited: list[str] = []
        self.obstacles: dict[str, str] = {}
        self.offline: list[str] = []
        self.beds = {name: SimpleNamespace(idle={"r-0", "s-0"}) for name in "abc"}
        self.free = frozenset("c")
        self.go = asyncio.Event()
        self.go.set()
        member = StoredMember(id="a", role=Role.MEMBER, name="a", draining=drained)
        self.members = {"a": member}
        self.unwritable: SealringError | None = None
        part: Any = SimpleNamespace
        rings = part(
            offline=self.offline.append,
            not_moved=lambda *said: self.told.append(said),
            keep_serving=lambda *said: self.told.append(said),
            sync=lambda: None,
        )
        views = part(awaited=lambda ring: self.awaited, obstacles=lambda ring: self.obstacles)
        self.views = views
        self.show()
        self.moves = Moves(
            part(
                deployments=part(
                    all=lambda: list(self.deployments.values()),
                    get=self.deployments.__getitem__,
                    save=lambda one: self.deployments.update({one.name: one}),
                ),
                members=part(
                    all=lambda role: list(self.members.values()),
                    find=self.members.get,
                    save=self.save,
                ),
                audit=part(append=lambda *said: self.log.append(said[-1])),
            ),
            part(change=contextlib.nullcontext),
            self,  # type: ignore[arg-type]
            part(able=lambda *_: self.free, check=lambda spec: spec, ask=self.ask, plan=self.plan),
            rings,
            views,
            part(changing=asyncio.Lock()),
            CoordinatorSettings(replace_after=30, drain_timeout=60),
            clock=lambda: self.now,
            awake=lambda: self.now,
        )

    def save(self, member: StoredMember) -> None:
        if self.unwritable is not None:
            raise self.unwritable
        self.members[member.id] = member

    def show(self) -> None:
        """What is planned, as `deployments` has it now."""
        self.views.planned = [(one, ring) for one in self.deployments.values() for ring in one.plan.rings]

    async def ask(self, spec: Any, *, replacing: Any) -> Any:
        """The members that have the model, by their names; "c" has none."""
        self.asked.append(spec)
        await self.go.wait()
        if self.errors and not isinstance(self.errors[0], SealringError):
            raise self.errors.pop(0)
        return {one: SimpleNamespace(profile=one != "c") for one in "abc"}

    async def plan(self, spec: Any, answers: Any, **_: Any) -> admin_pb2.DeploymentPlan:
        self.planned.append(admin_pb2.DeploymentSpec())
        self.planned[-1].CopyFrom(spec)
        if self.errors:
            raise self.errors.pop(0)
        return admin_pb2.DeploymentPlan(rings=[RING])

    def __iter__(self) -> Any:
        return iter(self.beds.values())

    def find(self, member: str) -> Any:
        return self.beds.get(member)

    async def next_beat(self) -> None:
        await asyncio.Event().wait()

    async def look(self, *times: float) -> int:
        """The number of moves that were begun, after looks at these times."""
        for now in times:
            self.now = now
            self.moves.look(now)
            await settle()
        return len(self.asked)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_who_is_away_is_given_time_and_who_was_removed_is_not() -> None:
    scene = Scene()
    scene.awaited = ["a"]
    assert await scene.look(0, 29.9) == 0
    scene.awaited = []
    assert await scene.look(30) == 0
    scene.awaited = ["a"]
    assert await scene.look(40, 69.9) == 0
    assert scene.offline == []
    scene.obstacles = {"b": "was evicted"}
    assert await scene.look(69.9) == 1
    assert scene.log[-1]["leaving"] == "b"
    assert scene.offline == ["b"]
    await scene.look(70)
    assert sorted(scene.offline[1:]) == ["a", "b"]


async def test_nobody_is_away_while_the_coordinator_hears_of_no_node() -> None:
    scene = Scene()
    scene.awaited, scene.beds = ["a", "b"], {}
    assert await scene.look(0, 100) == 0
    scene.beds = {"c": SimpleNamespace(idle=set())}
    assert await scene.look(101, 130.9) == 0
    assert await scene.look(131) == 1


async def test_a_move_is_tried_again_when_other_nodes_are_there_and_from_time_to_time() -> None:
    scene = Scene()
    scene.obstacles = {"a": "was evicted"}
    assert await scene.look(0, 1, 59) == 1
    assert await scene.look(60, 61) == 2
    scene.go.clear()
    scene.free = frozenset("cd")
    assert await scene.look(62, 63, 200) == 3, "it is under way"
    scene.go.set()
    await settle()
    assert await scene.look(201) == 4
    scene.obstacles = {}
    assert await scene.look(202) == 4
    scene.obstacles = {"a": "was evicted"}
    assert await scene.look(203) == 5, "it was well meanwhile"


async def test_a_ring_grows_when_it_was_quiet_for_long_and_there_are_nodes() -> None:
    scene = Scene(stages=3)
    scene.free = frozenset("ab")
    assert await scene.look(0, 31) == 0
    scene.free = frozenset("abc")
    scene.beds["b"].idle = set()
    assert await scene.look(32) == 0
    scene.beds["b"].idle = {"r-0"}
    assert await scene.look(33, 62.9) == 0
    assert await scene.look(63, 64) == 1
    assert await Scene(stages=2).look(0, 31) == 0


async def test_nobody_is_lost_for_the_time_that_the_coordinator_slept() -> None:
    """Each look comes after a long sleep, of which two seconds count."""
    scene = Scene()
    awake = AwakeClock(lambda: scene.now)
    scene.awaited = ["a"]
    looks = 0
    while not scene.asked:
        scene.now, looks = scene.now + 1000.0, looks + 1
        scene.moves.look(awake())
        await settle()
    assert looks == 16, "30 s of being awake"


@pytest.mark.parametrize(
    ("meanwhile", "goes_on"), [("nothing", True), ("back", False), ("also b", True), ("deleted", False)]
)
async def test_a_move_goes_on_while_its_member_is_lost(meanwhile: str, goes_on: bool) -> None:
    scene = Scene()
    scene.obstacles = {"a": "was evicted"}
    scene.go.clear()
    assert await scene.look(0) == 1
    if meanwhile == "back":
        scene.obstacles = {}
    elif meanwhile == "also b":
        scene.obstacles["b"] = "was evicted"
    elif meanwhile == "deleted":
        scene.views.planned = []
    scene.go.set()
    await settle()
    assert bool(scene.planned) == bool(scene.log) == goes_on


@pytest.mark.parametrize("used", [False, True])
async def test_a_ring_grows_only_while_it_is_quiet(used: bool) -> None:
    scene = Scene(stages=3)
    scene.free = frozenset("abc")
    scene.go.clear()
    assert await scene.look(0, 31) == 1
    if used:
        scene.beds["a"].idle = set()
        await scene.look(32)
    scene.go.set()
    await settle()
    assert bool(scene.planned) != used


@pytest.mark.parametrize(
    ("asked", "lost", "tries"),
    [
        ({"stages": 3}, True, [3, 0]),
        ({"stages": 3}, False, [3]),
        ({"stages": 2, "strategy": "tensor"}, True, [2]),
        ({}, True, [0]),
    ],
)
@pytest.mark.parametrize("error", [FailedPrecondition("too few"), ResourceExhausted("too little")])
async def test_stages_give_way_where_a_member_is_lost_and_a_tensor_rings_do_not(
    asked: dict[str, Any], lost: bool, tries: list[int], error: SealringError
) -> None:
    """A move that fails is shown as the ring's reason."""
    scene = Scene(**asked)
    scene.errors, scene.free = [error], frozenset("abc")
    scene.obstacles = {"a": "was evicted"} if lost else {}
    assert await scene.look(0, 31) == 1
    assert [spec.stages for spec in scene.planned] == tries
    assert bool(scene.log) == (len(tries) > 1)
    assert scene.told == ([("r-0", error.message)] if lost and len(tries) == 1 else [])


@pytest.mark.parametrize(
    ("members", "split", "able", "kept"),
    [
        ("ab", [], "ab", "ab"),
        ("abc", [], "abc", "ab"),
        ("abc", [], "bcd", "b"),
        ("abc", [], "d", "abc"),
        ("abd", [], "abd", "ab"),
        ("abc", [4, 3, 2], "ab", "ab"),
        ("", [], "ab", ""),
    ],
)
async def test_a_ring_stays_on_those_of_its_named_nodes_that_can(
    members: str, split: list[int], able: str, kept: str
) -> None:
    """The node c does not have the model, and d came after it was asked."""
    scene = Scene(members=list(members), split=split)
    scene.free, scene.obstacles = frozenset(able), {"a": "was evicted"}
    await scene.look(0)
    assert "".join(scene.planned[0].members) == kept


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("split", [[], [4, 5]])
async def test_a_ring_is_planned_anew_as_it_was_asked_for(pipeline: bool, split: list[int]) -> None:
    """With what clients were promised, and as a pipeline where it has become one."""
    tensor = {"strategy": "tensor", "backend": "ring", "clear_links": True, "or_pipeline": True}
    scene = Scene(pipeline=pipeline, replicas=2, members=["c", "b"], split=split, **tensor)
    scene.obstacles = {"a": "was evicted"}
    await scene.look(0)
    (spec,) = scene.asked
    assert (spec.strategy, spec.backend) == (("pipeline", "") if pipeline else ("tensor", "ring"))
    assert spec.clear_links == spec.or_pipeline == (not pipeline)
    assert (spec.replicas, spec.context, spec.max_rows) == (1, 512, 8)
    assert list(spec.members) == (["a", "b"] if split else ["c", "b"])
    assert scene.deployments["r"].asked.strategy == "tensor", "which itself stays as it was"
    assert scene.deployments["r"].plan.rings[0].pipeline == pipeline


async def test_a_defect_in_one_move_of_a_drain_keeps_no_other_ring() -> None:
    scene = Scene()
    other = admin_pb2.RingPlan(ring="s-0", stages=RING.stages)
    plan = admin_pb2.DeploymentPlan(rings=[other], spec={"name": "s"})
    scene.deployments["s"] = StoredDeployment(name="s", asked=admin_pb2.DeploymentSpec(name="s"), plan=plan)
    scene.show()
    scene.errors = [KeyError("r-0")]
    with structlog.testing.capture_logs() as logs:
        scene.moves.draining("a", 161)
        await settle()
    assert [one["log_level"] for one in logs] == ["error"]
    assert (len(scene.asked), len(scene.log)) == (2, 1)


async def test_a_drain_ends_though_its_end_cannot_be_written() -> None:
    scene = Scene(drained=161)
    scene.unwritable = Unavailable("the disk is full", reason="STATE_UNWRITABLE")
    with structlog.testing.capture_logs() as logs:
        scene.moves.draining("a", 161)
        await settle()
    assert (scene.told.pop(), len(scene.log)) == (("a", False), 1), "it serves no longer for the drain alone"
    assert [one["reason"] for one in logs if one["log_level"] == "warning"] == ["STATE_UNWRITABLE"]
    await scene.moves.close()


async def test_a_drain_has_a_time_and_is_taken_back() -> None:
    scene = Scene()
    scene.moves.staying("a")
    assert scene.told == []
    assert scene.moves.drain_end() == 161
    scene.beds["a"].idle = set()
    scene.moves.draining("a", 161)
    await settle()
    assert (scene.told, scene.asked) == ([("a", True)], []), "it computes"
    scene.moves.staying("a")
    await settle()
    assert (scene.told.pop(), scene.asked) == (("a", False), [])
    scene.moves.draining("a", 100)
    await settle()
    assert len(scene.asked) == 1, "its time is over"
    await scene.moves.close()


@pytest.mark.parametrize(("until", "resumed"), [(0, False), (100, False), (160, True)])
async def test_a_drain_that_a_stop_interrupts_is_resumed_until_its_end(until: int, resumed: bool) -> None:
    scene = Scene(drained=until)
    scene.go.clear()
    scene.moves.resume()
    await settle()
    assert (scene.told, len(scene.asked)) == (([("a", True)], 1) if resumed else ([], 0))
    await scene.moves.close()
    assert scene.members["a"].draining == until, "it is not over"
    scene.go.set()
    scene.moves.resume()
    await settle()
    assert scene.members["a"].draining == (1 if resumed else until)
