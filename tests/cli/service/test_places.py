"""The folders that root makes for a service, beside files that the service's account may have planted."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from descriptors import Descriptors

from sealring.cli.service.launchd import Service
from sealring.cli.service.places import _check_ours, folder_of_root, make_places
from sealring.mesh.errors import FailedPrecondition

IS_ROOT = os.geteuid() == 0
ACCOUNT, OTHER = (64_001, 64_002) if IS_ROOT else (os.geteuid(), os.geteuid())
"""Ids of no account; without root's rights nothing can be given away, and the rest is tried with our own."""

NODE = Service("node")
LOGS, STATE = "var/log/sealring", "var/db/sealring"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir(mode=0o755)
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder with a file that are root's, and that nothing may happen to."""
    folder = tmp_path / "victim"
    folder.mkdir(mode=0o711)
    (folder / "file").write_text("root's")
    (folder / "file").chmod(0o644)
    return folder


def seen(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, stat.S_IMODE(found.st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_only_what_the_component_writes_is_its_accounts(root: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_places(NODE, root, ACCOUNT)
    finally:
        os.umask(before)
    for parent in ("var", "var/log", LOGS, "var/db", STATE):
        assert seen(root / parent) == (os.geteuid(), 0o755)
    assert seen(root / STATE / "node") == (ACCOUNT, 0o700)
    assert {one.name for one in (root / LOGS).iterdir()} == {"node.log", "node.crash.log"}
    for log in (root / LOGS).iterdir():
        assert seen(log) == (ACCOUNT, 0o600)
        assert log.stat().st_gid == root.stat().st_gid, "of the group nothing is said"


def test_what_is_there_stays_and_other_components_are_left_alone(root: Path) -> None:
    make_places(NODE, root, ACCOUNT)
    (root / LOGS / "node.log").write_text("a line\n")
    (root / STATE / "node" / "identity.key").write_text("a key")
    make_places(Service("gateway"), root, OTHER)
    make_places(NODE, root, ACCOUNT)
    assert (root / LOGS / "node.log").read_text() == "a line\n"
    assert (root / STATE / "node" / "identity.key").read_text() == "a key"
    assert seen(root / LOGS / "node.log")[0] == seen(root / STATE / "node")[0] == ACCOUNT
    assert seen(root / LOGS / "gateway.log")[0] == seen(root / STATE / "gateway")[0] == OTHER


def symlink_to_file(place: Path, victim: Path) -> None:
    place.symlink_to(victim / "file")


def symlink_to_folder(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def symlink_to_nothing(place: Path, victim: Path) -> None:
    place.symlink_to(victim / "new")


def hard_link(place: Path, victim: Path) -> None:
    place.hardlink_to(victim / "file")


def fifo(place: Path, victim: Path) -> None:
    os.mkfifo(place)


@pytest.mark.parametrize(
    "place", [f"{LOGS}/node.log", f"{LOGS}/node.crash.log", f"{STATE}/node", LOGS, STATE]
)
@pytest.mark.parametrize("plant", [symlink_to_file, symlink_to_folder, symlink_to_nothing, hard_link, fifo])
def test_what_is_planted_is_refused_and_its_target_untouched(
    root: Path, victim: Path, place: str, plant: Callable[[Path, Path], None]
) -> None:
    (root / place).parent.mkdir(parents=True)
    plant(root / place, victim)
    before = seen(victim), seen(victim / "file")
    with pytest.raises(FailedPrecondition) as caught:
        make_places(NODE, root, ACCOUNT)
    assert caught.value.reason == "UNSAFE_PLACE"
    assert Path(place).name in str(caught.value)
    assert (seen(victim), seen(victim / "file")) == before
    assert {one.name for one in victim.iterdir()} == {"file"}


@pytest.mark.parametrize("place", [".", "var", "var/log", LOGS, "var/db", STATE])
def test_a_folder_that_others_may_write_to_is_not_walked_through(root: Path, place: str) -> None:
    (root / place).mkdir(parents=True, exist_ok=True)
    (root / place).chmod(0o775)
    with pytest.raises(FailedPrecondition, match="can be written by others"):
        make_places(NODE, root, ACCOUNT)


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a folder to another account")
@pytest.mark.parametrize("place", ["var", LOGS, "var/db", STATE])
def test_a_folder_of_another_account_is_not_walked_through(root: Path, place: str) -> None:
    (root / place).mkdir(parents=True)
    os.chown(root / place, ACCOUNT, -1)
    with pytest.raises(FailedPrecondition, match="belongs to the user id"):
        make_places(NODE, root, ACCOUNT)


def test_a_link_of_roots_own_above_is_followed(root: Path) -> None:
    (root / "private" / "var").mkdir(parents=True)
    (root / "var").symlink_to("private/var")
    make_places(NODE, root, ACCOUNT)
    assert (root / "private" / LOGS / "node.log").exists()


def test_no_descriptor_is_left_open(root: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = Descriptors(monkeypatch)
    make_places(NODE, root, ACCOUNT)
    assert descriptors.left() == []
    (root / STATE / "node").rmdir()
    (root / STATE / "node").symlink_to(victim)
    with pytest.raises(FailedPrecondition):
        make_places(NODE, root, ACCOUNT)
    assert descriptors.left() == []
    with folder_of_root(root, Path("/a/b")) as folder:
        assert stat.S_ISDIR(os.fstat(folder).st_mode)
    with pytest.raises(OSError):
        os.fstat(folder)


@pytest.mark.parametrize(
    ("owner", "mode", "said"),
    [
        (0, 0o755, ""),
        (500, 0o755, ""),
        (1, 0o755, "/x belongs to the user id 1, not to root"),
        (501, 0o755, "/x belongs to the user id 501, not to root"),
        (0, 0o775, "/x can be written by others than its owner"),
        (500, 0o757, "/x can be written by others than its owner"),
        (500, 0o1777, "/x can be written by others than its owner"),
    ],
)
def test_what_is_roots_or_our_own_and_nobody_elses_is_trusted(
    monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 500)
    found = os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    with pytest.raises(FailedPrecondition, match=f"^{said} \\(hint") if said else nullcontext():
        _check_ours(found, Path("/x"))
