"""Models on nodes: shown, fetched, removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from commands import quickly

from sealring.cli.calls import held
from sealring.cli.commands.deployment import create_deployment
from sealring.mesh.errors import FailedPrecondition, NotFound, Unavailable
from sealring.v1 import admin_pb2, membership_pb2, model_pb2

MODEL = "org/model"
Held, Heartbeat = membership_pb2.HeldModel, membership_pb2.Heartbeat


class Admin:
    """A coordinator of two nodes; each look finds the next of the states that its model goes through."""

    def __init__(self, *states: list[Held], online: bool = True, small: Sequence[Held] = ()) -> None:
        self.states = list(states)
        self.small = small
        self.state = admin_pb2.NODE_STATE_ONLINE if online else admin_pb2.NODE_STATE_OFFLINE
        self.ordered: list[tuple[str, str, str]] = []
        self.unknown: bool | None = True
        """Planning fails until a pull was ordered, which might help; None: it does not."""
        self.to_plan: bool | None = None

    async def call(self, method: str, **asked: Any) -> Any:
        if method == "ListNodes":
            models = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            big = admin_pb2.Node(id="b", name="big", state=self.state)
            big.heartbeat.MergeFrom(Heartbeat(memory_usable=9, models=models))
            return admin_pb2.ListNodesResponse(
                nodes=[
                    admin_pb2.Node(
                        id="a", name="small", state=self.state, heartbeat=Heartbeat(models=self.small)
                    ),
                    big,
                ]
            )
        if method == "CreateDeployment":
            if self.unknown is not None and not self.ordered:
                raise NotFound("no node has it", fetchable="yes" if self.unknown else "")
            stages = [admin_pb2.StagePlan(member="b")]
            plan = admin_pb2.DeploymentPlan(spec=asked["spec"], rings=[admin_pb2.RingPlan(stages=stages)])
            return admin_pb2.CreateDeploymentResponse(plan=plan)
        self.to_plan = asked.get("to_plan")
        self.ordered.append((method, asked["id"], asked["model"]))
        return None


WHOLE = [Held(name=MODEL, size=10, done=10, fetched=True)]
HEADERS = [Held(name=MODEL, size=10, done=1, fetched=True)]
HALF = [Held(name=MODEL, size=10, done=5)]
ONE = [Held(name=MODEL, size=1, done=1)]
NONE: list[Held] = []


def test_a_model_whose_size_is_not_known_is_not_there() -> None:
    admin = Admin([Held(name=MODEL)], [Held(name=MODEL)], [Held(name="other", size=1, done=1)], ONE)
    said: list[str] = []
    quickly(held.pull(admin, MODEL, ["big"], said.append))  # type: ignore[arg-type]
    assert said == [f"fetching {MODEL} to big: asking which nodes have it"] * 2
    assert quickly(held.pull(Admin(HALF), MODEL, [], said.append, wait=False)) == ["big"]  # type: ignore[arg-type]
    assert len(said) == 2


def test_a_node_that_leaves_while_it_fetches_has_not_fetched() -> None:
    class Leaving(Admin):
        async def call(self, method: str, **asked: Any) -> Any:
            found = await super().call(method, **asked)
            if method == "ListNodes" and self.ordered:
                del found.nodes[-1]
            return found

    said: list[str] = []
    for nodes in (["big"], ["small", "big"]):
        with pytest.raises(NotFound) as caught:
            quickly(held.pull(Leaving(WHOLE), MODEL, nodes, said.append))  # type: ignore[arg-type]
        assert (caught.value.reason, MODEL in caught.value.message) == ("UNKNOWN_NODE", True)
    assert said == []


class Nodes:
    """A coordinator that lists nodes with their models; nodes whose name begins with o are offline."""

    def __init__(self, **nodes: list[Held]) -> None:
        self.removed: list[str] = []
        self.nodes = [
            admin_pb2.Node(
                id=name,
                name=name,
                heartbeat=Heartbeat(models=models, memory_usable=number),
                state=admin_pb2.NODE_STATE_OFFLINE if name[0] == "o" else admin_pb2.NODE_STATE_ONLINE,
            )
            for number, (name, models) in enumerate(nodes.items())
        ]

    async def call(self, method: str, **asked: Any) -> Any:
        if method == "RemoveModel":
            self.removed.append(asked["id"])
        return admin_pb2.ListNodesResponse(nodes=self.nodes)


@pytest.mark.parametrize(
    ("models", "parts", "lacks"),
    [("WHOLE", False, False), ("HEADERS", True, True), ("HALF", False, True), ("NONE", False, False)],
)
def test_parts_of_a_model_are_told_from_all_of_it(models: str, parts: bool, lacks: bool) -> None:
    admin: Any = Nodes(a=globals()[models])
    assert quickly(held.lies_in_parts(admin, MODEL)) == parts
    stages = [admin_pb2.StagePlan(member="a")]
    spec = admin_pb2.DeploymentSpec(model=MODEL)
    plan = admin_pb2.DeploymentPlan(spec=spec, rings=[admin_pb2.RingPlan(stages=stages)])
    assert quickly(held.lacks_parts(admin, plan)) == lacks
    plan.rings[0].stages.add(member="b")
    assert quickly(held.lacks_parts(admin, plan)) == (models != "NONE"), "the second node has nothing"
    assert not quickly(held.lies_in_parts(Nodes(a=HEADERS, b=WHOLE), MODEL))  # type: ignore[arg-type]


def test_what_is_removed_was_fetched_or_comes_or_failed() -> None:
    own = [Held(name=MODEL, size=1, done=1)]
    failed = [Held(name=MODEL, size=1, done=1, problem="it is damaged")]
    admin: Any = Nodes(a=WHOLE, b=HALF, c=failed, d=own, e=[Held(name="other", fetched=True)])
    assert quickly(held.remove(admin, MODEL, [])) == admin.removed == ["a", "b", "c"]
    admin.removed.clear()
    assert quickly(held.remove(admin, MODEL, ["d"])) == admin.removed == ["d"], "for the node to refuse"


def test_a_fetch_that_fails_says_why() -> None:
    admin = Admin([Held(name=MODEL, problem="the disk is full")])
    with pytest.raises(FailedPrecondition) as raised:
        quickly(held.pull(admin, MODEL, [], lambda text: None))  # type: ignore[arg-type]
    assert "the disk is full" in raised.value.message
    with pytest.raises(Unavailable):
        quickly(held.pull(Admin([], online=False), MODEL, [], lambda text: None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "to_plan"), [({}, True), ({"replicas": 2}, False), ({"strategy": "tensor"}, False)]
)
def test_deploy_fetches_what_planning_needs_where_each_node_fetches_its_own_part(
    fields: dict[str, Any], to_plan: bool
) -> None:
    admin = Admin(HEADERS if to_plan else WHOLE)
    spec = admin_pb2.DeploymentSpec(**{"name": "m", "model": MODEL, "strategy": "pipeline"} | fields)
    assert (quickly(create_deployment(admin, spec, lambda text: None)))[1] == to_plan  # type: ignore[arg-type]
    assert admin.to_plan == to_plan
    admin = Admin(WHOLE)
    admin.unknown = False
    with pytest.raises(NotFound):
        quickly(create_deployment(admin, spec, lambda text: None))  # type: ignore[arg-type]


def test_deploy_fetches_a_draft_model_that_no_node_has_to_one_that_has_the_model() -> None:
    """What planning needs of it; the head fetches the rest, for which the command waits longer."""

    class Drafting(Admin):
        async def call(self, method: str, **asked: Any) -> Any:
            if method == "CreateDeployment" and MODEL in [model for _, _, model in self.ordered]:
                if len(self.ordered) == 1 or not self.helps:
                    raise NotFound("no draft model", param="draft", node="big", fetchable="yes")
                spec = asked["spec"]
                small = [model_pb2.Resident(name="draft", model="org/small")]
                stages = [admin_pb2.StagePlan(member="b", residents=small), admin_pb2.StagePlan(member="a")]
                plan = admin_pb2.DeploymentPlan(spec=spec, rings=[admin_pb2.RingPlan(stages=stages)])
                return admin_pb2.CreateDeploymentResponse(plan=plan)
            return await super().call(method, **asked)

        helps = True

    small = Held(name="org/small", size=10, done=1, fetched=True)
    spec = admin_pb2.DeploymentSpec(name="m", model=MODEL, strategy="pipeline", draft="org/small")
    admin = Drafting([*WHOLE, small], small=WHOLE)
    assert (quickly(create_deployment(admin, spec, lambda text: None)))[1]  # type: ignore[arg-type]
    assert admin.ordered == [("PullModel", "b", MODEL), ("PullModel", "b", "org/small")]
    assert admin.to_plan
    whole = Held(name="org/small", size=10, done=10, fetched=True)
    admin = Drafting([*WHOLE, whole], small=WHOLE)
    assert not (quickly(create_deployment(admin, spec, lambda text: None)))[1]  # type: ignore[arg-type]
    admin = Drafting([*WHOLE, whole], small=WHOLE)
    admin.helps = False
    with pytest.raises(NotFound, match="no draft model"):
        quickly(create_deployment(admin, spec, lambda text: None))  # type: ignore[arg-type]
    assert len(admin.ordered) == 2, "each is fetched once"


def test_of_the_members_that_are_named_the_first_fetches_it() -> None:
    spec = admin_pb2.DeploymentSpec(name="m", model=MODEL, strategy="pipeline", members=["small", "big"])
    said: list[str] = []
    admin = Admin(WHOLE, small=WHOLE)
    quickly(create_deployment(admin, spec, said.append))  # type: ignore[arg-type]
    assert (admin.ordered, admin.to_plan, said) == ([("PullModel", "a", MODEL)], True, ["planning m"])


@pytest.mark.parametrize(
    ("replicas", "states", "pulls", "fetches"),
    [
        (1, [HEADERS], 0, True),
        (1, [WHOLE], 0, False),
        (1, [[]], 0, False),
        (2, [HEADERS, HEADERS, WHOLE], 1, False),
        (2, [WHOLE], 0, False),
    ],
)
def test_deploy_again_fetches_what_the_first_time_left_away(
    replicas: int, states: list[list[Held]], pulls: int, fetches: bool
) -> None:
    """As after a deployment that did not fit: the headers are there, so it can be planned at once."""
    admin = Admin(*states)
    admin.unknown = None
    spec = admin_pb2.DeploymentSpec(name="m", model=MODEL, strategy="pipeline", replicas=replicas)
    assert (quickly(create_deployment(admin, spec, lambda text: None)))[1] == fetches  # type: ignore[arg-type]
    assert len(admin.ordered) == pulls
    assert not admin.to_plan
