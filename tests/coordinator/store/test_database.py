"""The lock on a coordinator's state, and what a file says of itself."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from google.protobuf.message import Message

from sealring.coordinator.store import (
    Store,
    StoredDeployment,
    StoredJoinCode,
    StoredMember,
    StoredOperator,
    StoredRoster,
    StoredToken,
    database,
)
from sealring.coordinator.store.database import Database, check_image, take_lock
from sealring.coordinator.store.integrity import check_stored
from sealring.coordinator.store.schema import FIRST, SCHEMA_VERSION
from sealring.mesh.audit import verify_chain
from sealring.mesh.crypto import pack_fields
from sealring.mesh.errors import ConfigError
from sealring.mesh.pki import Role
from sealring.mesh.units import size
from sealring.v1 import admin_pb2
from sealring.v1.store_pb2 import Revocations, StoredNumber, StoredValue

NOW = 1_800_000_000


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


def test_how_much_a_disk_has_left_is_said_of_a_database_that_it_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite calls a full disk an I/O error."""
    path = tmp_path / "coordinator.db"
    Database.create(path).close()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        for free, hint in ((1 << 30, "check free space"), (5 << 20, "make 16.0 MiB free")):
            monkeypatch.setattr(
                database.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free)
            )
            with pytest.raises(ConfigError, match=rf"opened: .*; its disk has {size(free)} left") as caught:
                Database.open(path)
            assert caught.value.reason == "STATE_UNWRITABLE"
            assert caught.value.hint.startswith(hint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_is_committed_reaches_the_disk_itself(tmp_path: Path) -> None:
    """On macOS fsync alone stops at the drive's cache, and a roster's version would be given out again."""
    Database.create(tmp_path / "state.db").close()
    database = Database.open(tmp_path / "state.db")
    asked = ("synchronous", "fullfsync", "checkpoint_fullfsync")
    said = [value for name in asked for (value,) in database.rows(f"PRAGMA {name}")]
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
        connection.execute("INSERT INTO messages VALUES ('roster', 7, x'', 0)")
    later = database.image()
    for _ in range(2):
        database.close()
    assert (check_image(image), check_image(later)) == (0, 7)
    assert (image[:15], image[18:20], len(image) % 4096) == (b"SQLite format 3", b"\x01\x01", 0)
    with closing(sqlite3.connect(path)) as opened:
        told = [opened.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    assert told == [int.from_bytes(b"src1"), SCHEMA_VERSION], "files of this release are read by the next"


SCHEMAS = Path(__file__).parent / "schemas"
KINDS: dict[str, tuple[str, str, type[Message]]] = {
    "tokens": ("token", "id", StoredToken),
    "members": ("member", "id", StoredMember),
    "operators": ("operator", "name", StoredOperator),
    "deployments": ("deployment", "name", StoredDeployment),
    "rosters": ("roster", "version", StoredRoster),
    "audit": ("audit", "sequence", admin_pb2.AuditEntry),
}


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


def as_stored(column: str, value: Any) -> Any:
    """What a field holds in place of a column's value."""
    if column in ("addresses", "details"):
        return json.loads(value)
    return field_list(value) if column == "device_chain" else value


def field_list(packed: bytes) -> list[bytes]:
    found = []
    while packed:
        end = 4 + int.from_bytes(packed[:4])
        found.append(packed[4:end])
        packed = packed[end:]
    assert pack_fields(*found) == b"".join(pack_fields(one) for one in found)
    return found


def as_column(value: Any) -> Any:
    if isinstance(value, Message):
        return value.SerializeToString(deterministic=True)
    return dict(value) if hasattr(value, "items") else list(value) if hasattr(value, "append") else value


@pytest.mark.parametrize("version", range(FIRST, SCHEMA_VERSION))
def test_a_database_of_an_earlier_release_is_migrated_and_kept(version: int, tmp_path: Path) -> None:
    """Row by row. `schemas/make.txt` has the releases."""
    path = earlier(version, tmp_path)
    before = shape_and_rows(path)
    Store.open(tmp_path).close()
    Database.create(tmp_path / "new.db").close()
    shape, rows = shape_and_rows(path)
    assert shape == shape_and_rows(tmp_path / "new.db")[0]
    stored = {(row["kind"], row["key"]): row["message"] for row in rows["messages"]}
    for table, (kind, key, of) in KINDS.items():
        for row in before[1][table]:
            message = of.FromString(stored.pop((kind, row[key])))
            row.pop("checksum", None)
            told = {name: as_column(getattr(message, name)) for name in row}
            assert told == {name: as_stored(name, value) for name, value in row.items()}
    for row in before[1]["revocations"]:
        ended = Revocations.FromString(stored.pop(("revocations", row["id"])))
        assert [{name: getattr(one, name) for name in row} for one in ended.revocations] == [row]
    for row in before[1]["epochs"]:
        assert StoredNumber.FromString(stored.pop(("epoch", row["ring"]))).number == row["epoch"]
    for row in before[1]["meta"]:
        if ("meta", row["name"]) in stored:
            assert StoredValue.FromString(stored.pop(("meta", row["name"]))).value == row["value"]
    stored.pop(("join code", ""), None)
    left = {key: StoredNumber.FromString(data).number for key, data in stored.items()}
    assert left == ({} if version == FIRST else {("epoch", ""): 8, ("skipped", "roster"): 10})
    kept = tmp_path / f"coordinator-schema-{version}.db"
    assert shape_and_rows(kept)[1].keys() == before[1].keys()
    assert kept.stat().st_mode & 0o777 == 0o600
    Database.open(path).close()  # which migrates nothing more


@pytest.mark.parametrize("version", range(FIRST + 1, SCHEMA_VERSION))
def test_a_coordinator_goes_on_with_the_database_of_an_earlier_release(version: int, tmp_path: Path) -> None:
    earlier(version, tmp_path)
    store = Store.open(tmp_path)
    check_stored(store)
    assert verify_chain(store.audit.entries(after=0, limit=99)) == store.audit.head()
    assert store.rosters.next_version() == 12
    assert [store.deployments.next_epoch(ring) for ring in ("demo-0", "demo-1", "demo-2")] == [9, 10, 9]
    assert store.join_codes.find() == StoredJoinCode("1234567", NOW, NOW + 600, 2, 1, NOW + 3)
    assert [(one.id, one.uses, one.note) for one in store.tokens.open(now=NOW)] == [
        ("one", 2, "for the attic"),
        ("two", 1, ""),
    ]
    assert store.tokens.spend("one", b"secret", Role.MEMBER, now=NOW)
    (gone,) = store.members.gone(limit=9)
    assert store.members.banned(gone.id)
    assert store.audit.tokens_of(gone.id) == ["one"]
    (deployed,) = store.deployments.all()
    assert {stage.member for stage in deployed.plan.rings[0].stages} <= {
        one.id for one in store.members.all()
    }
    store.close()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    """Here another table has the name already."""
    path = earlier(FIRST, tmp_path)
    with closing(sqlite3.connect(path)) as opened:
        opened.execute("CREATE TABLE messages (kind)")
    before = shape_and_rows(path)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            Database.open(path)
        assert caught.value.reason == "STATE_UNWRITABLE"
        assert shape_and_rows(path) == before
        with closing(sqlite3.connect(path)) as opened:
            assert opened.execute("PRAGMA user_version").fetchone()[0] == FIRST


@pytest.mark.parametrize(
    "broken",
    [
        "UPDATE deployments SET plan = x'0a00'",
        "UPDATE deployments SET asked = x'ff'",
        "UPDATE members SET addresses = 'no list'",
        "UPDATE members SET trust = 'high'",
        "UPDATE meta SET value = 'x' WHERE name = 'skipped_epochs'",
        "UPDATE meta SET value = '[1]' WHERE name = 'join_code'",
        "ALTER TABLE tokens ADD COLUMN more",
        "UPDATE revocations SET role = 'none'",
        "UPDATE tokens SET role = 'none'",
        "UPDATE members SET level = 'none yet'",
        "UPDATE rosters SET hash = x'00'",
    ],
)
def test_an_earlier_database_that_is_broken_is_refused_and_kept(broken: str, tmp_path: Path) -> None:
    path = earlier(SCHEMA_VERSION - 1, tmp_path)
    with closing(sqlite3.connect(path, isolation_level=None)) as opened:
        opened.execute(broken)
    before = shape_and_rows(path)
    with pytest.raises(ConfigError) as caught:
        check_stored(Store.open(tmp_path))
    assert caught.value.reason == "STATE_CORRUPT"
    kept = tmp_path / f"coordinator-schema-{SCHEMA_VERSION - 1}.db"
    assert shape_and_rows(kept) == before


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
        (changed(image, "DROP TABLE messages"), "STATE_CORRUPT"),
        (bytes(damaged), "STATE_CORRUPT"),
        (b"junk" * 2048, "STATE_CORRUPT"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_image(bad)
        assert caught.value.reason == reason
