"""Plans are made beside the event loop, and hold for the nodes that are there when they are done."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.coordinator.test_planner import GIB, member, profile

from sealring.coordinator.planning import survey as survey_module
from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.planner import plan
from sealring.coordinator.planning.profiles import Answer
from sealring.coordinator.planning.survey import Survey
from sealring.mesh.errors import Conflict
from sealring.v1 import admin_pb2

SPEC = admin_pb2.DeploymentSpec(name="demo", model="demo")


class Surveyed(Survey):
    """What it knows of nodes is given: one list for each look at them, the last for all further ones."""

    def __init__(self, *looks: list[Candidate]) -> None:
        self.looks = list(looks)

    def _candidates(self, *_: Any) -> Any:
        return profile(), self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


async def made(survey: Survey) -> list[str]:
    answers: dict[str, Answer] = {}
    return [stage.member_name for stage in (await survey.plan(SPEC, answers)).rings[0].stages]


async def test_a_plan_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noting(*arguments: Any) -> admin_pb2.DeploymentPlan:
        threads.append(threading.current_thread())
        return plan(*arguments)

    monkeypatch.setattr(survey_module, "plan", noting)
    assert await made(Surveyed([member(1, 2 * GIB)])) == ["node-1"]
    assert threads != []
    assert threading.current_thread() not in threads


async def test_a_node_that_went_meanwhile_is_not_planned_with() -> None:
    """Two looks at the nodes for each attempt: one before, one after."""
    strong, weak = member(1, 4 * GIB), member(2, 2 * GIB)
    gone = member(1, 4 * GIB, obstacle="it is draining")
    assert await made(Surveyed([strong, weak], [strong, weak])) == ["node-1"]
    assert await made(Surveyed([strong, weak], [weak])) == ["node-2"]
    assert await made(Surveyed([strong, weak], [gone, weak])) == ["node-2"]


async def test_nodes_that_never_rest_are_not_waited_for() -> None:
    strong, weak = member(1, 4 * GIB), member(2, 2 * GIB)
    with pytest.raises(Conflict) as caught:
        await made(Surveyed(*[[strong, weak], [weak]] * 3))
    assert caught.value.reason == "NODES_CHANGED"
