"""Takes a component's state over from a user's folder into that of a service.

It runs as root over a folder that the user can change meanwhile. So the folder is opened once, and looked at,
locked, copied and emptied through that descriptor. Its files are opened without following links, and count
only when they are regular, of one name, and of the folder's own owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sealring.mesh.errors import FailedPrecondition
from sealring.mesh.system.files import sync
from sealring.mesh.system.lock import state_in_use

MAX_FILES = 10_000
_MAX_DEPTH = 3
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODELS = "models"
"""What a node has fetched: too much to copy, and no secret. It stays where it is."""

_LEFT_BEHIND = frozenset({"tmp", _MODELS})


@contextmanager
def stopped(source: Path, user: int | None) -> Iterator[int]:
    """A descriptor of the state folder, with which nothing runs until the end of the block.

    `user` is the user id that it has to belong to (None: anybody). Raises Conflict (STATE_IN_USE),
    FailedPrecondition (UNSAFE_STATE).
    """
    with ExitStack() as stack:
        opened = _open(source, _FOLDER)
        stack.callback(os.close, opened)
        if user is not None and os.fstat(opened).st_uid != user:
            raise _unsafe(str(source), "is another user's")
        _lock(opened, source)
        for name in os.listdir(opened):
            if name.endswith(".lock"):  # a coordinator's database
                lock = _open(name, _FILE, opened)
                stack.callback(os.close, lock)
                _lock(lock, source)
        yield opened


def _open(path: Path | str, flags: int, folder: int | None = None) -> int:
    try:
        return os.open(path, flags, dir_fd=folder)
    except PermissionError:
        raise
    except OSError:
        raise _unsafe(str(path), "is a link, or not what should be there") from None


def _lock(opened: int, source: Path) -> None:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise state_in_use(source) from None


def copy_state(opened: int, above: int, name: str, owner: int | None) -> None:
    """Makes the folder `name` below the descriptor `above` with all files of `opened`, for user id `owner`.

    It appears under its name when it is whole and on disk; an empty folder of that name is replaced. Raises
    FailedPrecondition (UNSAFE_STATE; STATE_IN_THE_WAY where that folder holds something), and OSError.
    """
    staged = f".{name}.{os.getpid()}"
    os.mkdir(staged, 0o700, dir_fd=above)
    try:
        made = os.open(staged, _FOLDER, dir_fd=above)
        try:
            _copy_folder(opened, made, os.fstat(opened).st_uid, owner, [MAX_FILES], _MAX_DEPTH)
        finally:
            os.close(made)
        _take_its_place(staged, name, above)
    except BaseException:
        shutil.rmtree(staged, dir_fd=above, ignore_errors=True)
        raise
    sync(above)


def _take_its_place(staged: str, name: str, above: int) -> None:
    try:
        os.rename(staged, name, src_dir_fd=above, dst_dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise in_the_way(name) from None


def in_the_way(folder: str) -> FailedPrecondition:
    """What is said of a service's folder that nothing can be taken over into."""
    return FailedPrecondition(
        f"the service's folder {folder} holds something already, though nothing that has joined",
        hint="look what it is, and move it away",
        reason="STATE_IN_THE_WAY",
    )


def remove_state(opened: int, source: Path) -> None:
    """Removes all but the models that a node has fetched.

    Raises FailedPrecondition (STATE_LEFT_BEHIND) for what cannot be removed.
    """
    kept = False
    with contextlib.suppress(OSError):
        for name in os.listdir(opened):
            if name == _MODELS:
                kept = True
            elif stat.S_ISDIR(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=opened)
            else:
                os.unlink(name, dir_fd=opened)
        if not kept:
            source.rmdir()
    if set(os.listdir(opened)) - {_MODELS} if kept else os.path.lexists(source):
        raise FailedPrecondition(
            f"the service has the state in {source} now, which could not be removed there",
            hint="remove it yourself: two machines with one identity keep each other out",
            reason="STATE_LEFT_BEHIND",
        )


def _copy_folder(source: int, target: int, user: int, owner: int | None, left: list[int], depth: int) -> None:
    for name in sorted(os.listdir(source)):
        left[0] -= 1
        found = os.stat(name, dir_fd=source, follow_symlinks=False)
        if depth == 0 or left[0] < 0:
            raise _unsafe(name, "is one file or folder too many")
        if stat.S_ISDIR(found.st_mode) and name not in _LEFT_BEHIND:
            os.mkdir(name, 0o700, dir_fd=target)
            below, made = os.open(name, _FOLDER, dir_fd=source), os.open(name, _FOLDER, dir_fd=target)
            try:
                _copy_folder(below, made, user, owner, left, depth - 1)
            finally:
                os.close(below)
                os.close(made)
        elif not stat.S_ISDIR(found.st_mode) and not stat.S_ISSOCK(found.st_mode):
            _copy_file(source, target, name, user, owner)
    if owner is not None:
        os.fchown(target, owner, -1)
    sync(target)


def _copy_file(source: int, target: int, name: str, user: int, owner: int | None) -> None:
    with os.fdopen(_open(name, _FILE, source), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != user:
            raise _unsafe(name, "is no regular file of one name and of the folder's owner")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=target), "wb") as copy:
            shutil.copyfileobj(file, copy)
            os.fchmod(copy.fileno(), stat.S_IMODE(found.st_mode) & 0o755)
            if owner is not None:
                os.fchown(copy.fileno(), owner, -1)
            copy.flush()
            sync(copy.fileno())


def _unsafe(name: str, what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name[:200]}, of the state to take over, {what}",
        hint="look at who put it there, or join anew with: sudo sealring join --service",
        reason="UNSAFE_STATE",
    )
