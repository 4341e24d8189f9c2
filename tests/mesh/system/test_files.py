"""Files that are whole or absent, and secrets that stay private."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from refusals import refused

from sealring.mesh.errors import ConfigError
from sealring.mesh.system.files import (
    create_exclusive,
    make_private,
    read_bounded,
    read_secret,
    write_atomic,
)


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert read_secret(path) == b"two"
    assert oct(path.stat().st_mode)[-4:] == "0600"
    assert oct(path.parent.stat().st_mode)[-4:] == "0700"


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    write_atomic(tmp_path / "a", b"one")
    create_exclusive(tmp_path / "b", b"two")
    assert (read_secret(tmp_path / "a"), read_bounded(tmp_path / "b")) == (b"one", b"two")
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "socket"])
def test_only_a_regular_file_is_a_secret(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for a socket's name must be short
    path = tmp_path / "key"
    if kind == "link":
        create_exclusive(tmp_path / "other", b"x")
        path.symlink_to(tmp_path / "other")
    elif kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("key")
        path.chmod(0o600)
    before = psutil.Process().num_fds()
    with refused("SECRET_FILE_UNSAFE", ConfigError):
        read_secret(path)
    assert psutil.Process().num_fds() == before


class Stick:
    """A volume without hard links, as exFAT: what `os.link` answers there, and the modes of its files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int, mode: int = 0o700) -> None:
        def link(*_: object) -> None:
            raise OSError(error, os.strerror(error))

        real = os.open

        def create(path: Path, flags: int, wanted: int = 0o777, **options: int) -> int:
            descriptor = real(path, flags, wanted, **options)
            if flags & os.O_CREAT:
                os.fchmod(descriptor, mode)
            return descriptor

        monkeypatch.setattr(os, "link", link)
        monkeypatch.setattr(os, "open", create)


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP])
def test_a_key_is_made_on_and_read_from_a_volume_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    Stick(monkeypatch, error)  # which macOS mounts with mode 0700 for whoever plugged it in
    path = tmp_path / "root.key"
    assert create_exclusive(path, b"one")
    assert not create_exclusive(path, b"two")
    assert read_secret(path) == b"one"
    assert os.listdir(tmp_path) == ["root.key"]


def test_no_secret_is_written_where_others_could_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stick(monkeypatch, errno.EPERM, 0o755)
    with refused("VOLUME_WITHOUT_MODES", ConfigError):
        create_exclusive(tmp_path / "root.key", b"one")
    assert os.listdir(tmp_path) == []


def test_another_error_of_a_link_is_none_of_the_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stick(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="space"):
        create_exclusive(tmp_path / "root.key", b"one")
    assert os.listdir(tmp_path) == []


def test_secrets_of_other_users_are_refused(tmp_path: Path) -> None:
    path = Path("/etc/passwd")
    if os.geteuid() == 0:
        path = tmp_path / "key"
        create_exclusive(path, b"x")
        os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match="of this user") as error:
        read_secret(path)
    assert error.value.reason == "SECRET_FILE_UNSAFE"
    assert "0600" in error.value.hint


def test_secrets_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "key"
    create_exclusive(path, bytes(11))
    assert read_secret(path, max_bytes=11) == bytes(11)
    with pytest.raises(ConfigError):
        read_secret(path, max_bytes=10)
    assert read_bounded(path, max_bytes=11) == bytes(11)
    with refused("FILE_TOO_LARGE", ConfigError):
        read_bounded(path, max_bytes=10)
    with pytest.raises(FileNotFoundError):
        read_secret(tmp_path / "absent")


@pytest.mark.parametrize(
    ("code", "written", "plain"),
    [
        (0, True, 0),
        (errno.ENOTSUP, True, 2),
        (errno.EINVAL, True, 2),
        (errno.ENOTTY, True, 2),
        (errno.EIO, False, 0),
    ],
)
def test_a_plain_sync_does_where_a_full_one_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, written: bool, plain: int
) -> None:
    """As on SMB and exFAT. A disk that fails is another thing."""
    synced: list[int] = []

    def full_sync(descriptor: int, command: int) -> None:
        assert command == 51
        if code:
            raise OSError(code, os.strerror(code))

    system = SimpleNamespace(F_FULLFSYNC=51, fcntl=full_sync)
    monkeypatch.setattr("sealring.mesh.system.files.fcntl", system)
    monkeypatch.setattr(os, "fsync", synced.append)
    path = tmp_path / "state"
    with contextlib.nullcontext() if written else pytest.raises(OSError):
        write_atomic(path, b"x")
    assert (path.exists(), len(synced)) == (written, plain)


@pytest.mark.parametrize("bit", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001])
def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path, bit: int) -> None:
    path = tmp_path / "key"
    create_exclusive(path, b"x")
    path.chmod(0o600 | bit)
    with refused("SECRET_FILE_UNSAFE", ConfigError):
        read_secret(path)
    path.chmod(0o700)
    assert read_secret(path) == b"x"


def test_the_bounds_when_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for read, most in ((read_secret, 1 << 16), (read_bounded, 1 << 20)):
        write_atomic(path, bytes(most))
        assert len(read(path)) == most
        write_atomic(path, bytes(most + 1))
        with pytest.raises(ConfigError):
            read(path)


def test_the_first_error_is_the_one_that_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the temporary file has gone meanwhile."""

    def fail(_descriptor: int) -> None:
        for file in tmp_path.iterdir():
            file.unlink()
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", fail)
    for write in (write_atomic, create_exclusive):
        with pytest.raises(OSError) as caught:
            write(tmp_path / "state", b"x")
        assert caught.value.errno == 28


def test_the_whole_file_is_synced_and_then_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[os.stat_result] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    for write in (write_atomic, create_exclusive):
        synced.clear()
        write(tmp_path / write.__name__, b"whole")
        assert [stat.S_ISDIR(one.st_mode) for one in synced] == [False, True]
        assert synced[0].st_size == 5


@pytest.mark.parametrize("path", [Path(""), Path("/")])
def test_what_names_no_file_cannot_be_written(path: Path) -> None:
    for write in (write_atomic, create_exclusive):
        with pytest.raises(IsADirectoryError):
            write(path, b"x")


def test_a_folder_is_made_private_unless_it_holds_what_others_read(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_private(folder)
    (folder / "secret").touch(0o600)
    (folder / "own.pem").touch(0o644)

    def mode_from(before: int, *own: str) -> int:
        folder.chmod(before)
        make_private(folder, own)
        return stat.S_IMODE(folder.stat().st_mode)

    assert mode_from(0o755, "own.pem") == 0o700
    assert mode_from(0o755) == 0o755, "as a home folder or /usr/local/var"
    assert mode_from(0o777) == 0o755
    assert mode_from(0o1777) == 0o1777, "where nobody replaces the files of others"


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    """A full disk, and a rename that is refused."""
    path, folder = tmp_path / "state", tmp_path / "folder"
    write_atomic(path, b"old")
    folder.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, limits[1]))
    try:
        for write in (write_atomic, create_exclusive):
            with pytest.raises(OSError, match="too large"):
                write(path, b"newer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OSError):
        write_atomic(folder, b"new")
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["folder", "state"]
