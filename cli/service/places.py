"""The folders of an installed service. They belong to root; only the files that the component writes do not.

`sudo sealring service install` runs as root beside what the service's account may have put there. So no
folder that this account (or anybody but root) can change is ever walked through, what is handed over is
opened first and changed through its descriptor, and a link in its place is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from sealring.mesh.errors import FailedPrecondition, PermissionDenied

if TYPE_CHECKING:
    from sealring.cli.service.launchd import Service

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_places(service: Service, root: Path, owner: int | None) -> None:
    """Makes the component's state folder and log files below `root`; user id `owner` gets them (None: stay).

    Raises FailedPrecondition (UNSAFE_PLACE) for a link or another kind of file in their place and for a
    folder above them that others than root can change, and OSError.
    """
    with folder_of_root(root, PurePath(service.logs)) as logs:
        for file in (service.log_file, service.crash_file):
            _hand_over(logs, file, _FILE, 0o600, owner)
    with folder_of_root(root, PurePath(service.state)) as above:
        name = PurePath(service.folder).name
        if name not in os.listdir(above):
            os.mkdir(name, 0o700, dir_fd=above)
        _hand_over(above, service.folder, _FOLDER, 0o700, owner)


@contextmanager
def folder_of_root(root: Path, path: PurePath) -> Iterator[int]:
    """A descriptor of the absolute `path` below `root`; folders that are not there are made.

    Links on the way are followed (`/var` is one on macOS): the folder that holds them is root's alone. The
    last may not be one. Raises FailedPrecondition (UNSAFE_PLACE) and OSError.
    """
    here = os.open(root, _FOLDER)
    try:
        _check_ours(os.fstat(here), root)
        for place in [*reversed(path.parents), path][1:]:
            last = os.O_NOFOLLOW if place == path else 0
            try:
                below = _open(here, place, _FOLDER | last)
            except FileNotFoundError:
                os.mkdir(place.name, 0o755, dir_fd=here)
                below = _open(here, place, _FOLDER | os.O_NOFOLLOW)
                os.fchmod(below, 0o755)  # whatever the umask: the account has to get through
            os.close(here)
            here = below
            _check_ours(os.fstat(here), place)
        yield here
    finally:
        os.close(here)


def require_of_root(program: Path) -> None:
    """Checks that only root can change the program that a service runs, and the folders above it.

    Raises FailedPrecondition (UNSAFE_PLACE).
    """
    try:
        real = program.resolve()
        for place in {*program.parents, real, *real.parents}:
            _check_ours(place.stat(), place)
    except OSError as error:
        raise _unsafe(program, f"cannot be looked at: {error.strerror}") from None


def under(root: Path, path: PurePath | str) -> Path:
    """An absolute path below the prefix."""
    return root / PurePath(path).relative_to("/")


def needs_root(path: Path) -> PermissionDenied:
    """What is said where rights are missing (NEEDS_ROOT)."""
    return PermissionDenied(f"cannot write or read {path}", hint="run it with sudo", reason="NEEDS_ROOT")


def _hand_over(folder: int, path: str, flags: int, mode: int, owner: int | None) -> None:
    opened = _open(folder, PurePath(path), flags | os.O_NOFOLLOW)
    try:
        found = os.fstat(opened)
        if flags == _FILE and not (stat.S_ISREG(found.st_mode) and found.st_nlink == 1):
            raise _unsafe(path, "is no regular file of one name")
        if owner is not None:
            os.fchown(opened, owner, -1)
        os.fchmod(opened, mode)
    finally:
        os.close(opened)


def _open(folder: int, path: PurePath, flags: int) -> int:
    try:
        return os.open(path.name, flags, 0o600, dir_fd=folder)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError:  # a link: ELOOP or EMLINK, or with O_DIRECTORY ENOTDIR
        raise _unsafe(path, "is a link, or not what should be there") from None


def _check_ours(found: os.stat_result, path: PurePath) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise _unsafe(path, f"belongs to the user id {found.st_uid}, not to root")
    if found.st_mode & _OTHERS_WRITE:
        raise _unsafe(path, "can be written by others than its owner")


def _unsafe(path: PurePath | str, what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{path} {what}",
        hint="look at who put it there, then move it away or give it to root",
        reason="UNSAFE_PLACE",
    )
