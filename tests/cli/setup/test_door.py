"""The key and port of a member's proxy: whose they are, and that root leaves them to that account."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.here.settings_files import proxy_port
from sealring.cli.proxy import digest_of
from sealring.cli.setup.door import forget_door, keep_door
from sealring.mesh.errors import ConfigError
from sealring.mesh.system.paths import proxy_key_file

SHOWS = """#!/bin/sh
(id -u; id -G; umask; echo "$HOME"; echo "$*") > "$HOME/told"; cat > "$HOME/given"
echo '{"result": {"port": 7, "key_sha256": "ab"}}'
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other accounts reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # tempfile's own may be private
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_without_sudo_they_are_this_accounts(home: Path, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    kept = keep_door(host, None, "127.0.0.1:8080")
    file = proxy_key_file()
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept == {"port": proxy_port(file.parent), "key_sha256": digest_of(file.read_text().strip())}
    assert kept["port"] not in (0, 8080), "the node's own"
    assert keep_door(host, None, "127.0.0.1:8080") == kept, "programs are set to both"
    assert keep_door(host, 9, "127.0.0.1:8080") == {**kept, "port": 9}
    forget_door(host)
    assert (file.exists(), proxy_port(file.parent)) == (False, 0)
    forget_door(host)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works as another account")
def test_by_sudo_a_process_of_the_caller_makes_them(
    shared: Path, home: Path, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is its own: it could put a link where root would write."""
    python, its = shared / "python", shared / "home"
    python.write_text(SHOWS)
    python.chmod(0o755)
    its.mkdir()
    nobody = pwd.getpwnam("nobody")
    os.chown(its, nobody.pw_uid, nobody.pw_gid)
    account = pwd.struct_passwd((*nobody[:5], str(its), nobody.pw_shell))
    monkeypatch.setattr(pwd, "getpwuid", {nobody.pw_uid: account}.__getitem__)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("SUDO_UID", str(nobody.pw_uid))
    assert keep_door(host, 7, "127.0.0.1:1") == {"port": 7, "key_sha256": "ab"}
    told = (its / "told").read_text().splitlines()
    mine = [str(nobody.pw_uid), str(nobody.pw_gid), "0077", str(its)]
    assert told == [*mine, "-P -m sealring.cli.setup.door"]
    assert json.loads((its / "given").read_text()) == {"wished": 7, "node": "127.0.0.1:1"}
    assert not proxy_key_file().exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is told who has called sudo")
@pytest.mark.parametrize("uid", ["none", "-1", "4000000000", "9" * 30])
def test_a_caller_that_is_nobody_is_refused(host: Any, monkeypatch: pytest.MonkeyPatch, uid: str) -> None:
    monkeypatch.setenv("SUDO_UID", uid)
    with pytest.raises(ConfigError) as caught:
        keep_door(host, None, "127.0.0.1:1")
    assert caught.value.reason == "NO_SUCH_USER"
