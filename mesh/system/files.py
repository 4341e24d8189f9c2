"""Small files that must never be half written, and secrets that only their owner may read."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Collection
from pathlib import Path

from sealring.mesh.errors import ConfigError

MAX_STATE_BYTES = 1 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of volumes without hard links, such as exFAT and FAT on USB sticks with keys."""

_NO_FULL_SYNC = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)
_MODES_HINT = "; a volume without permissions (exFAT, FAT) gives every file another: copy it to this disk"
UNWRITABLE_HINT = "check free space and permissions of the state folder"


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` by `data` so that a crash leaves either the old or the new content, durably.

    Writes a temporary file beside it, fsyncs, renames, and fsyncs the folder. Raises OSError.
    """
    temporary = _write_temporary(path, data, mode)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename is durable only once the folder is.
    sync_folder(path.parent)


def make_private(folder: Path, own: Collection[str] = ()) -> None:
    """Make a folder with mode 0700, or give a folder that is there this mode.

    One with anything in it that others may read, but for the names `own`, is not a folder for state alone: a
    home folder, or `/usr/local/var`. Others can still read there afterwards, and no longer write. Raises
    OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    with os.scandir(folder) as entries:
        shared = any(
            entry.name not in own and entry.stat(follow_symlinks=False).st_mode & 0o044 for entry in entries
        )
    if not shared:
        folder.chmod(0o700)
    elif not mode & stat.S_ISVTX:
        folder.chmod(mode & ~0o022)


def create_exclusive(path: Path, data: bytes, *, mode: int = 0o600) -> bool:
    """Create `path` with all of `data`, or leave an existing file alone and return False.

    Raises OSError, and ConfigError (VOLUME_WITHOUT_MODES) where the volume would show the file to others.
    """
    temporary = _write_temporary(path, data, mode)
    try:
        # A link fails where a file exists; a rename would replace it.
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_alone(path, data, mode)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def read_secret(path: Path, *, max_bytes: int = 1 << 16) -> bytes:
    """Read a secret that only its owner can read.

    Raises FileNotFoundError, and ConfigError (SECRET_FILE_UNSAFE) for a link, another owner, a mode wider
    than 0600 or an absurd size.
    """
    descriptor = _open_no_follow(path)
    try:
        status = os.fstat(descriptor)  # before `fdopen`, which fails on a folder with another error
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise _unsafe(path, "is not a regular file of this user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise _unsafe(path, "can be read by others", _MODES_HINT)
        if status.st_size > max_bytes:
            raise _unsafe(path, "is too large")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes + 1)
    finally:
        os.close(descriptor)


def read_bounded(path: Path, *, max_bytes: int = MAX_STATE_BYTES) -> bytes:
    """Read a whole file of at most `max_bytes`. Raises OSError, and ConfigError (FILE_TOO_LARGE)."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ConfigError(f"file {path.name} is larger than {max_bytes} bytes", reason="FILE_TOO_LARGE")
    return data


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The error (STATE_UNWRITABLE) for a disk that is full, read-only or without permission."""
    return ConfigError(
        f"cannot write to {path}: {error.strerror}", hint=UNWRITABLE_HINT, reason="STATE_UNWRITABLE"
    )


def _write_temporary(path: Path, data: bytes, mode: int) -> Path:
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            sync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _create_alone(path: Path, data: bytes, mode: int) -> bool:
    """`create_exclusive` without links: a crash may leave the file half written.

    Such volumes may ignore modes too, so the file's mode is checked while it is still empty.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) & ~mode & 0o077:
                raise ConfigError(
                    f"the volume of {path} keeps no permissions: others could read the file",
                    hint="take a volume that keeps them, as an encrypted APFS one",
                    reason="VOLUME_WITHOUT_MODES",
                )
            file.write(data)
            file.flush()
            sync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Writes a folder's entries to the disk itself, as `sync` does. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """Returns once what was written is on the disk itself, on macOS too. Raises OSError."""
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:  # macOS: fsync alone stops at the drive's own cache
        try:
            fcntl.fcntl(descriptor, full_sync)
            return
        except OSError as error:  # SMB, exFAT and some NFS do not support it
            if error.errno not in _NO_FULL_SYNC:
                raise
    os.fsync(descriptor)


def _open_no_follow(path: Path) -> int:
    try:
        # O_NONBLOCK: a pipe in the secret's place would otherwise hold the process up for ever.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unsafe(path, "cannot be opened") from error


def _unsafe(path: Path, what: str, more: str = "") -> ConfigError:
    return ConfigError(
        f"secret file {path} {what}",
        reason="SECRET_FILE_UNSAFE",
        hint=f"it has to be a regular file of this user with mode 0600{more}",
    )
