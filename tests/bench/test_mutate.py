"""Mutants: each is one change, with a name of its own."""

from __future__ import annotations

import ast
import difflib

from bench.mutate.changes import mutants, mutated
from bench.mutate.run import mirror
from bench.mutate.suite import Unchanged

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
    lines = {"mesh/a.py": {1: [], 5: ["one"], 9: ["two"]}, "mesh/limits.py": {1: []}}
    unchanged = Unchanged({"one": 1.0, "two": 1.0}, [], lines)
    assert unchanged.reaching("mesh/a.py", {4, 5}) == {"one"}
    assert unchanged.reaching("mesh/a.py", {1}) == {"one", "two"}
    assert unchanged.reaching("mesh/limits.py", {1}) == {"one", "two"}
    assert unchanged.reaching("mesh/never.py", {1}) == set()


def test_a_file_has_its_mirror() -> None:
    assert mirror("gateway/scheduler/memory.py") == "tests/gateway/scheduler/test_memory.py"
    assert mirror("sealring/client/types.py") == "tests/client/test_types.py"
