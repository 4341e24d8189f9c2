"""`sealring` without a word, in each state of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bundles import SigningCluster

from sealring.mesh.errors import Unavailable
from sealring.mesh.pki.certificates import Role
from sealring.mesh.system.paths import state_root_of
from sealring.v1 import admin_pb2, membership_pb2

NODE = admin_pb2.Node(id="a", name="mac-1", state=admin_pb2.NODE_STATE_ONLINE)
SERVING, DOWN = membership_pb2.RING_PHASE_SERVING, membership_pb2.RING_PHASE_DOWN


def typed(text: str) -> list[str]:
    """The commands that it names, in their order."""
    return [line.split("   ")[0].strip() for line in text.splitlines() if line.startswith("  ")]


def test_a_machine_in_no_cluster_may_begin_one_or_join(here: Any) -> None:
    done = here()
    assert done.status == 0
    assert typed(done.out) == ["sealring up", "sealring join", "sealring demo", "sealring --help"]
    assert done.err == ""


@pytest.fixture
def first(home: Path, coordinator: Any) -> Any:
    """A first machine whose coordinator has one node."""
    SigningCluster(home).save(state_root_of(home) / "coordinator/operator", Role.OPERATOR)
    (state_root_of(home) / "config").mkdir()
    (state_root_of(home) / "config/gateway.toml").write_text('[gateway]\nhttp_listen = "127.0.0.1:8080"\n')
    coordinator.answers["ListNodes"] = admin_pb2.ListNodesResponse(nodes=[NODE])
    return coordinator


def deployments(phase: Any, **spec: Any) -> Any:
    plan = admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name="demo", **spec))
    rings = [] if phase is None else [admin_pb2.RingStatus(ring="demo-0", phase=phase)]
    return admin_pb2.ListDeploymentsResponse(deployments=[admin_pb2.Deployment(plan=plan, rings=rings)])


def test_a_first_machine_that_does_not_run_is_started(here: Any, first: Any) -> None:
    first.answers["ListNodes"] = Unavailable("the coordinator cannot be reached")
    done = here()
    assert typed(done.out)[:2] == ["sealring up", "sealring doctor"]
    assert "the coordinator cannot be reached" in done.out
    first.answers["ListNodes"] = Unavailable("the coordinator cannot be reached", reason="UNREACHABLE")
    assert "this first machine of a cluster does not run" in here().out


def test_a_cluster_without_a_model_gets_one_or_more_machines(here: Any, first: Any) -> None:
    done = here()
    assert "1 of 1 nodes online (mac-1)" in done.out
    assert typed(done.out) == ["sealring deploy MODEL", "sealring token code", "sealring --help"]


def test_a_model_that_is_not_served_yet_is_watched(here: Any, first: Any) -> None:
    first.answers["ListDeployments"] = deployments(DOWN)
    assert typed(here().out)[:2] == ["sealring status --watch", "sealring doctor --cluster"]


@pytest.mark.parametrize(("phase", "spec"), [(SERVING, {}), (None, {"on_demand": True})])
def test_a_cluster_that_serves_is_asked(here: Any, first: Any, phase: Any, spec: Any) -> None:
    first.answers["ListDeployments"] = deployments(phase, **spec)
    assert typed(here().out) == [
        'sealring chat "..."',
        "http://127.0.0.1:8080/v1",
        "sealring connect NAME",
        "sealring status",
        "sealring --help",
    ]


@pytest.mark.parametrize("runs", [True, False])
def test_another_machine_says_what_it_is_and_whether_it_runs(
    here: Any, host: Any, home: Path, runs: bool
) -> None:
    SigningCluster(home).save(state_root_of(home) / "node", Role.MEMBER)
    (state_root_of(home) / "config").mkdir()
    (state_root_of(home) / "config/node.toml").write_text('[node]\nlisten = "10.0.0.2:7710"\n')
    host.ports = {7710} if runs else set()
    done = here()
    assert "this machine is the node operator of cluster" in done.out
    assert typed(done.out)[0] == ("sealring doctor" if runs else "sealring join")
    assert ("this node serves nothing now" in done.out) is runs


def test_settings_that_cannot_be_read_are_no_fault(here: Any, home: Path) -> None:
    (home / "bad.toml").write_text("[cli\n")
    done = here("--config", "bad.toml")
    assert (done.status, typed(done.out)[0]) == (0, "sealring config show")
