"""One SQLite file with one writer: opened under a lock, checked, and never half changed."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import structlog
from google.protobuf.message import DecodeError

from sealring.coordinator.store.schema import FIRST, SCHEMA, SCHEMA_VERSION, checksum_of, make_messages
from sealring.mesh.errors import AlreadyExists, ConfigError, Unavailable
from sealring.mesh.system.files import UNWRITABLE_HINT, unwritable, write_atomic
from sealring.mesh.units import size

RESTORE_HINT = "move the folder aside, then: sealring coordinator restore FILE (a backup)"
log = structlog.get_logger()
_LEAST = 16 << 20
_ROOM = f"make {size(_LEAST)} free, then start again: most is in models, below the state folder of a node"
_APPLICATION_ID = 0x73726331  # "src1"


class Database:
    """The connection. Use it from one thread; `transaction` may be nested and commits at the outermost."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int) -> None:
        self._path = path
        self._connection = connection
        self._lock = lock
        self._depth = 0
        self.trouble = ""
        """Why the last change could not be written; empty if it was."""

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new database with mode 0600.

        Raises AlreadyExists (STATE_EXISTS), ConfigError (STATE_IN_USE, STATE_UNWRITABLE).
        """
        lock = take_lock(path)
        try:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
            except FileExistsError:
                raise AlreadyExists(f"there is a database at {path} already", reason="STATE_EXISTS") from None
            connection = _connect(path)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.executescript(f"BEGIN;{SCHEMA}COMMIT;")
        except sqlite3.OperationalError as error:
            os.close(lock)
            raise ConfigError(
                f"the database {path} cannot be made: {error}",
                hint=UNWRITABLE_HINT,
                reason="STATE_UNWRITABLE",
            ) from None
        except BaseException:
            os.close(lock)
            raise
        return cls(path, connection, lock)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The database at `path`, for this process alone. That of an earlier release is migrated first, and
        kept as it was beside it.

        Raises ConfigError (STATE_MISSING, STATE_IN_USE, STATE_CORRUPT, STATE_VERSION, STATE_UNWRITABLE).
        """
        if not path.is_file():
            raise ConfigError(
                f"there is no coordinator state at {path.parent}",
                hint="make it with: sealring coordinator init",
                reason="STATE_MISSING",
            )
        lock = take_lock(path)
        try:
            return cls(path, _open_checked(path), lock)
        except BaseException:
            os.close(lock)
            raise

    @property
    def changes(self) -> int:
        """Counts what was changed since it was opened."""
        return self._connection.total_changes

    def image(self) -> bytes:
        """As `image_of`; it may be called in any thread."""
        return image_of(self._path)

    def close(self) -> None:
        """Close the file and let another process have it; once more does nothing."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            self._connection.close()
            os.close(lock)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing, durable when the outermost block has ended.

        Raises Unavailable (STATE_UNWRITABLE) when SQLite cannot write, a full disk for example.
        """
        # A nested block joins the outer one: a member and the roster that names it are stored together or not
        # at all.
        if self._depth:
            yield self._connection
            return
        self._depth += 1
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._connection.execute("COMMIT")
            self.trouble = ""
        except sqlite3.OperationalError as error:
            self._roll_back()
            self.trouble = f"the coordinator's database cannot be written: {error}"
            raise Unavailable(
                self.trouble,
                hint=UNWRITABLE_HINT,
                reason="STATE_UNWRITABLE",
            ) from error
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._depth -= 1

    def corrupt(self, what: str) -> ConfigError:
        """Something is not what was written (STATE_CORRUPT)."""
        return _corrupt(self._path, what)

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def check(self) -> None:
        """Looks at every row but the audit log's. Raises ConfigError (STATE_CORRUPT)."""
        query = "SELECT kind, key, message, checksum FROM messages WHERE kind != 'audit'"
        for kind, key, data, checksum in self.rows(query):
            if checksum != checksum_of(kind, key, data):
                raise self.corrupt(f"{kind} {key}".rstrip())

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What a SELECT finds."""
        return self._connection.execute(query, values).fetchall()


def _corrupt(path: Path, what: str) -> ConfigError:
    return ConfigError(f"the database {path} is corrupt: {what}", hint=RESTORE_HINT, reason="STATE_CORRUPT")


def take_lock(path: Path) -> int:
    """Keeps other processes from the database until the descriptor is closed.

    Raises ConfigError (STATE_IN_USE, STATE_UNWRITABLE).
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(
            path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise unwritable(path.parent, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"another coordinator uses the state in {path.parent}",
            hint="it runs here already, in another terminal or as a service: stop that first",
            reason="STATE_IN_USE",
        ) from None
    return lock


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    # FULL: a roster version or epoch number that was given out before a power failure must not be given out
    # again. Full fsync: on macOS fsync alone stops at the drive's cache.
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        "fullfsync = ON",
        "checkpoint_fullfsync = ON",
        "trusted_schema = OFF",
    ):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _open_checked(path: Path) -> sqlite3.Connection:
    connection = None
    try:
        connection = _connect(path)
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        healthy = connection.execute("PRAGMA quick_check").fetchone()[0] == "ok"
    except sqlite3.OperationalError as error:  # the disk: what is on it may be as good as ever
        if connection is not None:
            connection.close()
        free = shutil.disk_usage(path.parent).free  # a full disk is "disk I/O error" to SQLite
        raise ConfigError(
            f"the database {path} cannot be opened: {error}; its disk has {size(free)} left",
            hint=UNWRITABLE_HINT if free >= _LEAST else _ROOM,
            reason="STATE_UNWRITABLE",
        ) from None
    except sqlite3.DatabaseError:
        healthy, application, version = False, 0, 0
    if connection is None or not healthy or application != _APPLICATION_ID:
        if connection is not None:
            connection.close()
        raise _corrupt(path, "it cannot be read, or it is not a coordinator's")
    try:
        _migrate(connection, path, version)
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Makes the schema this release's, step by step in one transaction, after a copy of what there is.

    Raises ConfigError (STATE_VERSION, STATE_UNWRITABLE); the database is as it was then.
    """
    if version == SCHEMA_VERSION:
        return
    if not FIRST <= version < SCHEMA_VERSION:
        newer = version > SCHEMA_VERSION
        raise ConfigError(
            f"the database {path} has schema version {version} and this release knows {SCHEMA_VERSION}",
            hint="run the release that wrote it" if newer else "make the state folder anew",
            reason="STATE_VERSION",
        )
    try:
        write_atomic(path.with_name(f"{path.stem}-schema-{version}{path.suffix}"), image_of(path))
        connection.execute("BEGIN IMMEDIATE")
        make_messages(connection)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
        with suppress(sqlite3.Error):  # a standby's copy need not hold the pages of the tables that are gone
            connection.execute("VACUUM")
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"the database {path} of an earlier release cannot be migrated: {error}",
            hint=UNWRITABLE_HINT,
            reason="STATE_UNWRITABLE",
        ) from None
    except (ValueError, TypeError, KeyError, DecodeError) as error:
        raise _corrupt(path, str(error)) from None
    log.info("database_migrated", version=version, to=SCHEMA_VERSION)


def image_of(path: Path) -> bytes:
    """All of a database as one file, as it is after the last transaction, while others write to it.

    Its journal mode is SQLite's own. Raises sqlite3.Error.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as reader:
        image = bytearray(reader.serialize())
    image[18:20] = b"\x01\x01"  # a file in WAL mode cannot be opened in memory, to look at it
    return bytes(image)


def check_image(image: bytes) -> int:
    """The newest roster version of a database that came from elsewhere. Raises ConfigError (STATE_CORRUPT,
    STATE_VERSION)."""
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.deserialize(image)
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            sound = connection.execute("PRAGMA quick_check").fetchone()[0] == "ok"
            newest = connection.execute("SELECT max(key) FROM messages WHERE kind = 'roster'").fetchone()[0]
        except sqlite3.DatabaseError:
            version, sound, newest = SCHEMA_VERSION, False, 0
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"the copied database has schema version {version} and this release knows {SCHEMA_VERSION}",
            hint="run one release on the coordinator and its standby",
            reason="STATE_VERSION",
        )
    if not sound:
        raise ConfigError("the copy of the coordinator's database is corrupt", reason="STATE_CORRUPT")
    return int(newest or 0)
