"""The transcripts beside this file: what commands print, ask of the coordinator and exit with."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transcripts import Scene, Section, Stage, find_sections

from sealring.v1 import admin_pb2

FOLDER = Path(__file__).with_name("transcripts")


def enrolled(stage: Stage) -> None:
    """A machine that joins is enrolled as m1 in the cluster attic."""
    peer = SimpleNamespace(id="m1", cluster="attic")
    stage.host.enrolled = SimpleNamespace(state=SimpleNamespace(peer=peer))


def planner(stage: Stage) -> None:
    """The coordinator plans every model on node a."""

    def planned(request: Any) -> admin_pb2.DeploymentPlan:
        ring = admin_pb2.RingPlan(
            ring="m-0", stages=[admin_pb2.StagePlan(member="a", member_name="a", end_layer=4)]
        )
        return admin_pb2.DeploymentPlan(spec=request.spec, rings=[ring])

    stage.answer("PlanDeployment", lambda asked: admin_pb2.PlanDeploymentResponse(plan=planned(asked)))
    stage.answer("CreateDeployment", lambda asked: admin_pb2.CreateDeploymentResponse(plan=planned(asked)))


def ends_soon(stage: Stage) -> None:
    assert stage.coordinator is not None
    stage.coordinator.root = SimpleNamespace(ends=4_000_000_000.5, ends_soon=lambda now: True)  # type: ignore[assignment]


def check(stage: Stage, *changes: str) -> None:
    """What comparing a model with its stages comes to: nothing wrong but these."""
    report: dict[str, Any] = {
        "model_type": "llama",
        "layers": 3,
        "stages": [[0, 2], [2, 3]],
        "weights": "random",
    }
    report |= {"exact": True, "tokens_equal": True, "alone_equal": True, "right": True, "max_abs_diff": 0.0}
    changed = {name: ast.literal_eval(value) for name, _, value in (one.partition("=") for one in changes)}
    stage.host.reports["check"] = report | {"template": None} | changed


SCENES: dict[str, Scene] = {
    one.__name__.replace("_", "-"): one for one in (enrolled, planner, ends_soon, check)
}


@pytest.mark.parametrize("section", find_sections(FOLDER), ids=lambda one: f"{one.file.stem}: {one.title}")
def test_a_transcript(
    section: Section,
    home: Path,
    host: Any,
    here: Any,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = Stage(home, host, here, SCENES).play(section)
    if pytestconfig.getoption("--update", default=False):
        section.update(shown)
    else:
        assert shown.splitlines() == section.text.splitlines(), "pytest --update writes what came out"
