"""Seeded stories of whole clusters: `python tests/simulation/run.py SEED` tells one again, event by event."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"


def live(first: int, number: int) -> None:
    done = subprocess.run(
        [sys.executable, RUN, str(first), str(number)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = re.findall(r"(\d+) went on", done.stdout)
    assert len(resumed) == number
    assert any(map(int, resumed)), "no answer went on in a later epoch"


@pytest.mark.parametrize("first", range(1, 13, 6))
def test_whatever_befalls_a_cluster_its_answers_are_right_and_end(first: int) -> None:
    live(first, 6)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 3100, 100))
def test_whatever_befalls_three_thousand_clusters(first: int) -> None:
    live(first, 100)
