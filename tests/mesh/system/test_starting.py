"""A child that cannot be started is an OSError, wherever one is started."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sealring.mesh.system.starting import FIRST_SECONDS, Starts, starting

ROOT = Path(__file__).parents[3]
PACKAGES = ("cli", "coordinator", "doctor", "edge", "gateway", "mesh", "node", "sealring")
STARTS = {
    f"{module}.{name}"
    for module, names in (
        (
            "subprocess",
            ("Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"),
        ),
        ("asyncio", ("create_subprocess_exec", "create_subprocess_shell")),
    )
    for name in names
}


def starts(tree: ast.AST, inside: bool = False) -> list[tuple[int, bool]]:
    """The lines where children are started, and whether `starting()` is around them."""
    found = []
    if isinstance(tree, ast.With):
        inside = inside or any(ast.unparse(item.context_expr) == "starting()" for item in tree.items)
    if isinstance(tree, ast.Call) and ast.unparse(tree.func) in STARTS:
        found.append((tree.lineno, inside))
    for part in ast.iter_child_nodes(tree):
        found.extend(starts(part, inside))
    return found


def test_every_start_of_a_child_is_in_its_block() -> None:
    found = {
        f"{file.relative_to(ROOT)}:{line}": inside
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if "subprocess" in (text := file.read_text())
        for line, inside in starts(ast.parse(text))
    }
    assert len(found) > 10
    assert [place for place, inside in found.items() if not inside] == []


def test_an_end_before_the_program_is_an_oserror() -> None:
    with pytest.raises(OSError, match="half a word"), starting():
        raise subprocess.SubprocessError("half a word")
    with pytest.raises(subprocess.TimeoutExpired), starting():
        raise subprocess.TimeoutExpired("x", 1)
    with pytest.raises(FileNotFoundError), starting():
        subprocess.Popen(["/no/such/program"])


def test_starts_may_take_longer_until_one_was_ready_which_is_logged() -> None:
    starts = Starts("engine", 60.0)
    with capture_logs() as logged:
        assert [starts.allowed(), starts.allowed()] == [FIRST_SECONDS] * 2
        starts.ready()
        assert starts.allowed() == 60.0
    assert [entry["event"] for entry in logged] == ["first_start"] * 2
