"""The menu bar's item over what `sealring status --json` and `usage --json` really print."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Coordinator

from sealring.v1 import admin_pb2, membership_pb2

ITEM = Path(__file__).parents[2] / "deploy" / "menubar" / "sealring.5s.py"
ONLINE, OFFLINE = admin_pb2.NODE_STATE_ONLINE, admin_pb2.NODE_STATE_OFFLINE
FORMING, SERVING = membership_pb2.RING_PHASE_FORMING, membership_pb2.RING_PHASE_SERVING
DOWN = membership_pb2.RING_PHASE_DOWN
Play = Callable[..., list[str]]

PROGRAM = """#!/bin/sh
case "$1" in
  status) cat "$HOME/status.json"; cat "$HOME/said" >&2; exit "$(cat "$HOME/exit")";;
  usage) cat "$HOME/usage.json";;
  dashboard) echo http://127.0.0.1:1234/#token >&2;;
esac
"""


@pytest.fixture
def shown(here: Any, coordinator: Coordinator, home: Path) -> Play:
    """The menu while the cluster has these nodes and deployments, or `sealring` fails with these words."""

    def show(
        nodes: dict[str, Any],
        *deployments: Any,
        tokens: int = 0,
        said: str = "",
        arguments: tuple[str, ...] = (),
    ) -> list[str]:
        coordinator.answers["ListNodes"] = admin_pb2.ListNodesResponse(
            nodes=[{"id": name, "name": name, "state": state} for name, state in nodes.items()]
        )
        coordinator.answers["ListDeployments"] = admin_pb2.ListDeploymentsResponse(deployments=deployments)
        (home / "status.json").write_text(here("status", "--json").out if not said else "")
        (home / "usage.json").write_text(json.dumps([{"key": "", "answered_tokens": tokens}]))
        (home / "said").write_text(said)
        (home / "exit").write_text("5" if said else "0")
        program = home / ".local/bin/sealring"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(PROGRAM)
        program.chmod(0o755)
        return run(home, *arguments)

    return show


def run(home: Path, *arguments: str, **environment: str) -> list[str]:
    """The lines that the item prints, in an environment like SwiftBar's."""
    given = {"HOME": str(home), "PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(
        [sys.executable, str(ITEM), *arguments], env=given, capture_output=True, check=True, cwd="/"
    )
    return done.stdout.decode().splitlines()


def deployment(phase: Any, *members: str, reason: str = "", name: str = "demo") -> Any:
    stages = [{"member": one, "member_name": one, "end_layer": 4} for one in members]
    plan = admin_pb2.DeploymentPlan(rings=[{"ring": "demo-0", "stages": stages}])
    plan.spec.name = name
    rings = [] if phase is None else [{"ring": "demo-0", "phase": phase, "reason": reason}]
    return admin_pb2.Deployment(plan=plan, rings=rings)


def test_what_serves_and_how_fast(shown: Play, home: Path) -> None:
    nodes = {"mini": ONLINE, "studio": ONLINE}
    lines = shown(nodes, deployment(SERVING, "studio", "mini"), tokens=100)
    assert lines[:4] == ["●", "---", "2 of 2 machines online", "demo serves on mini, studio"]
    kept = home / "Library/Caches/sealring-menubar/tokens.json"
    ((then, tokens),) = json.loads(kept.read_text())
    kept.write_text(json.dumps([[then - 1, tokens]]))
    title = shown(nodes, deployment(SERVING, "studio", "mini"), tokens=100_100)[0]
    assert title.startswith("● ")
    assert title.endswith(" t/s")
    assert 1000 < int(title.split()[1]) <= 100_000, "100,000 tokens in a second and what the test took"


@pytest.mark.parametrize("kept", ["", "[[1]]", "{}", "null", '[["a", 1]]', "[[9e99, 5]]", "[" * 10_000])
def test_a_damaged_note_of_tokens_is_forgotten(shown: Play, home: Path, kept: str) -> None:
    folder = home / "Library/Caches/sealring-menubar"
    folder.mkdir(parents=True)
    (folder / "tokens.json").write_text(kept)
    assert shown({"studio": ONLINE}, deployment(SERVING, "studio"))[0] == "●"


def test_a_model_that_loads(shown: Play) -> None:
    lines = shown({"studio": ONLINE}, deployment(FORMING, "studio"))
    assert lines[0] == "◌ loading"
    assert "demo is loading" in lines


def test_a_member_away(shown: Play) -> None:
    """It is a fault where a model needs it."""
    nodes = {"mini": OFFLINE, "studio": ONLINE}
    lines = shown(nodes, deployment(DOWN, "studio", "mini", reason="mini is offline"))
    assert lines[0] == "▲ waiting"
    assert lines[2:5] == ["1 of 2 machines online", "mini is away", "demo waits for mini"]
    assert shown(nodes, deployment(SERVING, "studio"))[0] == "●"
    assert shown(nodes)[0] == "○"


def test_a_model_on_demand_rests(shown: Play) -> None:
    resting = deployment(None, "studio")
    resting.load.phase = membership_pb2.LOAD_PHASE_NOT_LOADED
    lines = shown({"studio": ONLINE}, resting)
    assert lines[0] == "○"
    assert "demo is loaded when a client asks for it" in lines


def test_a_reason_is_one_short_line_without_parameters(shown: Play) -> None:
    reason = "no | bash=/bin/rm\n--below " + "x" * 500
    lines = shown({"studio": ONLINE}, deployment(DOWN, "studio", reason=reason))
    assert lines[0] == "▲ waiting"
    (line,) = [one for one in lines if one.startswith("demo: ")]
    assert "|" not in line
    assert len(line) == 120


def test_no_cluster(shown: Play) -> None:
    lines = shown({}, said="error: this machine is in no cluster (hint: sealring up) [NO_OPERATOR]\n")
    assert lines[:3] == [
        "○ sealring",
        "---",
        "error: this machine is in no cluster (hint: sealring up) [NO_OPERATOR]",
    ]
    assert any(line.startswith("Open the dashboard | bash=") for line in lines)


def test_sealring_is_not_installed(home: Path) -> None:
    lines = run(home)
    assert lines[0] == "○ sealring"
    assert "not installed" in lines[2]


def test_the_dashboard_opens_in_the_browser(shown: Play, home: Path) -> None:
    browser = home / "browser"
    browser.write_text('#!/bin/sh\necho "$1" >"$HOME/opened"\n')
    browser.chmod(0o755)
    shown({"studio": ONLINE})
    run(home, "dashboard", BROWSER=str(browser))
    assert (home / "opened").read_text() == "http://127.0.0.1:1234/#token\n"


def test_the_systems_own_python_reads_it() -> None:
    """macOS has 3.9, and runs the file itself."""
    ast.parse(ITEM.read_text("utf-8"), feature_version=(3, 9))
    assert os.access(ITEM, os.X_OK)
