"""The example in which three machines become one: from `up --model` to an answer on the third."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import FOUND, NOTES, PROGRAMS, environment, is_installed
from ringtest import HANG_SECONDS
from scriptedmodel import Call, Scene, Step, write_scripted

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).parents[2] / "examples" / "three_machines.py"
ASKED = "What do the notes ask for?"


def recorded(*arguments: str, work: Path, environ: dict[str, str]) -> list[str]:
    """The lines of the recording, each behind its time and its machine."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        pytest.skip("network namespaces need root, ip, unshare and hostname")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], cwd=work, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def typed(lines: list[str]) -> list[str]:
    """The commands of sealring, behind the names of their machines."""
    return [" ".join(line.split()[2:]) for line in lines if "$ sealring" in line]


@pytest.mark.sweep
def test_curl_is_answered_on_the_third(tmp_path: Path) -> None:
    lines = recorded(work=tmp_path, environ={**os.environ, "HOME": str(tmp_path)})
    commands = ["studio $ sealring up --model demo", "mini $ sealring join", "book $ sealring join"]
    assert typed(lines) == [*commands, "book $ sealring connect curl"]
    (answer,) = [line for line in lines if '"finish_reason"' in line]
    assert " book " in answer
    assert "sealring demo model" in answer


@pytest.mark.agents
@pytest.mark.timeout(2 * HANG_SECONDS)
def test_claude_code_answers_on_the_third_after_four_commands(tmp_path: Path) -> None:
    """It reads a file there with its own tool. Only what the model says is known before."""
    assert is_installed(PROGRAMS["claude"]), "Claude Code is not installed: make clients"
    model, work = tmp_path / "notes-model", tmp_path / "work"
    work.mkdir()
    (work / "notes.txt").write_text(NOTES)
    reads = Call("Read", {"file_path": str(work / "notes.txt")})
    steps = [Step(["I look into them.", reads]), Step(FOUND, after="three plums")]
    write_scripted(model, [Scene(ASKED, "Read", steps)], ends=400)
    path = f"{environment(tmp_path, {})['PATH']}:{os.environ['PATH']}"
    lines = recorded(str(model), ASKED, work=work, environ={**os.environ, "PATH": path})
    commands = [f"studio $ sealring up --model {model}", "mini $ sealring join", "book $ sealring join"]
    assert typed(lines) == [*commands, "book $ sealring connect claude --write"]
    asked = next(at for at, line in enumerate(lines) if "$ claude -p" in line)
    assert any(FOUND in line and " book " in line for line in lines[asked + 1 :])
