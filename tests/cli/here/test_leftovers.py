"""The folders of killed demos are removed, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sealring.cli.here.leftovers import announced, gateway_of, running, temporary_folder
from sealring.mesh.system.lock import lock_state

KILLED = """
import os, signal
from sealring.cli.here.leftovers import announced, gateway_of, running, temporary_folder
with temporary_folder() as folder:
    (folder / "node-0").mkdir()
    (folder / "node-0" / "identity.key").write_text("x")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def later() -> float:
    """A clock by which no folder is young."""
    return time.time() + 61


def killed(tmp_path: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    folder = Path(done.stdout.strip())
    assert folder.is_dir()
    assert folder.parent == tmp_path
    return folder


def test_a_killed_demos_folder_goes_with_the_next_one(tmp_path: Path) -> None:
    folder = killed(tmp_path)
    with temporary_folder(later) as own:
        assert not folder.exists()
        assert own.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    with temporary_folder(later) as first, temporary_folder(later) as second:
        assert first.is_dir()
        assert second.is_dir()


def test_a_component_that_still_ends_keeps_the_folder(tmp_path: Path) -> None:
    folder = killed(tmp_path)
    with lock_state(folder / "node-0"), temporary_folder(later):
        assert folder.is_dir()
    with temporary_folder(later):
        assert not folder.exists()


def test_what_is_young_or_open_to_others_or_a_link_stays(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("x")
    (tmp_path / "sealring-demo-link").symlink_to(target)
    shared = tmp_path / "sealring-demo-shared"
    shared.mkdir()
    shared.chmod(0o755)
    with temporary_folder(later):
        assert (target / "file").exists()
        assert shared.exists()
    folder = killed(tmp_path)
    (folder / "link").symlink_to(target)
    with temporary_folder():
        assert folder.exists()
    with temporary_folder(later):
        assert not folder.exists()
        assert (target / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_nobody_elses_folder_is_looked_at() -> None:
    with temporary_folder() as folder:
        (folder / "ports.json").write_text('{"gateway": 1}')
        assert running() == [folder]
        os.chown(folder, 64_002, -1)
        assert running() == []


def test_a_cluster_with_a_folder_of_its_own_is_found_too(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with announced(state):
        assert running() == [], "there is nothing yet"
        state.mkdir()
        (state / "ports.json").write_text('{"gateway": 4711}')
        assert running() == [state]
    assert running() == []


def test_a_running_cluster_is_found_by_its_folder(tmp_path: Path) -> None:
    (killed(tmp_path) / "ports.json").write_text('{"gateway": 1}')
    assert running() == []
    with temporary_folder() as folder:
        assert running() == []
        assert gateway_of(folder) is None
        (folder / "ports.json").write_text('{"gateway": 4711}')
        assert running() == [folder]
        assert gateway_of(folder) == "127.0.0.1:4711"
        folder.chmod(0o755)
        assert running() == [], "what others can write to says nothing"
