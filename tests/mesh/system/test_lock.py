"""One process per state folder."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from sealring.mesh.errors import ConfigError, Conflict, PermissionDenied
from sealring.mesh.system.lock import lock_state, require_own_state

SERVICE = pwd.getpwnam("nobody")


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_what_is_another_accounts_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, SERVICE.pw_uid, -1)
    for folder in (theirs, theirs / "gateway", theirs / "a" / "b"):
        with pytest.raises(PermissionDenied) as caught, lock_state(folder):
            pass
        assert caught.value.reason == "OTHERS_STATE"
        assert f"sudo -H -u {SERVICE.pw_name} " in caught.value.hint
    assert list(theirs.iterdir()) == []
    os.seteuid(SERVICE.pw_uid)
    try:
        require_own_state(theirs / "gateway")
        require_own_state(tmp_path / "of root")
    finally:
        os.seteuid(0)
    own = tmp_path / "own"
    own.mkdir()
    require_own_state(own)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_root_may_use_a_folder_whose_owner_is_no_account_here(tmp_path: Path) -> None:
    """A container's volumes and home folder belong to numbers of the host."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    os.chown(mounted, 64_001, -1)
    with lock_state(mounted / "node"):
        assert (mounted / "node").stat().st_uid == 0
