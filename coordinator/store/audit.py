"""The audit log: who did what to whom, each entry holding the hash of the one before it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sealring.coordinator.store.database import Database, columns
from sealring.mesh.audit import FIRST_PREVIOUS, KEPT, PRUNED, entry_hash
from sealring.v1 import admin_pb2

PRUNED_AT_ONCE = 5_000
_MAX_VALUE = 256


class AuditLog:
    """Append only, but for the oldest entries: `kept` stay, or up to `PRUNED_AT_ONCE` more."""

    def __init__(self, database: Database, *, kept: int = KEPT, at_once: int = PRUNED_AT_ONCE) -> None:
        self._database = database
        self._kept = kept
        self._at_once = at_once

    def append(self, at: float, actor: str, action: str, subject: str, details: Mapping[str, object]) -> None:
        """Add an entry; detail values are cut to 256 characters."""
        with self._database.transaction():
            self._prune(at)
            self._add(at, actor, action, subject, details)

    def _prune(self, at: float) -> None:
        """Drops the oldest entries where there are too many, and says so in one that stays."""
        last, _ = self.head()
        first = self._database.row("SELECT min(sequence) FROM audit")
        if first is None or first[0] is None or last - first[0] + 1 < self._kept + self._at_once:
            return
        through = last - self._kept
        row = self._database.row("SELECT hash FROM audit WHERE sequence = ?", through)
        assert row is not None
        self._add(at, "coordinator", PRUNED, "audit", {"through": through, "hash": row["hash"].hex()})
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM audit WHERE sequence <= ?", (through,))

    def _add(self, at: float, actor: str, action: str, subject: str, details: Mapping[str, object]) -> None:
        with self._database.transaction():
            sequence, previous = self.head()
            entry = admin_pb2.AuditEntry(
                sequence=sequence + 1,
                at=int(at),
                actor=actor,
                action=action,
                subject=subject,
                details={name: str(value)[:_MAX_VALUE] for name, value in details.items()},
                previous=previous,
            )
            known = {field.name: getattr(entry, field.name) for field in entry.DESCRIPTOR.fields}
            own = {
                "details": json.dumps(dict(entry.details), sort_keys=True),
                "hash": entry_hash(entry),
            }
            self._database.write("audit", known | own, verb="INSERT")

    def entries(self, *, after: int, limit: int, newest: bool = False) -> list[admin_pb2.AuditEntry]:
        """At most `limit` entries with a sequence number above `after`, oldest first; of more than that the
        first, or the `newest`."""
        rows = self._database.rows(
            f"SELECT * FROM audit WHERE sequence > ? ORDER BY sequence {'DESC' if newest else ''} LIMIT ?",  # noqa: S608
            after,
            limit,
        )
        return [
            admin_pb2.AuditEntry(**columns(row) | {"details": json.loads(row["details"])})
            for row in (reversed(rows) if newest else rows)
        ]

    def tokens_of(self, member: str) -> list[str]:
        """The ids of the join tokens that a member has enrolled with."""
        rows = self._database.rows("SELECT details FROM audit WHERE action = 'enrol' AND subject = ?", member)
        return sorted({json.loads(row["details"]).get("token_id", "") for row in rows})

    def head(self) -> tuple[int, bytes]:
        """Sequence number and hash of the newest entry; (0, FIRST_PREVIOUS) before the first."""
        row = self._database.row("SELECT sequence, hash FROM audit ORDER BY sequence DESC LIMIT 1")
        return (row["sequence"], row["hash"]) if row else (0, FIRST_PREVIOUS)
