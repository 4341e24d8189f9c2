"""The one table, its rows, and how a database of an earlier release becomes it."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from itertools import groupby
from sqlite3 import Connection, Row
from typing import Any

from google.protobuf.message import Message

from sealring.coordinator.planning.older import read_plan
from sealring.mesh.crypto.encoding import pack_fields
from sealring.v1 import admin_pb2
from sealring.v1.store_pb2 import (
    JoinCode,
    Revocation,
    Revocations,
    StoredDeployment,
    StoredMember,
    StoredNumber,
    StoredOperator,
    StoredRoster,
    StoredToken,
    StoredValue,
)

SCHEMA_VERSION = 9
SCHEMA = """
CREATE TABLE messages (
  kind TEXT NOT NULL, key NOT NULL, message BLOB NOT NULL, checksum INTEGER NOT NULL,
  PRIMARY KEY (kind, key)) WITHOUT ROWID;
"""
FIRST = 6
"""The schema of the first release. From there to 8 there was a table for each kind, with columns of the names
that the messages' fields have."""

_TABLES = (
    "meta",
    "tokens",
    "members",
    "revocations",
    "operators",
    "deployments",
    "epochs",
    "rosters",
    "audit",
)
Key = str | int


def packed(kind: str, key: Key, message: Message) -> tuple[str, Key, bytes, int]:
    """The row of a message."""
    data = message.SerializeToString(deterministic=True)
    return kind, key, data, checksum_of(kind, key, data)


def checksum_of(kind: str, key: Key, data: bytes) -> int:
    """CRC-32, which finds what a disk has changed. Nothing in the file finds what a person has changed."""
    return zlib.crc32(data, zlib.crc32(f"{kind}\0{key}\0".encode()))


def make_messages(connection: Connection) -> None:
    """Puts the table in place of those of schema 6 to 8, in the transaction that is open.

    Raises ValueError, TypeError for what no release has written; sqlite3.Error.
    """
    connection.execute(SCHEMA)
    rows = (packed(*row) for row in _earlier(connection))
    connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", rows)
    for table in _TABLES:
        connection.execute(f"DROP TABLE {table}")


def _earlier(connection: Connection) -> Iterator[tuple[str, Key, Message]]:
    cursor = connection.cursor()
    cursor.row_factory = Row

    def rows(table: str) -> list[dict[str, Any]]:
        return [dict(row) for row in cursor.execute(f"SELECT * FROM {table}")]  # noqa: S608

    for row in rows("meta"):
        yield _value(row["name"], row["value"])
    for row in rows("tokens"):
        yield "token", row["id"], StoredToken(**row)
    for row in rows("members"):
        lists = {"addresses": json.loads(row["addresses"]), "device_chain": _chain(row["device_chain"])}
        yield "member", row["id"], StoredMember(**row | lists)
    for identifier, of_one in groupby(rows("revocations"), lambda row: str(row["id"])):  # sorted by its key
        ended = [Revocation(**row) for row in of_one]
        yield "revocations", identifier, Revocations(id=identifier, revocations=ended)
    for row in rows("operators"):
        yield "operator", row["name"], StoredOperator(**row)
    for row in rows("deployments"):
        yield "deployment", row["name"], _deployment(**row)
    for row in rows("epochs"):
        yield "epoch", row["ring"], StoredNumber(name=row["ring"], number=row["epoch"])
    for row in rows("rosters"):
        yield "roster", row["version"], StoredRoster(**row)
    for row in rows("audit"):
        entry = admin_pb2.AuditEntry(**row | {"details": json.loads(row["details"])})
        yield "audit", entry.sequence, entry


def _value(name: str, value: bytes) -> tuple[str, Key, Message]:
    if name == "join_code":
        return "join code", "", JoinCode(**json.loads(value))
    if name == "skipped_rosters":
        return "skipped", "roster", StoredNumber(name="roster", number=int(value))
    if name == "skipped_epochs":
        return "epoch", "", StoredNumber(number=int(value))
    return "meta", name, StoredValue(name=name, value=value)


def _deployment(name: str, asked: bytes, plan: bytes, created: int, checksum: bytes) -> StoredDeployment:
    if checksum != hashlib.sha256(pack_fields(name.encode(), asked, plan)).digest():
        raise ValueError(f"deployment {name} is not what was written")
    return StoredDeployment(
        name=name,
        asked=admin_pb2.DeploymentSpec.FromString(asked),
        plan=read_plan(admin_pb2.DeploymentPlan.FromString(plan)),
        created=created,
    )


def _chain(stored: bytes) -> list[bytes]:
    certificates: list[bytes] = []
    while stored:
        end = 4 + int.from_bytes(stored[:4], "big")
        certificates.append(stored[4:end])
        stored = stored[end:]
    return certificates
