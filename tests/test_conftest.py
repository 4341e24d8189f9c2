"""Tests that cannot run here, and tests of real processes that fail."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LACKING = """
import pytest
def test_of_a_privilege(): pytest.skip("no privilege")
def test_of_a_package(): pytest.importorskip("no_such_package")
@pytest.mark.skipif(True, reason="of another system")
def test_of_another_system(): pass
"""
BREAKING = """
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="session")

@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def cluster():
    made = []
    yield made
    made.append("closed")

@pytest.fixture(scope="module")
def client(cluster):
    return cluster

@pytest.mark.MARK
async def test_that_breaks_it(client):
    client.append("broken")
    assert False

@pytest.mark.MARK
async def test_that_needs_it(client):
    assert client == []
"""


def told(folder: Path, tests: str, **environment: str) -> str:
    """What pytest says of these tests with the suite's conftest."""
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = integration: real processes\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(folder), str(folder)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ci", "outcome"),
    [("true", "2 failed, 1 skipped" if sys.platform == "linux" else "3 skipped"), ("", "3 skipped")],
)
def test_what_is_lacking_fails_in_ci(tmp_path: Path, ci: str, outcome: str) -> None:
    said = told(tmp_path, LACKING, CI=ci)
    assert re.search(rf"{outcome} in", said), said
    lacks = re.findall(r"^(?!SKIPPED|FAILED).*(no privilege|of another system) \(1\)$", said, re.MULTILINE)
    assert lacks == ([] if outcome.startswith("2 failed") else ["no privilege"])


def test_no_mark_skips_what_lacks_a_program() -> None:
    """CI fails for what is lacking and skipped by a test itself, and not for what a mark keeps for others."""
    marked = re.compile(r"skipif\([^\n]*(which|find_spec|CHROMIUM|install)")
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    found = {str(file.relative_to(ROOT)) for file in files if marked.search(file.read_text())}
    assert found == {"tests/bench/test_paced_network.py"}, "which needs root as well"


@pytest.mark.parametrize(
    ("mark", "outcome"), [("integration", "1 failed, 1 passed"), ("timeout(60)", "2 failed")]
)
def test_a_cluster_is_made_anew_after_a_test_that_failed(tmp_path: Path, mark: str, outcome: str) -> None:
    """Other fixtures are shared as ever."""
    said = told(tmp_path, BREAKING.replace("MARK", mark))
    assert re.search(rf"{outcome} in", said), said


@pytest.mark.parametrize("run", [1, 2])
def test_random_numbers_are_the_same_in_each_test(run: int) -> None:
    assert random.random() == random.Random(0).random()
