"""The command itself: where it looks, what it prints, and its exit status."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Coordinator
from doctortest import FakeSystem

from sealring.cli.commands import doctor as command
from sealring.doctor.report import Report, decode, encode, ok, problem
from sealring.mesh.errors import Unavailable
from sealring.mesh.system.paths import state_root_of
from sealring.v1 import admin_pb2, diagnosis_pb2


@pytest.fixture
def doctor(here: Any, host: Any) -> Any:
    """Runs it on a made-up machine."""

    def run(machine: FakeSystem, *arguments: str, before: Sequence[str] = ()) -> Any:
        host.examined = machine
        return here(*before, "doctor", *arguments)

    return run


def test_a_machine_before_it_joins(doctor: Any) -> None:
    done = doctor(FakeSystem(platform="linux"))
    assert done.status == 0, done.err
    assert "there is no enrolment in" in done.out
    assert done.err.splitlines()[-1].startswith("0 problems, 0 warnings")


def test_json(doctor: Any) -> None:
    done = doctor(FakeSystem(free_space=(0, 1)), "--json")
    assert done.status == 13
    told = json.loads(done.out)
    assert told["facts"]["memory"] == 64 << 30
    assert {"disk.space": "problem"}.items() <= {
        one["id"]: one["severity"] for one in told["findings"]
    }.items()


def test_settings_that_up_and_join_left_beside_the_folder(doctor: Any, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "node.toml").write_text('[node]\nname = "from-join"\nmodels = ["/nowhere"]\n')
    done = doctor(FakeSystem(folder=None), "--json", "--state-dir", str(tmp_path / "node"))
    told = json.loads(done.out)
    assert told["facts"]["name"] == "from-join"
    assert "the model folder /nowhere is not there" in {one["what"] for one in told["findings"]}
    (tmp_path / "s.toml").write_text('[node]\nname = "from-the-file"\n')
    before, options = (
        ("--config", str(tmp_path / "s.toml")),
        ("--json", "--state-dir", str(tmp_path / "node")),
    )
    told = doctor(FakeSystem(folder=None), *options, before=before).data
    assert told["facts"]["name"] == "from-the-file"


def test_a_service_is_looked_at_where_this_user_has_no_node(
    doctor: Any, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.cli.service.launchd.STATE_FOLDER", tmp_path / "service")
    service, own = tmp_path / "service" / "node", state_root_of(home) / "node"
    service.mkdir(parents=True)
    (home / "s.toml").touch()
    for before, options, folder in (
        ((), (), service),
        (("--config", "s.toml"), (), own),
        ((), ("--state-dir", "named"), Path("named")),
    ):
        done = doctor(FakeSystem(platform="linux"), *options, before=before)
        assert f"there is no enrolment in {folder}" in done.out
    own.mkdir(parents=True)
    assert f"there is no enrolment in {own}" in doctor(FakeSystem(platform="linux")).out


def test_the_cluster_is_shown_node_by_node(doctor: Any, coordinator: Any) -> None:
    """Each examines its machine for seconds; one that fails leaves the others their reports."""
    online, offline = admin_pb2.NODE_STATE_ONLINE, admin_pb2.NODE_STATE_OFFLINE
    own = (problem("disk.space", "the disk is full"), ok("memory", "there is memory"))
    report = encode(Report(findings=own))
    stage = admin_pb2.StagePlan(member="id-0", weight_bytes=3, kv_bytes=4)
    plan = admin_pb2.DeploymentPlan(rings=[admin_pb2.RingPlan(ring="demo-0", stages=[stage])])
    states = {"mini": online, "studio": online, "book": offline}
    nodes = [admin_pb2.Node(id=f"id-{name}", name=name, state=state) for name, state in states.items()]

    def diagnose(asked: Any) -> Any:
        if asked.id == "id-studio":
            raise Unavailable("it is busy")
        return admin_pb2.DiagnoseNodeResponse(report=report, clock_offset=5 * 10**8, clock_error=10**6)

    coordinator.answers = {
        "ListNodes": admin_pb2.ListNodesResponse(nodes=nodes),
        "ListDeployments": admin_pb2.ListDeploymentsResponse(deployments=[admin_pb2.Deployment(plan=plan)]),
        "DiagnoseNode": diagnose,
    }
    done = doctor(FakeSystem(), "--cluster")
    assert done.status == 13
    together, shown = done.out.split("\nmini: 1 problem, 0 warnings, 0 notes, 1 ok\n")
    assert "it is busy" in together
    assert "the disk is full" in shown
    assert "there is memory" not in shown
    assert "studio" not in shown
    assert [asked.id for asked in coordinator.calls("DiagnoseNode")] == ["id-mini", "id-studio"]
    found = {one["name"]: one for one in doctor(FakeSystem(), "--cluster", "--json").data["nodes"]}
    assert (found["mini"]["clock_offset_s"], found["mini"]["clock_error_s"]) == (0.5, 0.001)
    assert (found["studio"]["failure"], found["studio"]["report"]) == ("it is busy", None)
    assert (found["book"]["failure"], found["book"]["online"]) == ("it is offline", False)


async def test_nodes_are_asked_a_few_at_once() -> None:
    asking = most = 0
    nodes = [admin_pb2.Node(id=f"{n}", state=admin_pb2.NODE_STATE_ONLINE) for n in range(19)]

    class Admin(Coordinator):
        async def call(self, method: str, **fields: Any) -> Any:
            nonlocal asking, most
            found = await super().call(method, **fields)
            asking += method == "DiagnoseNode"
            most = max(most, asking)
            for _ in range(3):
                await asyncio.sleep(0)
            asking -= method == "DiagnoseNode"
            return found

    report = admin_pb2.DiagnoseNodeResponse(report=encode(Report(findings=(ok("a", "fine"),))))
    admin: Any = Admin(ListNodes=admin_pb2.ListNodesResponse(nodes=nodes), DiagnoseNode=report)
    assert len(await command.diagnose_all(admin)) == 19
    assert most == 8


def test_a_daemon_asks_on_standard_input(tmp_path: Path) -> None:
    told = diagnosis_pb2.DiagnoseResponse(file_limit=1).SerializeToString().hex()
    asked = json.dumps({"settings": {"state_dir": str(tmp_path), "name": "mini"}, "daemon": told}).encode()
    for given, read in ((asked.ljust(1 << 20), True), (asked.rjust((1 << 20) + 1), False)):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "sealring.doctor"], input=given, capture_output=True, check=False
        )
        assert (done.returncode == 0) == read
        if read:
            report = decode(done.stdout)
            assert report.facts.name == "mini"
            assert "only 1 files may be open" in {one.what for one in report.findings}


def test_the_cluster_needs_an_operator(here: Any) -> None:
    done = here("doctor", "--cluster")
    assert done.status == 7
    assert "[NO_OPERATOR_BUNDLE]" in done.err
