"""State that root takes over from a folder which somebody else can change."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from descriptors import Descriptors

from sealring.cli.service import adoption
from sealring.cli.service.adoption import copy_state, remove_state, stopped
from sealring.mesh.errors import Conflict, FailedPrecondition

IS_ROOT = os.geteuid() == 0
ACCOUNT = 64_001 if IS_ROOT else os.geteuid()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "operator").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "tmp" / "scratch").write_text("nothing")
    (folder / "identity.key").write_bytes(b"key" * 100_000)
    (folder / "identity.key").chmod(0o600)
    (folder / "root.dsse").write_text("root")
    (folder / "root.dsse").chmod(0o666)
    (folder / "operator" / "tls.key").write_text("tls")
    return folder


@pytest.fixture
def opened(source: Path) -> Iterator[int]:
    with stopped(source, os.geteuid()) as descriptor:
        yield descriptor


@pytest.fixture
def above(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "above").mkdir()
    descriptor = os.open(tmp_path / "above", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_all_files_come_along_and_belong_to_the_account(
    source: Path, opened: int, tmp_path: Path, above: int
) -> None:
    (tmp_path / "above" / "node").mkdir()
    copy_state(opened, above, "node", ACCOUNT)
    made = tmp_path / "above" / "node"
    assert (made / "identity.key").read_bytes() == b"key" * 100_000
    assert (made / "operator" / "tls.key").read_text() == "tls"
    assert not (made / "tmp").exists()
    assert (made / "root.dsse").stat().st_mode & 0o777 == 0o644
    for one in (made, *made.rglob("*")):
        assert (one.stat().st_uid, one.stat().st_gid) == (ACCOUNT, os.getegid())
        assert not one.is_dir() or one.stat().st_mode & 0o777 == 0o700
    assert [one.name for one in (tmp_path / "above").iterdir()] == ["node"]
    assert (source / "identity.key").exists()


def test_what_was_copied_is_whole_on_disk_before_it_has_its_name(
    source: Path, opened: int, tmp_path: Path, above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []

    def fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced.append((found.st_ino, found.st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    copy_state(opened, above, "node", None)
    made = tmp_path / "above" / "node"
    files = [one.stat() for one in made.rglob("*") if one.is_file()]
    assert {(one.st_ino, one.st_size) for one in files} <= set(synced)
    folders = {one.stat().st_ino for one in (tmp_path / "above", made, made / "operator")}
    assert folders <= {number for number, _ in synced}
    assert synced[-1][0] == (tmp_path / "above").stat().st_ino


@pytest.mark.parametrize("spoilt", [False, True])
def test_no_descriptor_is_left_open(
    source: Path, above: int, monkeypatch: pytest.MonkeyPatch, spoilt: bool
) -> None:
    (source / "coordinator.lock").touch()
    if spoilt:
        (source / "operator" / "link").symlink_to("/etc/passwd")
    descriptors = Descriptors(monkeypatch)
    with (
        pytest.raises(FailedPrecondition) if spoilt else contextlib.nullcontext(),
        stopped(source, None) as opened,
    ):
        assert opened in descriptors.left()
        copy_state(opened, above, "node", None)
    assert descriptors.left() == []


def test_sockets_are_left_behind(
    source: Path, opened: int, tmp_path: Path, above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("engine.sock")
    copy_state(opened, above, "node", None)
    assert not (tmp_path / "above" / "node" / "engine.sock").exists()
    assert (tmp_path / "above" / "node" / "root.dsse").exists()


def test_what_else_goes_wrong_is_told_as_it_is_and_nothing_stays(
    opened: int, tmp_path: Path, above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_of: object, **_how: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        copy_state(opened, above, "node", None)
    assert list((tmp_path / "above").iterdir()) == []


def test_a_link_is_removed_and_not_what_it_leads_to(source: Path, opened: int, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (source / "link").symlink_to(tmp_path / "others")
    remove_state(opened, source)
    assert not source.exists()
    assert (tmp_path / "others").is_dir()


def test_state_that_is_there_is_never_replaced(opened: int, tmp_path: Path, above: int) -> None:
    (tmp_path / "above" / "node").mkdir()
    (tmp_path / "above" / "node" / "member.json").write_text("{}")
    with pytest.raises(FailedPrecondition) as error:
        copy_state(opened, above, "node", None)
    assert error.value.reason == "STATE_IN_THE_WAY"
    assert [one.name for one in (tmp_path / "above").rglob("*")] == ["node", "member.json"]


def _link(folder: Path) -> None:
    (folder / "ca.pem").symlink_to("/etc/passwd")


def _second_name(folder: Path) -> None:
    os.link(folder / "root.dsse", folder.parent / "elsewhere")


def _folder_link(folder: Path) -> None:
    (folder / "more").symlink_to(folder.parent)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _deep(folder: Path) -> None:
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "b" / "c" / "d").write_text("too deep")


@pytest.mark.parametrize("spoil", [_link, _second_name, _folder_link, _pipe, _deep])
def test_what_is_no_plain_file_of_the_owner_is_refused(
    source: Path, opened: int, tmp_path: Path, above: int, spoil: Callable[[Path], None]
) -> None:
    spoil(source)
    with pytest.raises(FailedPrecondition) as error:
        copy_state(opened, above, "node", None)
    assert error.value.reason == "UNSAFE_STATE"
    assert list((tmp_path / "above").iterdir()) == []


@pytest.mark.skipif(not IS_ROOT, reason="gives a file away")
def test_a_file_of_another_user_is_refused(source: Path, opened: int, above: int) -> None:
    os.chown(source / "root.dsse", 64_002, -1)
    with pytest.raises(FailedPrecondition):
        copy_state(opened, above, "node", None)


@pytest.mark.parametrize("lacking", [0, 1])
def test_files_without_end_are_refused(
    source: Path, opened: int, above: int, monkeypatch: pytest.MonkeyPatch, lacking: int
) -> None:
    there = [one for one in source.rglob("*") if one.name != "scratch"]
    monkeypatch.setattr(adoption, "MAX_FILES", len(there) - lacking)
    if lacking:
        with pytest.raises(FailedPrecondition):
            copy_state(opened, above, "node", None)
    else:
        copy_state(opened, above, "node", None)


@pytest.mark.parametrize(("folder", "taken"), [("a/b", True), ("a/b/c", False)])
def test_folders_in_folders_without_end_are_refused(
    source: Path, opened: int, tmp_path: Path, above: int, folder: str, taken: bool
) -> None:
    (source / folder).mkdir(parents=True)
    (source / folder / "file").write_text("deep")
    if taken:
        copy_state(opened, above, "node", None)
        assert (tmp_path / "above" / "node" / folder / "file").read_text() == "deep"
    else:
        with pytest.raises(FailedPrecondition) as refused:
            copy_state(opened, above, "node", None)
        assert refused.value.reason == "UNSAFE_STATE"


def test_a_name_is_told_as_far_as_it_is_of_use(source: Path, opened: int, above: int) -> None:
    (source / ("x" * 250)).symlink_to("/etc/passwd")
    with pytest.raises(FailedPrecondition, match=r"^x{200}, of the state to take over, is"):
        copy_state(opened, above, "node", None)


def test_a_link_as_a_lock_is_refused(source: Path) -> None:
    (source / "coordinator.lock").symlink_to("/etc/passwd")
    with pytest.raises(FailedPrecondition) as error, stopped(source, None):
        pass
    assert error.value.reason == "UNSAFE_STATE"


@pytest.mark.parametrize("models", [False, True])
def test_state_that_cannot_be_removed_is_told(
    source: Path, opened: int, monkeypatch: pytest.MonkeyPatch, models: bool
) -> None:
    if models:
        (source / "models").mkdir()
    monkeypatch.setattr(adoption.shutil, "rmtree", lambda *_of, **_how: None)
    with pytest.raises(FailedPrecondition) as error:
        remove_state(opened, source)
    assert error.value.reason == "STATE_LEFT_BEHIND"


def test_a_running_coordinator_keeps_its_state(source: Path) -> None:
    lock = source / "coordinator.lock"
    lock.touch()
    with stopped(source, None):
        pass
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Conflict), stopped(source, None):
            pass


def test_what_comes_into_its_place_meanwhile_is_neither_copied_nor_removed(
    source: Path, opened: int, tmp_path: Path, above: int
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "identity.key").write_text("somebody else's")
    source.rename(tmp_path / "away")
    source.symlink_to(others)
    copy_state(opened, above, "node", None)
    assert (tmp_path / "above" / "node" / "identity.key").read_bytes() == b"key" * 100_000
    with pytest.raises(FailedPrecondition) as error:
        remove_state(opened, source)
    assert error.value.reason == "STATE_LEFT_BEHIND"
    assert (others / "identity.key").read_text() == "somebody else's"
    assert list((tmp_path / "away").iterdir()) == [], "what was copied is gone"


@pytest.mark.skipif(not IS_ROOT, reason="gives a folder away")
def test_a_folder_of_another_user_is_refused(source: Path) -> None:
    os.chown(source, 64_002, -1)
    with pytest.raises(FailedPrecondition) as error, stopped(source, os.geteuid()):
        pass
    assert error.value.reason == "UNSAFE_STATE"


def test_models_that_were_fetched_stay_where_they_are(tmp_path: Path, source: Path) -> None:
    weights = source / "models" / "org" / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    (tmp_path / "above").mkdir()
    above = os.open(tmp_path / "above", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with stopped(source, None) as opened:
            copy_state(opened, above, "node", None)
            remove_state(opened, source)
    finally:
        os.close(above)
    assert [path.name for path in source.iterdir()] == ["models"]
    assert weights.read_bytes() == b"weights"
    assert not (tmp_path / "above" / "node" / "models").exists()
