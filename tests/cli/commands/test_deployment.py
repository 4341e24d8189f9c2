"""What `sealring deploy` says beside the plan."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sealring.cli.commands import deployment
from sealring.v1 import admin_pb2, membership_pb2

ONLINE, OFFLINE = admin_pb2.NODE_STATE_ONLINE, admin_pb2.NODE_STATE_OFFLINE
NODES = [
    ("a", ONLINE, ""),
    ("b", ONLINE, ""),
    ("c", ONLINE, "other-0"),
    ("d", OFFLINE, ""),
    ("e", ONLINE, ""),
]


class Admin:
    """A coordinator that plans every model on node a."""

    def __init__(self, *, serves: bool) -> None:
        self.serves = serves

    async def call(self, method: str, *, spec: Any = None, **_: Any) -> Any:
        stage = admin_pb2.StagePlan(member="a", member_name="a", end_layer=4)
        plan = admin_pb2.DeploymentPlan(spec=spec, rings=[admin_pb2.RingPlan(ring="m-0", stages=[stage])])
        if method == "PlanDeployment":
            return admin_pb2.PlanDeploymentResponse(plan=plan)
        if method == "CreateDeployment":
            return admin_pb2.CreateDeploymentResponse(plan=plan)
        if method == "ListNodes":
            nodes = [admin_pb2.Node(id=name, state=state, ring=ring) for name, state, ring in NODES]
            return admin_pb2.ListNodesResponse(nodes=nodes)
        if not self.serves:
            raise KeyboardInterrupt
        plan.spec.name = "m"
        ring = admin_pb2.RingStatus(ring="m-0", phase=membership_pb2.RING_PHASE_SERVING)
        return admin_pb2.ListDeploymentsResponse(deployments=[admin_pb2.Deployment(plan=plan, rings=[ring])])


@pytest.fixture
def deploy(here: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*arguments: str, serves: bool = True) -> Any:
        monkeypatch.setattr(
            deployment, "run_admin", lambda context, work: asyncio.run(work(Admin(serves=serves)))
        )
        return here("deploy", "m", *arguments)

    return run


def test_a_plan_is_shown_as_a_table_or_as_json(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "run_admin", lambda context, work: asyncio.run(work(Admin(serves=True))))
    stage = here("deployment", "plan", "m", "--json").data["rings"][0]["stages"][0]
    assert (stage["member"], stage["end_layer"]) == ("a", 4)
    assert "m-0" in here("deployment", "plan", "m").out


def test_it_says_how_many_nodes_are_left_out(deploy: Any) -> None:
    done = deploy()
    assert done.status == 0, done.err
    assert "m is serving" in done.err
    assert "2 online hold none of it" in done.err
    assert "2 online" not in deploy("--stages", "1").err, "it was asked for"


def test_ctrl_c_tells_that_the_deployment_goes_on(deploy: Any) -> None:
    done = deploy(serves=False)
    assert done.status == 130
    assert "goes on without this command" in done.err
    assert "sealring deployment delete m" in done.err
