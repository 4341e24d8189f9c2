"""Temporary folders of local clusters: a killed one cannot remove its own, so the next one does.

A living cluster holds a lock on its folder, its components hold locks on theirs; locks go with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sealring.cli.here.settings_files import PORTS
from sealring.mesh.errors import Conflict
from sealring.mesh.system.lock import lock_state
from sealring.mesh.system.paths import default_state_root

_PREFIX = "sealring-demo-"
_ELSEWHERE = "elsewhere"
_YOUNG_SECONDS = 60.0
"""A folder that is younger may belong to a cluster that has not locked it yet."""


@contextmanager
def temporary_folder(clock: Callable[[], float] = time.time) -> Iterator[Path]:
    """A folder of mode 0700 that is gone afterwards; those of killed processes of this user go now."""
    _clear(clock())
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with lock_state(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def announced(state: Path, clock: Callable[[], float] = time.time) -> Iterator[Path]:
    """`state`, where a local cluster keeps its state for good, among those that `running` finds meanwhile."""
    with temporary_folder(clock) as note:
        (note / _ELSEWHERE).write_text(str(state.absolute()), encoding="utf-8")
        yield state


def running() -> list[Path]:
    """The state folders of this user's clusters that run now: of `sealring up`, and of local ones."""
    used = [folder for folder in (default_state_root(), *_own_folders()) if _is_used(folder)]
    return [place for place in map(_place, used) if (place / PORTS).is_file()]


def _place(folder: Path) -> Path:
    """The state folder: the folder itself, or the one that its note names."""
    try:
        return Path((folder / _ELSEWHERE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return folder


def gateway_of(folder: Path) -> str | None:
    """host:port of a local cluster's gateway, if it has chosen one by now."""
    try:
        return f"127.0.0.1:{int(json.loads((folder / PORTS).read_text())['gateway'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_used(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        with lock_state(folder):
            return False
    except Conflict:
        return True


def _own_folders() -> Iterator[Path]:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                yield folder


def _clear(now: float) -> None:
    for folder in _own_folders():
        with contextlib.suppress(OSError, Conflict):
            if now - folder.lstat().st_ctime > _YOUNG_SECONDS:
                _remove_unless_used(folder)


def _remove_unless_used(folder: Path) -> None:
    """Raises Conflict when a process uses it."""
    with ExitStack() as locks:
        for one in (folder, *(inner for inner in folder.iterdir() if inner.is_dir())):
            if not one.is_symlink():
                locks.enter_context(lock_state(one))
        shutil.rmtree(folder, ignore_errors=True)
