"""What `sealring deploy` says beside the plan."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
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
            nodes = [
                admin_pb2.Node(id=name, state=state, rings=[admin_pb2.NodeRing(ring=ring)] if ring else [])
                for name, state, ring in NODES
            ]
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


def test_shapes_are_shown_beside_a_plan_and_without_a_cluster(here: Any, tmp_path: Path) -> None:
    file = tmp_path / "purchase.json"
    machine = {"name": "mac", "count": 2, "usable_gib": 8, "gb_per_s": 100, "row_share": 0.1}
    model = {"layers": 4, "layer_bytes": 1 << 28, "kv_bytes_per_token": 64, "handoff_bytes_per_token": 64}
    file.write_text(json.dumps({"model": model, "machines": [machine]}))
    shown = here("deployment", "plan", "--simulate", str(file))
    assert "pipeline *  mac-1" in shown.out, shown.err
    assert "tensor      mac-1+mac-2" in shown.out
    assert "assumed of links" in shown.out
    told = here("deployment", "plan", "--simulate", str(file), "--stages", "2", "--json").data
    assert [one["planned"] for one in told["shapes"]["shapes"]].count(True) == 1
    assert len(told["rings"][0]["stages"]) == 2
    for arguments in (
        ["m", "--simulate", str(file)],
        ["--simulate", str(file), "--kv-bits", "8"],
        ["--simulate", str(file), "--replicas", "2"],
        ["--simulate", str(tmp_path / "none")],
    ):
        assert "BAD_SIMULATION" in here("deployment", "plan", *arguments).err
    assert "MODEL_MISSING" in here("deployment", "plan").err
    file.write_text(" " * (1 << 20) + "{}")
    assert "FILE_TOO_LARGE" in here("deployment", "plan", "--simulate", str(file)).err


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
