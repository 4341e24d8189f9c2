"""How long-running commands run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealring.cli.local.cluster import LocalCluster

DAEMON = """
import os, pathlib, sys
from sealring.cli.local.processes import run_daemon
os.umask(0)
folder = pathlib.Path(sys.argv[1])

async def work():
    (folder / "file").write_text("x")
    (folder / "folder").mkdir()

run_daemon("node", work, log_level="info", log_file=None, parent_pipe=None)
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_a_daemon_makes_is_its_accounts_alone_whatever_the_umask(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DAEMON, str(tmp_path)], timeout=200, check=True)
    assert (mode(tmp_path / "file"), mode(tmp_path / "folder")) == (0o600, 0o700)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
async def test_the_settings_of_a_local_cluster_are_its_owners_alone(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path / "state", "model", nodes=1) as cluster:
        cluster.write_configs()
    files = [tmp_path / "state" / "ports.json", *(tmp_path / "state" / "config").iterdir()]
    assert len(files) == 4
    assert {mode(file) for file in files} == {0o600}
