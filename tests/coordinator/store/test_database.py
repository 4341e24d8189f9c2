"""The lock on a coordinator's state, and what a file says of itself."""

from __future__ import annotations

import os
import resource
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from sealring.coordinator.store.database import SCHEMA_VERSION, Database, check_image, take_lock
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


def test_a_database_that_a_full_disk_has_no_room_for_is_refused(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(ConfigError) as caught:
            Database.create(tmp_path / "coordinator.db")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.reason == "STATE_UNWRITABLE"
    os.close(take_lock(tmp_path / "coordinator.db"))


def test_what_is_committed_reaches_the_disk_itself(tmp_path: Path) -> None:
    """On macOS fsync alone stops at the drive's cache, and a roster's version would be given out again."""
    Database.create(tmp_path / "state.db").close()
    database = Database.open(tmp_path / "state.db")
    asked = ("synchronous", "fullfsync", "checkpoint_fullfsync")
    said = [row[0] for name in asked if (row := database.row(f"PRAGMA {name}")) is not None]
    assert said == [2, 1, 1]
    database.close()


def changed(image: bytes, statement: str) -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(image)
        connection.execute(statement)
        connection.commit()
        return bytes(connection.serialize())


def test_an_image_is_a_whole_database_that_says_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    database = Database.create(path)
    image = database.image()
    with database.transaction() as connection:
        connection.execute("INSERT INTO rosters VALUES (7, x'', x'')")
    later = database.image()
    for _ in range(2):
        database.close()
    assert (check_image(image), check_image(later)) == (0, 7)
    assert (image[:15], image[18:20], len(image) % 4096) == (b"SQLite format 3", b"\x01\x01", 0)
    with closing(sqlite3.connect(path)) as opened:
        told = [opened.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    assert told == [int.from_bytes(b"src1"), SCHEMA_VERSION], "files of this release are read by the next"


SCHEMAS = Path(__file__).parent / "schemas"
FIRST = 6
"""The schema of the first release; `N.sql` is a dump by the release that had schema N, with a few rows."""


def earlier(version: int, folder: Path) -> Path:
    path = folder / "coordinator.db"
    with closing(sqlite3.connect(path)) as made:
        made.executescript((SCHEMAS / f"{version}.sql").read_text("utf-8"))
    return path


def shape_and_rows(path: Path) -> tuple[list[Any], dict[str, list[Any]]]:
    with closing(sqlite3.connect(path)) as opened:
        shape = opened.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()
        tables = [name for kind, name, _ in shape if kind == "table"]
        opened.row_factory = sqlite3.Row
        return shape, {
            name: [dict(row) for row in opened.execute(f"SELECT * FROM {name}")] for name in tables
        }


@pytest.mark.parametrize("version", range(FIRST, SCHEMA_VERSION))
def test_a_database_of_an_earlier_release_is_migrated_and_kept(version: int, tmp_path: Path) -> None:
    path = earlier(version, tmp_path)
    before = shape_and_rows(path)
    Database.open(path).close()
    Database.create(tmp_path / "new.db").close()
    shape, rows = shape_and_rows(path)
    assert shape == shape_and_rows(tmp_path / "new.db")[0]
    for name, found in before[1].items():
        told = [{column: row[column] for column in found[0]} for row in rows[name]] if found else []
        assert told == found, "no row is lost"
    kept = tmp_path / f"coordinator-schema-{version}.db"
    assert shape_and_rows(kept) == before
    assert kept.stat().st_mode & 0o777 == 0o600
    Database.open(path).close()  # which migrates nothing more


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    """Here another index has the name already."""
    path = earlier(FIRST, tmp_path)
    with closing(sqlite3.connect(path)) as opened:
        opened.execute("CREATE INDEX enrolments ON audit (actor)")
    before = shape_and_rows(path)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            Database.open(path)
        assert caught.value.reason == "STATE_UNWRITABLE"
        assert shape_and_rows(path) == before
        with closing(sqlite3.connect(path)) as opened:
            assert opened.execute("PRAGMA user_version").fetchone()[0] == FIRST


@pytest.mark.parametrize(
    ("version", "hint"), [(FIRST - 1, "anew"), (SCHEMA_VERSION + 1, "release that wrote")]
)
def test_what_no_release_wrote_or_a_later_one_is_refused(version: int, hint: str, tmp_path: Path) -> None:
    path = earlier(FIRST, tmp_path)
    with closing(sqlite3.connect(path)) as opened:
        opened.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(ConfigError, match=hint) as caught:
        Database.open(path)
    assert caught.value.reason == "STATE_VERSION"
    assert [one.name for one in tmp_path.glob("*schema*")] == []


def test_what_is_no_sound_image_of_this_release_is_refused(tmp_path: Path) -> None:
    database = Database.create(tmp_path / "coordinator.db")
    image = database.image()
    database.close()
    damaged = bytearray(image)
    damaged[4096:8192] = b"\xff" * 4096
    for bad, reason in (
        (changed(image, f"PRAGMA user_version = {SCHEMA_VERSION + 1}"), "STATE_VERSION"),
        (changed(image, f"PRAGMA user_version = {SCHEMA_VERSION - 1}"), "STATE_VERSION"),
        (changed(image, "DROP TABLE rosters"), "STATE_CORRUPT"),
        (bytes(damaged), "STATE_CORRUPT"),
        (b"junk" * 2048, "STATE_CORRUPT"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_image(bad)
        assert caught.value.reason == reason
