"""The command itself: where it looks, what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from doctortest import FakeSystem, recording

from sealring.cli.doctor import system
from sealring.cli.doctor.cluster import Node
from sealring.cli.doctor.report import Report, ok, problem
from sealring.cli.main import app


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


def test_the_cluster_needs_an_operator(doctor: Any, sealring: Any) -> None:
    done = sealring("doctor", "--cluster")
    assert done.status == 7
    assert "[NO_OPERATOR_BUNDLE]" in done.err
