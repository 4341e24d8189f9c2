"""Takes a component's state over from a user's folder into that of a service.

It runs as root over a folder that the user can change meanwhile: files are opened without following links,
and count only when they are regular, of one name, and of the folder's own owner.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sealring.mesh.errors import Conflict, FailedPrecondition
from sealring.mesh.system.lock import lock_state

MAX_FILES = 10_000
_MAX_DEPTH = 3
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LEFT_BEHIND = frozenset({"tmp"})


@contextmanager
def stopped(source: Path) -> Iterator[None]:
    """Nothing runs with this state until the end of the block.

    Raises Conflict (STATE_IN_USE), FailedPrecondition (UNSAFE_STATE).
    """
    with ExitStack() as stack:
        stack.enter_context(lock_state(source))
        for lock in source.glob("*.lock"):  # a coordinator's database
            try:
                descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except PermissionError:
                raise
            except OSError:
                raise _unsafe(lock.name, "is a link, or no file") from None
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Conflict(
                    f"another process uses the state folder {source}", hint="stop it", reason="STATE_IN_USE"
                ) from None
        yield


def copy_state(source: Path, above: int, name: str, owner: int | None) -> None:
    """Makes the folder `name` below the descriptor `above` with all files of `source`, for user id `owner`.

    It appears under its name when it is whole and on disk; an empty folder of that name is replaced. Raises
    FailedPrecondition (UNSAFE_STATE; STATE_IN_THE_WAY where that folder holds something), and OSError.
    """
    staged = f".{name}.{os.getpid()}"
    opened = os.open(source, _FOLDER)
    try:
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
        os.fsync(above)
    finally:
        os.close(opened)


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


def remove_state(source: Path) -> None:
    """Removes what was copied. Raises FailedPrecondition (STATE_LEFT_BEHIND) for what cannot be removed."""
    shutil.rmtree(source, ignore_errors=True)
    if os.path.lexists(source):
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
    os.fsync(target)


def _copy_file(source: int, target: int, name: str, user: int, owner: int | None) -> None:
    try:
        opened = os.open(name, _FILE, dir_fd=source)
    except OSError:
        raise _unsafe(name, "is a link") from None
    with os.fdopen(opened, "rb") as file:
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
            os.fsync(copy.fileno())


def _unsafe(name: str, what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name[:120]} in the state folder {what}",
        hint="look at who put it there, or join anew with: sudo sealring join --service",
        reason="UNSAFE_STATE",
    )
