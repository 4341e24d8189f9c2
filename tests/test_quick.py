"""What `make quick` leaves out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"mark\.integration|^pytestmark = .*\bCLUSTER\b", re.MULTILINE)


def named(variable: str) -> list[str]:
    """The paths in a variable of the Makefile."""
    lines = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ").splitlines()
    (value,) = (line.partition("=")[2] for line in lines if line.startswith(f"{variable} = "))
    return value.split()


def test_it_leaves_out_what_there_is_and_runs_one_ring() -> None:
    (ring,) = named("RING")
    assert not [path for path in (*named("PROCESSES"), ring) if not (ROOT / path).exists()]
    assert MARKED.search((ROOT / ring).read_text("utf-8"))


def test_it_leaves_out_all_tests_of_real_processes() -> None:
    left_out = [ROOT / path for path in named("PROCESSES")]
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if MARKED.search(file.read_text("utf-8"))]
    assert len(marked) > len(left_out)
    assert not [file for file in marked if not any(map(file.is_relative_to, left_out))]
