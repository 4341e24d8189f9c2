"""Seeded stories of whole clusters: `python tests/simulation/run.py SEED` tells one again, event by event."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"


def run(*arguments: object) -> list[str]:
    """What the seeds' runs say, by lines. Fails if a run finds something wrong."""
    words = [sys.executable, RUN, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def live(first: int, number: int) -> list[str]:
    said = run(first, number)
    resumed = re.findall(r"(\d+) went on", "\n".join(said))
    assert len(resumed) == number
    assert any(map(int, resumed)), "no answer went on in a later epoch"
    return said


def order_of(said: str) -> str:
    """The number that is made of all callbacks, from a line about a seed."""
    found = re.search(r"\(([0-9a-f]{8})\)", said)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("first", "again"), [(1, 6), (7, 7)])
def test_whatever_befalls_a_cluster_its_answers_are_right_and_end(first: int, again: int) -> None:
    """And a seed's story is the same in each run, callback by callback."""
    said = live(first, 6)
    (elsewhere,) = run(again, "--elsewhere")
    assert order_of(elsewhere) == order_of(said[again - first])


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 3100, 100))
def test_whatever_befalls_three_thousand_clusters(first: int) -> None:
    live(first, 100)
