"""A test that the machine cannot run is skipped, but not in CI on Linux."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
def test_of_a_privilege(): pytest.skip("no privilege")
def test_of_a_package(): pytest.importorskip("no_such_package")
@pytest.mark.skipif(True, reason="of another system")
def test_of_another_system(): pass
"""


@pytest.mark.parametrize(
    ("ci", "outcome"),
    [("true", "2 failed, 1 skipped" if sys.platform == "linux" else "3 skipped"), ("", "3 skipped")],
)
def test_what_is_lacking_fails_in_ci(tmp_path: Path, ci: str, outcome: str) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    environment = os.environ | {"CI": ci, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert re.search(rf"{outcome} in", told.stdout), told.stdout + told.stderr
