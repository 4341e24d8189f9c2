"""The audit log: who did what to whom, each entry holding the hash of the one before it."""

from __future__ import annotations

from collections.abc import Mapping

from sealring.coordinator.store.database import Database
from sealring.coordinator.store.messages import Messages
from sealring.mesh.audit import FIRST_PREVIOUS, KEPT, PRUNED, entry_hash
from sealring.v1 import admin_pb2

PRUNED_AT_ONCE = 5_000
_MAX_VALUE = 256


class AuditLog(Messages[admin_pb2.AuditEntry]):
    """Append only, but for the oldest entries: `kept` stay, or up to `PRUNED_AT_ONCE` more."""

    def __init__(self, database: Database, *, kept: int = KEPT, at_once: int = PRUNED_AT_ONCE) -> None:
        super().__init__(database, "audit", admin_pb2.AuditEntry, lambda entry: entry.sequence)
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
        first = self.entries(after=0, limit=1)
        if not first or last - first[0].sequence + 1 < self._kept + self._at_once:
            return
        through = self.find(last - self._kept)
        assert through is not None
        details = {"through": through.sequence, "hash": through.hash.hex()}
        self._add(at, "coordinator", PRUNED, "audit", details)
        self._remove("key <= ?", through.sequence)

    def _add(self, at: float, actor: str, action: str, subject: str, details: Mapping[str, object]) -> None:
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
        entry.hash = entry_hash(entry)
        self.save(entry)

    def entries(self, *, after: int, limit: int, newest: bool = False) -> list[admin_pb2.AuditEntry]:
        """At most `limit` entries with a sequence number above `after`, oldest first; of more than that the
        first, or the `newest`."""
        order = "DESC" if newest else ""
        found = self._select(f"key > ? ORDER BY key {order} LIMIT ?", after, limit)
        return found[::-1] if newest else found

    def tokens_of(self, member: str) -> list[str]:
        """The ids of the join tokens that a member has enrolled with."""
        # The whole log is searched, for the member's bytes first: few entries are parsed.
        found = self._select("instr(message, ?)", member.encode())
        enrolments = [one for one in found if (one.action, one.subject) == ("enrol", member)]
        return sorted({one.details["token_id"] for one in enrolments})

    def head(self) -> tuple[int, bytes]:
        """Sequence number and hash of the newest entry; (0, FIRST_PREVIOUS) before the first."""
        newest = self._last()
        return (newest.sequence, newest.hash) if newest else (0, FIRST_PREVIOUS)
