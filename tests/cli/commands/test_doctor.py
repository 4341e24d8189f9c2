"""The command itself: where it looks, what it prints, and its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.testing
from doctortest import FakeSystem, recording

from sealring.cli.commands import doctor as command
from sealring.cli.main import app
from sealring.doctor import __main__ as module
from sealring.doctor import system
from sealring.doctor.cluster import Node, Stage
from sealring.doctor.report import Report, decode, encode, ok, problem
from sealring.mesh.errors import Unavailable
from sealring.mesh.system.paths import default_state_root
from sealring.v1 import admin_pb2, diagnosis_pb2


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs it on a made-up machine, in an empty home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)

    def run(machine: FakeSystem, *arguments: str) -> Any:
        monkeypatch.setattr(system, "System", lambda: machine)
        return typer.testing.CliRunner().invoke(app, ["doctor", *arguments])

    return run


def test_a_machine_before_it_joins(doctor: Any) -> None:
    done = doctor(FakeSystem(platform="linux"))
    assert done.exit_code == 0, done.output
    assert "there is no enrolment in" in done.output
    assert "\n0 problems, 0 warnings" in done.output


def test_a_problem_is_the_exit_status(doctor: Any) -> None:
    machine = FakeSystem({"/usr/bin/codesign -dv": recording("codesign-anonymous.txt")})
    done = doctor(machine)
    assert done.exit_code == 13
    assert done.stdout.startswith("problem  the interpreter")
    assert "$ /usr/bin/codesign -f -s - -i org.sealring.python" in done.stdout


def test_json(doctor: Any) -> None:
    done = doctor(FakeSystem(free_space=(0, 1)), "--json")
    assert done.exit_code == 13
    told = json.loads(done.stdout)
    assert told["facts"]["memory"] == 64 << 30
    assert {"disk.space": "problem"}.items() <= {
        one["id"]: one["severity"] for one in told["findings"]
    }.items()


def test_a_folder_that_is_named(doctor: Any, tmp_path: Path) -> None:
    done = doctor(FakeSystem(), "--state-dir", str(tmp_path / "elsewhere"))
    assert f"there is no enrolment in {tmp_path}/elsewhere" in done.output


def test_settings_that_up_and_join_left_beside_the_folder(doctor: Any, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "node.toml").write_text('[node]\nname = "from-join"\nmodels = ["/nowhere"]\n')
    done = doctor(FakeSystem(folder=None), "--json", "--state-dir", str(tmp_path / "node"))
    told = json.loads(done.stdout)
    assert told["facts"]["name"] == "from-join"
    assert "the model folder /nowhere is not there" in {one["what"] for one in told["findings"]}
    (tmp_path / "s.toml").write_text('[node]\nname = "from-the-file"\n')
    named = ["--config", str(tmp_path / "s.toml"), "doctor", "--json", "--state-dir", str(tmp_path / "node")]
    told = json.loads(typer.testing.CliRunner().invoke(app, named).stdout)
    assert told["facts"]["name"] == "from-the-file"


def test_what_cannot_be_looked_at_is_not_there() -> None:
    def exists() -> bool:
        raise PermissionError

    closed: Any = SimpleNamespace(exists=exists)
    assert not command._is_there(closed)


@pytest.mark.parametrize(
    ("own", "service", "named", "chosen"),
    [
        (False, False, (), "own"),
        (False, True, (), "service"),
        (True, True, (), "own"),
        (False, True, ("--config", "s.toml"), "own"),
        (False, True, ("doctor", "--state-dir", "named"), "named"),
    ],
)
def test_a_service_is_looked_at_where_this_user_has_no_node(
    doctor: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: bool,
    service: bool,
    named: Any,
    chosen: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text("")
    monkeypatch.setattr("sealring.cli.service.launchd.STATE_FOLDER", tmp_path / "service")
    places = {"own": default_state_root() / "node", "service": tmp_path / "service" / "node"}
    places["named"] = Path("named")
    for name, there in (("own", own), ("service", service)):
        if there:
            places[name].mkdir(parents=True)
    monkeypatch.setattr(system, "System", lambda: FakeSystem())
    command_line = named if "doctor" in named else [*named, "doctor"]
    done = typer.testing.CliRunner().invoke(app, command_line)
    assert f"there is no enrolment in {places[chosen]}" in done.output


def test_the_cluster_is_shown_node_by_node(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = (problem("disk.space", "the disk is full"), ok("memory", "there is memory"))
    nodes = [
        Node("1", "mini", online=True, report=Report(findings=own)),
        Node("2", "studio", online=True, failure="it did not answer"),
    ]
    monkeypatch.setattr("sealring.cli.commands.doctor.run_admin", lambda *_: nodes)
    done = doctor(FakeSystem(), "--cluster")
    assert done.exit_code == 13
    together, shown = done.stdout.split("\nmini: 1 problem, 0 warnings, 0 notes, 1 ok\n")
    assert "it did not answer" in together
    assert "the disk is full" in shown
    assert "there is memory" not in shown
    assert "studio" not in shown
    assert len(json.loads(doctor(FakeSystem(), "--cluster", "--json").stdout)["nodes"]) == 2


async def test_nodes_are_asked_a_few_at_once_and_those_that_are_offline_not_at_all() -> None:
    """Each examines its machine for seconds; one that fails leaves the others their reports."""
    asking, most, asked = 0, 0, list[tuple[str, float]]()
    online, draining, offline = (
        admin_pb2.NODE_STATE_ONLINE,
        admin_pb2.NODE_STATE_DRAINING,
        admin_pb2.NODE_STATE_OFFLINE,
    )
    stage = admin_pb2.StagePlan(member="id-0", weight_bytes=3, kv_bytes=4)
    plan = admin_pb2.DeploymentPlan(rings=[admin_pb2.RingPlan(ring="demo-0", stages=[stage])])

    async def call(method: str, id: str = "", seconds: float = 0.0) -> Any:
        nonlocal asking, most
        if method == "ListNodes":
            states = [online] * 18 + [draining, offline]
            nodes = [
                admin_pb2.Node(id=f"id-{number}", name=f"mac-{number}", state=state, memory_usable=5)
                for number, state in enumerate(states)
            ]
            return admin_pb2.ListNodesResponse(nodes=nodes)
        if method == "ListDeployments":
            return admin_pb2.ListDeploymentsResponse(deployments=[admin_pb2.Deployment(plan=plan)])
        asked.append((id, seconds))
        asking += 1
        most = max(most, asking)
        for _ in range(3):
            await asyncio.sleep(0)
        asking -= 1
        if id == "id-3":
            raise Unavailable("it is busy")
        report = encode(Report(findings=(ok("a", "fine"),)))
        return admin_pb2.DiagnoseNodeResponse(report=report, clock_offset=5 * 10**8, clock_error=10**6)

    nodes = await command._nodes(SimpleNamespace(call=call))  # type: ignore[arg-type]
    assert most == 8
    assert asked == [(f"id-{number}", 120.0) for number in range(19)]
    first, busy, last = nodes[0], nodes[3], nodes[19]
    assert (first.member, first.name, first.online, first.memory_usable) == ("id-0", "mac-0", True, 5)
    assert first.stages == (Stage("demo-0", 3, 4),)
    assert (first.offset, first.offset_error, first.failure) == (0.5, 0.001, "")
    assert (busy.failure, busy.report, busy.stages) == ("it is busy", None, ())
    assert (last.failure, last.online, nodes[18].online) == ("it is offline", False, True)


def test_a_daemon_asks_on_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did = list[str]()
    monkeypatch.setattr("sealring.mesh.system.start.hide_rich", lambda: did.append("lean"))
    monkeypatch.setattr("sealring.mesh.system.start.collect_seldom", lambda: did.append("seldom"))
    monkeypatch.setattr("sealring.mesh.system.start.forbid_core_files", lambda: did.append("no cores"))
    monkeypatch.setattr(system, "System", lambda: FakeSystem(platform="linux"))
    told = diagnosis_pb2.DiagnoseResponse(file_limit=1).SerializeToString().hex()
    asked = json.dumps({"settings": {"state_dir": str(tmp_path), "name": "mini"}, "daemon": told}).encode()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=io.BytesIO()))
    monkeypatch.delitem(sys.modules, module.__name__)
    for padded, read in ((asked.ljust(1 << 20), True), (asked.rjust((1 << 20) + 1), False)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(padded)))
        with contextlib.nullcontext() if read else pytest.raises(json.JSONDecodeError):
            runpy.run_module("sealring.doctor", run_name="__main__")
    report = decode(sys.stdout.buffer.getvalue())  # type: ignore[attr-defined]
    assert report.facts.name == "mini"
    assert "only 1 files may be open" in {one.what for one in report.findings}
    assert did == ["lean", "seldom", "no cores"] * 2
    runpy.run_module(module.__name__, run_name="another")
    assert len(did) == 6


def test_the_cluster_needs_an_operator(doctor: Any, sealring: Any) -> None:
    done = sealring("doctor", "--cluster")
    assert done.status == 7
    assert "[NO_OPERATOR_BUNDLE]" in done.err
