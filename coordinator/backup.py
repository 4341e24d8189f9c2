"""Copies of a coordinator's state, and going on from one without contradicting what was signed since.

An older copy knows neither the rosters nor the epochs that came after it, and members refuse everything that
they have seen a newer one of. So whoever goes on from a copy skips more numbers than can have been used
since: rosters and epochs come far more slowly than `_PER_SECOND`, also when one copy is put back twice.
"""

from __future__ import annotations

import io
import os
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sealring.coordinator.init import CA_FILES, make_folder, state_files
from sealring.coordinator.keys import OPERATOR_DIR, ROOT_METADATA, ROSTER_KEY, ClusterKeys
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import DATABASE_NAME, Store
from sealring.coordinator.store.database import image_of
from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import AlreadyExists, ConfigError, InvalidInput
from sealring.mesh.roster.codec import issued_unverified
from sealring.mesh.roster.model import TERM_BITS
from sealring.mesh.system.files import unwritable, write_atomic

_NEEDED = (*CA_FILES, ROSTER_KEY, ROOT_METADATA, DATABASE_NAME)
_OPERATOR = tuple(f"{OPERATOR_DIR}/{name}" for name in ("member.json", "root.dsse", "tls.key", "tls.pem"))
_MAX_FILE_BYTES = 1 << 32
_MARGIN = 1 << 10
_PER_SECOND = 16
_MAX_SKIPPED = 1 << (TERM_BITS - 1)
_UNPACKED = ".restoring"
STANDBY_MARK = "standby"
PREDECESSOR = "predecessor"


def backup(settings: CoordinatorSettings, out: Path, *, clock: Clock = wall_clock) -> None:
    """Write everything that a restore needs to a new file of mode 0600; the coordinator may run meanwhile.

    The root key is not in it, nor are keys that `roster_key_files` names. Raises AlreadyExists (FILE_EXISTS),
    ConfigError (STATE_*), RosterError (ROOT_EXPIRED).
    """
    folder = settings.state_dir
    ClusterKeys.load(settings, now=clock())
    if not (folder / DATABASE_NAME).is_file():
        raise ConfigError(f"there is no coordinator state in {folder}", reason="STATE_MISSING")
    try:
        with _created(out) as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for name in sorted({*_NEEDED, *_OPERATOR} - {DATABASE_NAME}):
                    if (folder / name).is_file():
                        archive.add(folder / name, name, recursive=False)
                image = image_of(folder / DATABASE_NAME)
                entry = tarfile.TarInfo(DATABASE_NAME)
                entry.size, entry.mode = len(image), 0o600
                archive.addfile(entry, io.BytesIO(image))
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise AlreadyExists(
            f"there is a file {out} already", hint="name another", reason="FILE_EXISTS"
        ) from None
    except OSError as error:
        raise unwritable(out, error) from None
    except sqlite3.Error as error:
        raise ConfigError(
            f"the database in {folder} cannot be read: {error}", reason="STATE_CORRUPT"
        ) from None


def restore(
    settings: CoordinatorSettings, file: Path, *, standby: bool = False, clock: Clock = wall_clock
) -> None:
    """Make the state folder from a backup, and go on from there (`recover`), or stand by.

    Raises AlreadyExists (STATE_EXISTS), InvalidInput (BAD_BACKUP), ConfigError (STATE_*).
    """
    folder = settings.state_dir
    make_folder(settings, [file for file in state_files(settings) if file.parent == folder])
    unpacked = folder / _UNPACKED
    shutil.rmtree(unpacked, ignore_errors=True)
    try:
        (unpacked / OPERATOR_DIR).mkdir(parents=True, mode=0o700)
        names = _unpack(file, unpacked)
        if standby:
            write_atomic(folder / STANDBY_MARK, b"")  # first: it must not be taken for a coordinator's
        else:
            recover(settings.model_copy(update={"state_dir": unpacked}), clock=clock)
        (folder / OPERATOR_DIR).mkdir(mode=0o700, exist_ok=True)
        for name in sorted(names, key=lambda name: name == DATABASE_NAME):
            os.replace(unpacked / name, folder / name)
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def recover(settings: CoordinatorSettings, *, instead_of: str = "", clock: Clock = wall_clock) -> None:
    """Go on from an older copy of the state: numbers that members may have seen since are skipped.

    A coordinator that does so `instead_of` the one at that address begins another term. Open join tokens and
    the join code are dropped, because some may have been spent. The coordinator must not run. Raises
    ConfigError (STATE_*), RosterError (ROOT_EXPIRED).
    """
    now = clock()
    store = Store.open(settings.state_dir)
    try:
        keys = ClusterKeys.load(settings, now=now)
        with store.transaction():
            latest = store.rosters.latest()
            since = issued_unverified(latest.envelope) if latest else keys.root.issued
            skipped = min(_MARGIN + _PER_SECOND * max(0, int(now) - since), _MAX_SKIPPED)
            store.rosters.skip(skipped)
            store.deployments.skip_epochs(skipped)
            store.tokens.clear()
            store.join_codes.clear()
            details: dict[str, object] = {"skipped": skipped}
            if instead_of:
                details["term"] = store.rosters.begin_term()
                store.set_meta(PREDECESSOR, instead_of.encode())
            store.audit.append(now, "coordinator", "recover", keys.root.cluster, details)
    finally:
        store.close()


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """A new file for its owner alone, gone again if the block fails. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _unpack(file: Path, folder: Path) -> list[str]:
    """The files of a backup, by name. Raises InvalidInput (BAD_BACKUP), OSError."""
    names: list[str] = []
    try:
        with tarfile.open(file, "r:") as archive:
            while (entry := archive.next()) is not None:
                fits = entry.isreg() and entry.size <= _MAX_FILE_BYTES
                if entry.name not in (*_NEEDED, *_OPERATOR) or entry.name in names or not fits:
                    raise _bad_backup(file, f"it holds {entry.name[:64]!r}")
                content = archive.extractfile(entry)
                assert content is not None
                with _created(folder / entry.name) as target:
                    shutil.copyfileobj(content, target)
                names.append(entry.name)
    except FileNotFoundError:
        raise _bad_backup(file, "there is no such file") from None
    except (tarfile.TarError, EOFError) as error:
        raise _bad_backup(file, str(error)) from None
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise _bad_backup(file, f"it lacks {', '.join(missing)}")
    return names


def _bad_backup(file: Path, why: str) -> InvalidInput:
    return InvalidInput(
        f"{file} is no backup of a coordinator: {why}",
        hint="name a file that `sealring coordinator backup` wrote",
        reason="BAD_BACKUP",
    )
