"""Files that are whole or absent, and secrets that stay private."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from mesh.errors import ConfigError
from mesh.statefiles import create_exclusive, read_bounded, read_secret, write_atomic


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert read_secret(path) == b"two"
    assert oct(path.stat().st_mode)[-4:] == "0600"
    assert oct(path.parent.stat().st_mode)[-4:] == "0700"


def test_exclusive_creation_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert create_exclusive(path, b"one")
    assert not create_exclusive(path, b"two")
    assert path.read_bytes() == b"one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "state"
    write_atomic(path, b"old")

    def fail(*_arguments: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_secrets_of_other_users_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    create_exclusive(path, b"x")
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    with pytest.raises(ConfigError) as error:
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
    with pytest.raises(ConfigError) as error:
        read_bounded(path, max_bytes=10)
    assert error.value.reason == "FILE_TOO_LARGE"
    with pytest.raises(FileNotFoundError):
        read_secret(tmp_path / "absent")


def test_a_full_sync_is_asked_for_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command: asked.append(command))
    write_atomic(tmp_path / "state", b"x")
    assert asked == [51, 51]
