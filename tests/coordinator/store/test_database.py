"""The lock on a coordinator's state."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from sealring.coordinator.store.database import take_lock
from sealring.mesh.errors import ConfigError


def test_only_one_has_the_lock_and_who_is_refused_keeps_nothing_open(tmp_path: Path) -> None:
    database = tmp_path / "state" / "coordinator.db"
    lock = take_lock(database)
    assert database.parent.stat().st_mode & 0o777 == 0o700
    before = psutil.Process().num_fds()
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            take_lock(database)
        assert caught.value.reason == "STATE_IN_USE"
    assert psutil.Process().num_fds() == before
    os.close(lock)
    os.close(take_lock(database))


def test_a_lock_that_is_no_file_of_ones_own_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "coordinator.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError) as caught:
        take_lock(tmp_path / "coordinator.db")
    assert caught.value.reason == "STATE_UNWRITABLE"
    assert not (tmp_path / "elsewhere").exists()
