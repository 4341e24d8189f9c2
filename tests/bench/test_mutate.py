"""Mutants: each is one change, with a name of its own."""

from __future__ import annotations

import ast
import difflib
import subprocess
from pathlib import Path

import coverage

from bench.mutate.changes import mutants, mutated
from bench.mutate.run import mirror
from bench.mutate.suite import Suite, Unchanged, _make_python, _Plugin, _python

SOURCE = '''
"""A module."""
LIMIT = 3

def check(value: int = 3) -> bool:
    """Whether it is 3."""
    if value > LIMIT and value != 7:
        raise ValueError("more than 3")
    if value > LIMIT and value != 7:
        log.warning("3")
        note(value, b"x")
    return value == 3 or True
'''


def test_every_mutant_is_one_change_of_a_name_of_its_own() -> None:
    found = mutants(SOURCE)
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    assert "check: value > LIMIT -> value >= LIMIT" in names
    assert "check: value > LIMIT -> value >= LIMIT (#2)" in names
    assert not [name for name in names if "log." in name.partition(" -> ")[0].partition("if ")[0]]
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    for one in found:
        after = mutated(SOURCE, one).splitlines()
        blocks = [
            tag for tag, *_ in difflib.SequenceMatcher(a=before, b=after).get_opcodes() if tag != "equal"
        ]
        assert len(blocks) == 1, one.name


def test_a_change_is_tried_with_the_tests_that_reach_it() -> None:
    lines = {"mesh/a.py": {1: [], 5: ["one"], 9: ["two"]}, "mesh/rpc/limits.py": {1: []}}
    unchanged = Unchanged(dict.fromkeys(["one", "two", "a.py::three"], 1.0), [], lines)
    assert unchanged.reaching("mesh/a.py", {4, 5}, {"a.py"}) == {"one"}
    assert unchanged.reaching("mesh/a.py", {7}, {"a.py"}) == set(), "no test runs this line"
    at_import: set[int] = set()
    assert unchanged.reaching("mesh/a.py", at_import, {"a.py"}) == {"one", "two", "a.py::three"}
    assert unchanged.reaching("mesh/rpc/limits.py", at_import, {"b.py"}) == {"one", "two", "a.py::three"}
    assert unchanged.reaching("mesh/never.py", at_import, {"a.py"}) == set()


def test_what_runs_at_import_is_told_from_what_functions_run() -> None:
    source = """
_USED = 3
_ALSO_HERE = 4
PUBLIC = 5

class Box:
    size: int = _ALSO_HERE + 6

    def full(self, at: int = 7) -> bool:
        def inside(now: int = 8) -> bool:
            return now > _USED
        return inside() or PUBLIC + _ALSO_HERE > 9
"""
    lines = {one.name.partition(": ")[2]: one.lines for one in mutants(source)}
    assert lines["3 -> 4"] == {10, 11}, "where the constant is used, and the statement around that"
    assert [lines[f"{at} -> {at + 1}"] for at in (4, 5, 6, 7)] == [frozenset()] * 4
    assert lines["8 -> 9"] == {10}
    assert lines["9 -> 10"] == {12}


def test_tests_close_to_a_change_are_tried_before_those_far_from_it(tmp_path: Path) -> None:
    files = {
        "tests/mesh/rings/test_a.py": "",
        "tests/mesh/test_uses.py": "from sealring.mesh.rings.a import Ring",
        "tests/mesh/test_within.py": "def test() -> None:\n    from sealring.mesh.rings import a",
        "tests/mesh/fixtures/conftest.py": "import sealring.mesh.rings.a",
        "tests/mesh/fixtures/test_by_fixtures.py": "",
        "tests/mesh/test_helped.py": "from helper import help",
        "tests/support/helper.py": "from sealring.mesh.rings.a import Ring",
        "tests/mesh/rings/test_b.py": "import sealring.mesh.rings.b",
        "tests/mesh/rings/test_c.py": "import sealring.mesh.rings.c",
        "tests/mesh/pki/test_d.py": "",
        "tests/mesh/rings/test_real.py": "import pytest\npytestmark = pytest.mark.integration",
        "mesh/rings/a.py": "",
        "mesh/rings/b.py": "from .a import Ring",
        "mesh/rings/c.py": "from .b import Ring",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    ordered = [
        sorted(test.removeprefix("tests/mesh/") for test in group)
        for group in Suite(tmp_path, "mesh").nearest("mesh/rings/a.py", "tests/mesh/rings/test_a.py")
    ]
    one_step = ["fixtures/test_by_fixtures.py", "test_uses.py", "test_within.py"]
    near = [["rings/test_a.py"], one_step, ["rings/test_b.py", "test_helped.py"]]
    assert ordered == [*near, ["rings/test_c.py"], ["pki/test_d.py"], ["rings/test_real.py"]]
    suite = Suite(tmp_path, "mesh", near=True)
    assert len(list(suite.nearest("mesh/rings/a.py", "tests/mesh/rings/test_a.py"))) == len(near)
    names = {"tests/mesh/rings/test_a.py", "tests/mesh/test_uses.py", "tests/mesh/test_within.py"}
    assert suite.importing("mesh/rings/a.py", "tests/mesh/rings/test_a.py") == names


def test_a_file_has_its_mirror() -> None:
    assert mirror("gateway/scheduler/memory.py") == "tests/gateway/scheduler/test_memory.py"
    assert mirror("sealring/client/types.py") == "tests/client/test_types.py"


def test_what_a_process_ran_belongs_to_all_tests_of_the_file_that_started_it(tmp_path: Path) -> None:
    folder, covered = tmp_path / "tree", tmp_path / "covered"
    covered.mkdir()
    data = coverage.CoverageData(str(covered / "data.1"))
    data.set_context("tests/mesh/test_a.py::test_one")
    data.add_lines({str(folder / "mesh/a.py"): [1, 5, 6], str(folder / "node/b.py"): [1]})
    data.write()
    (covered / "data.2").write_bytes(b"of a process that was killed")
    tests = [f"tests/mesh/test_{name}" for name in ("a.py::test_one", "a.py::test_two", "b.py::test_one")]
    lines = {"mesh/a.py": {1: [], 5: [2]}}
    _Plugin(folder, tmp_path / "out", None, "mesh")._add_children(lines, tests)
    assert lines == {"mesh/a.py": {1: [], 5: [2, 0, 1], 6: [0, 1]}}


def test_processes_import_the_copy_and_are_watched_while_a_test_runs(tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    (folder / "copied").mkdir(parents=True)
    (folder / "copied" / "__main__.py").write_text(
        "import os, copied\nprint(copied.__path__[0], flush=True)\nos._exit(0)\n"
    )
    (folder / "copied" / "__init__.py").touch()
    _make_python(folder)
    (tmp_path / "covered").mkdir()
    (tmp_path / "test").write_text("tests/test_a.py::test_one")
    found = subprocess.run(
        [_python(folder), "-P", "-m", "copied"], env={}, cwd="/", capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(folder / "copied")
    (file,) = (tmp_path / "covered").iterdir()
    data = coverage.CoverageData(str(file))
    data.read()
    assert data.contexts_by_lineno(str(folder / "copied/__main__.py"))[2] == ["tests/test_a.py::test_one"]
