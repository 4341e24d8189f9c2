"""Rings whose members go for good: moved to the nodes that are there, or waiting for what they lack."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from sealring.coordinator.rings.moves import Moves
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.clock import AwakeClock, Clock, monotonic_clock
from sealring.mesh.errors import FailedPrecondition, ResourceExhausted, SealringError
from sealring.v1 import admin_pb2, membership_pb2
from tests.coordinator.rings.test_rings import DOWN, SERVING, deploy, ring_state, three

if TYPE_CHECKING:
    from tests.coordinator.conftest import Cluster, FakeNode

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
        assert cluster.coordinator.ring_views.obstacles("another-0") == {}
        told = [one.ring for one in cluster.coordinator.ring_views.snapshot() if one.HasField("ring")]
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

    def __init__(self, *, stages: int = 0, awake: Clock = monotonic_clock) -> None:
        self.begun: list[set[str]] = []
        self.awaited: list[str] = []
        self.obstacles: dict[str, str] = {}
        self.offline: list[str] = []
        self.sessions = {name: SimpleNamespace(idle={"r-0"}) for name in "abc"}
        self.free = frozenset("c")
        asked = admin_pb2.DeploymentSpec(stages=stages)
        deployment = SimpleNamespace(name="r", asked=asked)
        rings: Any = SimpleNamespace(
            planned=[(deployment, RING)],
            awaited=lambda ring: self.awaited,
            obstacles=lambda ring: self.obstacles,
            offline=self.offline.append,
        )
        unused: Any = None
        survey: Any = SimpleNamespace(able=lambda deployment, ring: self.free)
        settings = CoordinatorSettings(replace_after=30)
        sessions: Any = self
        self.moves = Moves(
            unused, unused, sessions, survey, rings, rings, unused, settings, clock=lambda: 0.0, awake=awake
        )
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
    assert scene.offline == []
    scene.obstacles = {"b": "was evicted"}
    assert scene.look(69.9) == 1
    assert scene.begun == [{"b"}]
    assert scene.offline == ["b"]
    scene.look(70)
    assert sorted(scene.offline[1:]) == ["a", "b"]


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
    scene.moves._moving.add("r-0")
    assert scene.look(200) == 3, "it is under way"
    scene.moves._moving.clear()
    assert scene.look(201) == 4
    scene.obstacles = {}
    assert scene.look(202) == 4
    scene.obstacles = {"a": "was evicted"}
    assert scene.look(203) == 5, "it was well meanwhile"


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


async def test_nobody_is_lost_for_the_time_that_the_coordinator_slept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look comes after a long sleep, of which two seconds count."""
    now, looks = 0.0, 0
    scene = Scene(awake=AwakeClock(lambda: now))
    scene.awaited = ["a"]

    async def sleep(seconds: float) -> None:
        nonlocal now, looks
        now, looks = now + 1000.0, looks + 1
        if scene.begun or looks == 40:
            raise asyncio.CancelledError

    monkeypatch.setattr("sealring.coordinator.rings.moves.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await scene.moves.run()
    assert (scene.begun, looks) == ([{"a"}], 16), "30 s of being awake"


@pytest.mark.parametrize(
    ("planned", "lost_now", "draining", "quiet", "lost", "still"),
    [
        (False, {"a"}, set(), True, {"a"}, False),
        (True, {"a"}, set(), False, {"a"}, True),
        (True, {"a", "b"}, set(), False, {"a"}, True),
        (True, set(), {"a"}, False, {"a"}, True),
        (True, {"b"}, {"a"}, False, {"a", "b"}, True),
        (True, {"b"}, set(), True, {"a", "b"}, False),
        (True, {"a"}, set(), True, set(), True),
        (True, {"a"}, set(), False, set(), False),
    ],
)
def test_a_move_goes_on_while_its_reason_holds(
    planned: bool, lost_now: set[str], draining: set[str], quiet: bool, lost: set[str], still: bool
) -> None:
    other = admin_pb2.RingPlan(ring="other")
    made = moves(
        _views=SimpleNamespace(planned=[(None, other), (None, RING if planned else other)]),
        _lost=lambda ring, now: set(lost_now),
        _drains=dict.fromkeys(draining),
        _awake=lambda: 0.0,
        _quiet={"r-0": 1.0} if quiet else {},
    )
    assert made._still(RING, lost) is still


@pytest.mark.parametrize(
    ("spec", "gives_way", "tries"),
    [
        ({"stages": 3}, True, [3, 0]),
        ({"stages": 3}, False, [3]),
        ({"stages": 2, "strategy": "tensor"}, True, [2]),
        ({}, True, [0]),
    ],
)
@pytest.mark.parametrize("error", [FailedPrecondition("too few"), ResourceExhausted("too little")])
async def test_stages_give_way_where_a_member_is_lost_and_a_tensor_rings_do_not(
    spec: dict[str, Any], gives_way: bool, tries: list[int], error: SealringError
) -> None:
    tried: list[int] = []

    async def plan(asked: Any, answers: Any, *, digest: str, replacing: str) -> Any:
        tried.append(asked.stages)
        assert (answers, digest, replacing) == ({}, "ab", "r-0")
        if len(tried) == 1 + (len(tries) > 1):
            return admin_pb2.DeploymentPlan() if len(tries) > 1 else raised()
        raise error

    def raised() -> Any:
        raise error

    made = moves(_survey=SimpleNamespace(plan=plan))
    planning = made._plan(admin_pb2.DeploymentSpec(**spec), {}, "ab", "r-0", gives_way=gives_way)
    if len(tries) > 1:
        assert await planning == admin_pb2.DeploymentPlan()
    else:
        with pytest.raises(type(error)):
            await planning
    assert tried == tries


@pytest.mark.parametrize(
    ("members", "split", "able", "kept"),
    [
        ("abc", [], "abc", "abc"),
        ("abc", [], "ab", "ab"),
        ("abc", [], "bcd", "b"),
        ("abc", [], "d", "abc"),
        ("abd", [], "abd", "ab"),
        ("abc", [4, 3, 2], "ab", "abc"),
        ("", [], "ab", ""),
    ],
)
async def test_a_ring_stays_on_those_of_its_named_nodes_that_can(
    members: str, split: list[int], able: str, kept: str
) -> None:
    """The third of them does not have the model."""

    async def plan(asked: Any, *_: Any, **__: Any) -> str:
        return "".join(asked.members)

    def may(deployment: str, ring: str) -> set[str]:
        assert (deployment, ring) == ("demo", "r-0")
        return set(able)

    # "d" came after the survey, and was not asked
    profiles = {one: SimpleNamespace(profile=one != "c" or able == "abc") for one in "abc"}
    made = moves(_survey=SimpleNamespace(plan=plan, able=may))
    spec = admin_pb2.DeploymentSpec(name="demo", members=list(members), split=split)
    assert await made._plan(spec, profiles, "ab", "r-0", gives_way=True) == kept


async def test_a_defect_in_one_move_of_a_drain_keeps_no_other_ring() -> None:
    moved: list[str] = []

    async def move(name: str, ring: str, *_: Any) -> None:
        moved.append(ring)
        raise KeyError(ring)

    made = moves(
        _moving=set(),
        _drains={},
        _move_ring=move,
        _idle=lambda member: True,
        _rings_of=lambda member: [("r", "r-0"), ("s", "s-0")],
        _clock=lambda: 0.0,
    )
    with structlog.testing.capture_logs() as logs:
        await made._drain("a", 10.0, returning=False)
    assert moved == ["r-0", "s-0"]
    assert [one["log_level"] for one in logs] == ["error", "error"]


@pytest.mark.parametrize("lost", [set(), {"a"}])
async def test_a_move_that_fails_is_told_and_is_over(lost: set[str]) -> None:
    told: list[Any] = []

    async def move(name: str, ring: str, *_: Any) -> None:
        assert made._moving == {"other", "r-0"}
        raise FailedPrecondition("no room", reason="DOES_NOT_FIT")

    made = moves(_moving={"other"}, _move_ring=move)
    made._rings = SimpleNamespace(not_moved=lambda *said: told.append(said))
    with structlog.testing.capture_logs() as logs:
        await made._move("r", "r-0", lost)
    assert told == ([("r-0", "no room")] if lost else [])
    assert logs == [
        {
            "event": "ring_not_moved",
            "log_level": "warning" if lost else "info",
            "ring": "r-0",
            "reason": "DOES_NOT_FIT",
            "why": "no room",
        }
    ]
    assert made._moving == {"other"}


async def test_a_drain_has_a_time_and_is_taken_back() -> None:
    told: list[Any] = []
    clock = 100.5

    async def drain(member: str, seconds: float, returning: bool) -> None:
        told.append((member, seconds, returning))
        await asyncio.Event().wait()

    stored = [SimpleNamespace(id=name, draining=until) for name, until in (("x", 100), ("y", 160), ("z", 0))]
    made = moves(
        _rings=SimpleNamespace(keep_serving=lambda *said: told.append(said)),
        _store=SimpleNamespace(members=SimpleNamespace(all=lambda role: stored)),
        _clock=lambda: clock,
        _drain_timeout=60.0,
        _drain=drain,
    )
    made.staying("a")
    assert told == []
    assert made.drain_end() == 161
    made.draining("a", 161)
    await asyncio.sleep(0)
    assert told == [("a", True), ("a", 60.5, False)]
    (task,) = made._tasks
    made.staying("a")
    assert told.pop() == ("a", False)
    for _ in range(2):
        await asyncio.sleep(0)
    assert task.cancelled()
    assert (made._tasks, made._drains) == (set(), {})
    told.clear()
    made.resume()
    await asyncio.sleep(0)
    assert told == [("y", True), ("y", 59.5, True)]
    clock = 160.0
    told.clear()
    made.resume()
    assert told == [], "its time is over"
    await made.close()
    assert (made._tasks, made._drains) == (set(), {})


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
