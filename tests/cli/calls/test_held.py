"""Models on nodes: shown, fetched, removed."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.calls import held
from sealring.cli.commands import deployment
from sealring.cli.commands.deployment import _create
from sealring.cli.terminal.output import plain
from sealring.mesh.errors import FailedPrecondition, NotFound, Unavailable
from sealring.v1 import admin_pb2, membership_pb2

MODEL = "org/model"
Held = membership_pb2.HeldModel


class Admin:
    """A coordinator of two nodes; each look finds the next of the states that its model goes through."""

    def __init__(self, *states: list[Held], online: bool = True) -> None:
        self.states = list(states)
        self.state = admin_pb2.NODE_STATE_ONLINE if online else admin_pb2.NODE_STATE_OFFLINE
        self.ordered: list[tuple[str, str, str]] = []
        self.unknown: bool | None = True
        """Planning fails until a pull was ordered, which might help; None: it does not."""
        self.to_plan: bool | None = None

    async def call(self, method: str, **asked: Any) -> Any:
        if method == "ListNodes":
            models = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            big = admin_pb2.Node(id="b", name="big", state=self.state, memory_usable=9, models=models)
            return admin_pb2.ListNodesResponse(
                nodes=[admin_pb2.Node(id="a", name="small", state=self.state), big]
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


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(held, "_STALE_SECONDS", 0.0)


WHOLE = [Held(name=MODEL, size=10, done=10, fetched=True)]
HEADERS = [Held(name=MODEL, size=10, done=1, fetched=True)]
HALF = [Held(name=MODEL, size=10, done=5)]


async def test_a_model_is_fetched_by_the_node_with_most_memory_and_waited_for() -> None:
    admin, said = Admin([], [], HALF, WHOLE), []
    assert await held.pull(admin, MODEL, [], said.append) == ["big"]  # type: ignore[arg-type]
    assert admin.ordered == [("PullModel", "b", MODEL)]
    assert any("50% of" in one for one in said)


async def test_a_fetch_that_fails_says_why() -> None:
    admin = Admin([Held(name=MODEL, problem="the disk is full")])
    with pytest.raises(FailedPrecondition) as raised:
        await held.pull(admin, MODEL, [], lambda text: None)  # type: ignore[arg-type]
    assert "the disk is full" in raised.value.message
    with pytest.raises(Unavailable):
        await held.pull(Admin([], online=False), MODEL, [], lambda text: None)  # type: ignore[arg-type]


async def test_only_nodes_that_fetched_it_are_asked_to_remove_it() -> None:
    admin = Admin(WHOLE)
    assert await held.remove(admin, MODEL, []) == ["big"]  # type: ignore[arg-type]
    assert admin.ordered == [("RemoveModel", "b", MODEL)]
    with pytest.raises(NotFound):
        await held.remove(Admin([Held(name=MODEL, size=1, done=1)]), MODEL, [])  # type: ignore[arg-type]


async def test_deploy_fetches_what_no_node_has() -> None:
    admin, spec = Admin(WHOLE), admin_pb2.DeploymentSpec(name="m", model=MODEL)
    answer, fetches = await _create(admin, spec, lambda text: None)  # type: ignore[arg-type]
    assert answer.plan.spec == spec
    assert not fetches
    assert admin.ordered == [("PullModel", "b", MODEL)]


@pytest.mark.parametrize(
    ("fields", "to_plan"), [({}, True), ({"replicas": 2}, False), ({"strategy": "tensor"}, False)]
)
async def test_deploy_fetches_what_planning_needs_where_each_node_fetches_its_own_part(
    fields: dict[str, Any], to_plan: bool
) -> None:
    admin = Admin(HEADERS if to_plan else WHOLE)
    spec = admin_pb2.DeploymentSpec(**{"name": "m", "model": MODEL, "strategy": "pipeline"} | fields)
    assert (await _create(admin, spec, lambda text: None))[1] == to_plan  # type: ignore[arg-type]
    assert admin.to_plan == to_plan
    admin = Admin(WHOLE)
    admin.unknown = False
    with pytest.raises(NotFound):
        await _create(admin, spec, lambda text: None)  # type: ignore[arg-type]


async def test_of_the_members_that_are_named_the_first_fetches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def pull(admin: Any, model: str, nodes: Any, tell: Any, **how: Any) -> None:
        asked.append((model, list(nodes), how))
        admin.ordered.append(("PullModel", "b", model))

    monkeypatch.setattr(deployment, "pull", pull)
    spec = admin_pb2.DeploymentSpec(name="m", model=MODEL, strategy="pipeline", members=["b", "a"])
    said: list[str] = []
    await _create(Admin(WHOLE), spec, said.append)  # type: ignore[arg-type]
    assert asked == [(MODEL, ["b"], {"to_plan": True})]
    assert said == ["planning m"]


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
async def test_deploy_again_fetches_what_the_first_time_left_away(
    replicas: int, states: list[list[Held]], pulls: int, fetches: bool
) -> None:
    """As after a deployment that did not fit: the headers are there, so it can be planned at once."""
    admin = Admin(*states)
    admin.unknown = None
    spec = admin_pb2.DeploymentSpec(name="m", model=MODEL, strategy="pipeline", replicas=replicas)
    assert (await _create(admin, spec, lambda text: None))[1] == fetches  # type: ignore[arg-type]
    assert len(admin.ordered) == pulls
    assert not admin.to_plan


def test_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    models = [
        *HALF,
        Held(name="later"),
        Held(name="piece", size=8, done=2, fetched=True),
        Held(name="bad", size=1, problem="no\x1b[31m network"),
    ]
    nodes = [plain(admin_pb2.Node(name="a", models=WHOLE)), plain(admin_pb2.Node(name="b", models=models))]
    held.print_models(nodes)
    out = capsys.readouterr().out
    lines = {name: line for line in out.splitlines() for name in line.split()[:2]}
    assert "whole" in lines[MODEL]
    assert "50%" in lines[MODEL]
    assert "waits" in lines["later"]
    assert "part, 25%" in lines["piece"]
    assert "failed" in lines["bad"]
    assert "b does not get bad: no?[31m network" in out
    held.print_models([])
    assert "no node has a model" in capsys.readouterr().err
