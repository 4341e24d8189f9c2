"""Changes of plans by the cluster itself: what they ask for, what they keep, and what overtakes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.rings.actions import Move, Place, Unload
from sealring.coordinator.rings.loads import Victims
from sealring.coordinator.rings.plans import Plans
from sealring.coordinator.store import StoredDeployment
from sealring.mesh.errors import Conflict, FailedPrecondition, ResourceExhausted, SealringError
from sealring.v1 import admin_pb2

MADE = admin_pb2.RingPlan(stages=[admin_pb2.StagePlan(member="new")], min_trust=7)


class Scene:
    """The deployment r with the rings r-0 of the nodes c and d, and r-1 of a and b, and of nodes that answer.

    `able` may serve. `asked` and `planned` are specifications, of which each plan fails with the next of
    `errors`. A change is wanted as often as `wanted` says so.
    """

    def __init__(self, *, pipeline: bool = False, rings: int = 2, **asked: Any) -> None:
        made = [
            admin_pb2.RingPlan(
                ring=f"r-{number}",
                stages=[admin_pb2.StagePlan(member=one) for one in members],
                pipeline=pipeline and number == 1,
            )
            for number, members in enumerate(("cd", "ab")[:rings])
        ]
        spec = admin_pb2.DeploymentSpec(name="r", **asked)
        plan = admin_pb2.DeploymentPlan(rings=made, spec={"name": "r", "context": 512, "max_rows": 8})
        plan.spec.strategy = spec.strategy
        self.stored = {"r": StoredDeployment(name="r", asked=spec, plan=plan, created=1)}
        self.able, self.silent, self.expected = "abcd", set[str](), set[str]()
        self.asked: list[admin_pb2.DeploymentSpec] = []
        self.planned: list[tuple[admin_pb2.DeploymentSpec, set[str]]] = []
        self.errors: list[SealringError] = []
        self.wanted = [True] * 9
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.room: list[Any] = []
        self.freed: list[str] | None = None
        self.victims = Victims((), (), 0.0)
        part: Any = SimpleNamespace
        cluster = part(
            still=lambda change, now: self.wanted.pop(0),
            on_demand=part(
                loads=part(victims=lambda name, now: self.victims, yielded_to=""),
                room=lambda name, chosen, now: self.room.append(chosen) or self.freed,
            ),
        )
        store = part(
            deployments=part(
                all=lambda: list(self.stored.values()),
                get=self.stored.__getitem__,
                save=lambda one: self.stored.update({one.name: one}),
            ),
            members=part(all=lambda role: [part(id=one, name=f"node-{one}") for one in "abcd"]),
            audit=part(append=lambda at, actor, action, subject, details: self.log.append((action, details))),
        )
        survey = part(
            able=lambda *_: frozenset(self.able), check=lambda spec: spec, ask=self.ask, plan=self.plan
        )
        publisher = part(change=lambda **_: nullcontext())
        self.plans = Plans(cluster, store, publisher, survey, wall=lambda: 0.0, clock=lambda: 0.0)

    async def ask(self, spec: Any, *, replacing: Any, expected: Any = ()) -> Any:
        """The node c does not have the model."""
        self.asked.append(spec)
        self.expected = set(expected)
        return {one: SimpleNamespace(profile=one != "c", undecided=one in self.silent) for one in "abc"}

    async def plan(self, spec: Any, answers: Any, **more: Any) -> admin_pb2.DeploymentPlan:
        self.planned.append((admin_pb2.DeploymentSpec(), set(answers)))
        self.planned[-1][0].CopyFrom(spec)
        if self.errors:
            raise self.errors.pop(0)
        return admin_pb2.DeploymentPlan(spec=spec, rings=[MADE])

    async def move(self, lost: str = "a", **why: Any) -> None:
        ring = next(ring for ring in self.stored["r"].plan.rings if ring.ring == "r-1")
        await self.plans.make(Move("r", ring, 0.0, frozenset(lost), **why))

    @property
    def rings(self) -> list[admin_pb2.RingPlan]:
        return list(self.stored["r"].plan.rings)


async def test_a_ring_that_moves_leaves_the_others_alone() -> None:
    scene = Scene()
    before = scene.rings[0]
    await scene.move()
    assert scene.rings == [before, admin_pb2.RingPlan(ring="r-1", stages=MADE.stages, min_trust=7)]
    assert scene.expected == {"b"}, "who stays in the ring is given time to come back"
    (entry,) = scene.log
    assert (entry[0], entry[1]["leaving"], entry[1]["deployment"]) == ("move_ring", "a", "r")
    assert entry[1]["plan_hash"] == scene.stored["r"].plan.plan_hash


@pytest.mark.parametrize("wanted", [(False,), (True, False)])
@pytest.mark.parametrize("change", [Scene.move, lambda scene: scene.plans.make(Place("r"))])
async def test_what_is_not_wanted_any_more_is_not_made(
    change: Callable[[Scene], Awaitable[None]], wanted: tuple[bool, ...]
) -> None:
    """Before or after the plan, which takes a while: members are back, or clients have left."""
    scene = Scene()
    scene.freed = []
    before, scene.wanted = scene.rings, list(wanted if change is Scene.move else wanted[-1:])
    await change(scene)
    assert (scene.rings, scene.log) == (before, [])


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
    scene = Scene(**asked)
    scene.errors = [error]
    if len(tries) > 1:
        await scene.move("a" if lost else "")
    else:
        with pytest.raises(type(error)):
            await scene.move("a" if lost else "")
    assert [spec.stages for spec, _ in scene.planned] == tries
    assert bool(scene.log) == (len(tries) > 1)


@pytest.mark.parametrize(("able", "asks"), [("ab", False), ("abc", True)])
async def test_a_ring_grows_when_there_are_nodes(able: str, asks: bool) -> None:
    scene = Scene(stages=3)
    scene.able = able
    await scene.move("")
    assert bool(scene.asked) == bool(scene.log) == asks


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
    scene.able = able
    await scene.move()
    assert "".join(scene.planned[0][0].members) == kept


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("split", [[], [4, 5]])
async def test_a_ring_is_planned_anew_as_it_was_asked_for(pipeline: bool, split: list[int]) -> None:
    """With what clients were promised, and as a pipeline where it has become one."""
    tensor = {"strategy": "tensor", "backend": "ring", "clear_links": True, "or_pipeline": True}
    scene = Scene(pipeline=pipeline, replicas=2, members=["c", "b"], split=split, **tensor)
    await scene.move()
    (spec,) = scene.asked
    assert (spec.strategy, spec.backend) == (("pipeline", "") if pipeline else ("tensor", "ring"))
    assert spec.clear_links == spec.or_pipeline == (not pipeline)
    assert (spec.replicas, spec.context, spec.max_rows) == (1, 512, 8)
    assert list(spec.members) == (["a", "b"] if split else ["b"])
    assert scene.stored["r"].asked.strategy == "tensor", "which itself stays as it was"
    assert scene.rings[1].pipeline == pipeline


async def test_what_falls_back_keeps_its_nodes_and_promises() -> None:
    tensor = {"strategy": "tensor", "backend": "ring", "clear_links": True, "or_pipeline": True}
    scene = Scene(members=["a", "b"], **tensor)
    before = scene.rings[0]
    await scene.move("", pipeline="no RDMA")
    ((spec, nodes),) = scene.planned
    assert (nodes, list(spec.members)) == ({"a", "b"}, [])
    assert (spec.strategy, spec.replicas, spec.clear_links) == ("pipeline", 1, False)
    assert (spec.context, spec.max_rows) == (512, 8)
    made = scene.stored["r"].plan
    assert made.spec.strategy == "tensor"
    assert list(made.rings) == [
        before,
        admin_pb2.RingPlan(ring="r-1", stages=MADE.stages, min_trust=7, pipeline=True),
    ]
    assert made.reasons[-1] == "r-1 is a pipeline, because its group did not come up: no RDMA"
    assert (scene.log[0][0], scene.log[0][1]["why"]) == ("fall_back", "no RDMA")


@pytest.mark.parametrize(
    ("victims", "errors", "chosen"),
    [
        (Victims(("x",), (), 0.0), 0, []),
        (Victims(("x",), (), 0.0), 1, ["x"]),
        (Victims((), ("y",), 9.0), 1, None),
    ],
)
async def test_room_is_looked_for_before_models_are_unloaded(
    victims: Victims, errors: int, chosen: list[str] | None
) -> None:
    scene = Scene(rings=0)
    scene.victims, scene.errors = victims, [ResourceExhausted("too large")] * errors
    await scene.plans.make(Place("r"))
    assert (scene.room, scene.log) == ([chosen], [])


@pytest.mark.parametrize(("silent", "reason"), [("", "DOES_NOT_FIT"), ("b", "MODEL_NOT_LOADED")])
async def test_no_room_at_all_is_an_error_and_one_for_now_while_nodes_say_nothing(
    silent: str, reason: str
) -> None:
    scene = Scene(rings=0)
    scene.silent, scene.errors = set(silent), [ResourceExhausted("too large", reason="DOES_NOT_FIT")] * 2
    with pytest.raises(SealringError) as caught:
        await scene.plans.make(Place("r"))
    assert caught.value.reason == reason
    assert ("node-b" in caught.value.message) == bool(silent)
    scene.errors = [Conflict("nodes came and went", reason="NODES_CHANGED")]
    with pytest.raises(Conflict):
        await scene.plans.make(Place("r"))


async def test_a_model_takes_the_place_of_others_and_gives_its_own_up() -> None:
    scene = Scene(rings=0, on_demand=True)
    other = admin_pb2.DeploymentPlan(rings=[MADE], spec={"name": "x"})
    scene.stored["x"] = StoredDeployment(name="x", asked=admin_pb2.DeploymentSpec(name="x"), plan=other)
    scene.freed = ["x"]
    await scene.plans.make(Place("r"))
    assert [action for action, _ in scene.log] == ["unload_model", "load_model"]
    assert scene.rings == [MADE]
    assert not scene.stored["x"].plan.rings
    assert scene.stored["r"].plan.spec.context == 512
    scene.plans.unload(Unload("r", "nobody uses it"))
    assert (scene.rings, scene.log[-1]) == ([], ("unload_model", {"why": "nobody uses it"}))
