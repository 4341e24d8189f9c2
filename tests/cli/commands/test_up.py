"""`sealring up`, over a first machine that starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import Machine, quickly

from sealring.cli.commands.up import serve_model
from sealring.mesh.errors import FailedPrecondition
from sealring.v1 import admin_pb2, membership_pb2


@pytest.fixture
def up(here: Any, host: Any, coordinator: Any) -> Any:
    host.machine = Machine
    return lambda *options: here("up", *options)


def test_the_home_folder_is_found_where_no_shell_does(up: Any, home: Path) -> None:
    (home / "kept").mkdir()
    assert up("--models=~/kept", "--models", ".").status == 0
    assert Machine.made.settings["node"]["models"] == [str(home / "kept"), str(home)]
    assert "there is no folder" in up("--models", "none").err


def serving(name: str) -> Any:
    plan = admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name=name, model=name))
    ring = admin_pb2.RingStatus(ring=f"{name}-0", phase=membership_pb2.RING_PHASE_SERVING)
    return admin_pb2.ListDeploymentsResponse(deployments=[admin_pb2.Deployment(plan=plan, rings=[ring])])


def test_with_a_model_it_goes_on_until_that_is_served(host: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The model does not fit on one machine, and a second one comes."""
    machine = Machine(Path("/state"), {}, say=print)
    none = admin_pb2.ListDeploymentsResponse()
    small = FailedPrecondition("demo needs 9 GiB more", reason="DOES_NOT_FIT")
    machine.admin.answers |= {
        "CreateDeployment": [small, admin_pb2.CreateDeploymentResponse()],
        "ListDeployments": [none, none, serving("demo")],
    }
    quickly(serve_model(machine, "demo"))  # type: ignore[arg-type]
    assert [one.spec.model for one in machine.admin.calls("CreateDeployment")] == ["demo", "demo"]
    said = capsys.readouterr().err
    assert "demo is not served yet: demo needs 9 GiB more; it is tried again when another" in said
    assert 'demo is serving. Ask it in another terminal: sealring chat "..."' in said
    assert "HTTP requests that name no temperature have 1" in said


def test_a_model_that_is_served_already_is_not_deployed_again(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(Path("/state"), {}, say=print)
    machine.admin.answers["ListDeployments"] = serving("demo")
    quickly(serve_model(machine, "demo"))  # type: ignore[arg-type]
    assert machine.admin.calls("CreateDeployment") == []
    assert "demo is serving" in capsys.readouterr().err
