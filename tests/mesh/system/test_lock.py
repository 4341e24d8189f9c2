"""One process per state folder."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from sealring.mesh.errors import ConfigError, Conflict
from sealring.mesh.system.lock import lock_state


def test_a_folder_has_one_holder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with lock_state(folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(Conflict) as caught, lock_state(folder):
            pass
        assert caught.value.reason == "STATE_IN_USE"
        assert "another folder" not in caught.value.hint, "`up` and `join` let nobody name one"
    with lock_state(folder):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught, lock_state(tmp_path / "file" / "state"):
        pass
    assert caught.value.reason == "STATE_UNWRITABLE"
    assert str(tmp_path / "file" / "state") in caught.value.message
