"""Signed rosters: stored before anybody sees them, so that no version is ever signed twice."""

from __future__ import annotations

from dataclasses import dataclass

from sealring.coordinator.store.database import Database, columns
from sealring.mesh.errors import Internal
from sealring.mesh.roster.model import TERM_BITS, term_of

_KEPT = 32
_SKIPPED = "skipped_rosters"


@dataclass(frozen=True)
class StoredRoster:
    """A signed roster: its version, the hash of its payload, and the envelope."""

    version: int
    hash: bytes
    envelope: bytes


class Rosters:
    """The newest signed rosters."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, roster: StoredRoster) -> None:
        """Store the next version durably. Raises Internal (ROSTER_VERSION) if it does not follow."""
        if roster.version != self.next_version():
            raise Internal(f"roster version {roster.version} does not follow", reason="ROSTER_VERSION")
        with self._database.transaction() as connection:
            self._database.write("rosters", vars(roster), verb="INSERT")
            connection.execute("DELETE FROM rosters WHERE version <= ?", (roster.version - _KEPT,))

    def next_version(self) -> int:
        """One above the newest, or the first after those that were skipped."""
        latest = self.latest()
        skipped = self._database.row("SELECT value FROM meta WHERE name = ?", _SKIPPED)
        return max(latest.version if latest else 0, int(skipped["value"]) if skipped else 0) + 1

    def skip(self, count: int) -> None:
        """Never sign the next `count` versions: members may hold others of these numbers."""
        last = self.next_version() - 1 + count
        with self._database.transaction() as connection:
            connection.execute("REPLACE INTO meta VALUES (?, ?)", (_SKIPPED, str(last).encode()))

    def begin_term(self) -> int:
        """Sign from now on in the term after this one, of which no version was ever signed."""
        term = term_of(self.next_version() - 1) + 1
        with self._database.transaction() as connection:
            connection.execute("REPLACE INTO meta VALUES (?, ?)", (_SKIPPED, str(term << TERM_BITS).encode()))
        return term

    def latest(self) -> StoredRoster | None:
        """The newest version, if any was ever signed."""
        row = self._database.row("SELECT * FROM rosters ORDER BY version DESC LIMIT 1")
        return None if row is None else StoredRoster(**columns(row))

    def find(self, version: int) -> StoredRoster | None:
        """A version, if it is still kept."""
        row = self._database.row("SELECT * FROM rosters WHERE version = ?", version)
        return None if row is None else StoredRoster(**columns(row))
