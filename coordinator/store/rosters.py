"""Signed rosters: stored before anybody sees them, so that no version is ever signed twice."""

from __future__ import annotations

from sealring.coordinator.store.database import Database
from sealring.coordinator.store.messages import Messages
from sealring.mesh.errors import Internal
from sealring.mesh.roster.model import TERM_BITS, term_of
from sealring.v1.store_pb2 import StoredNumber, StoredRoster

_KEPT = 32
_SKIPPED = "roster"


class Rosters(Messages[StoredRoster]):
    """The newest signed rosters."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, "roster", StoredRoster, lambda one: one.version)
        self._skipped = Messages(database, "skipped", StoredNumber, lambda one: one.name)

    def add(self, roster: StoredRoster) -> None:
        """Store the next version durably. Raises Internal (ROSTER_VERSION) if it does not follow."""
        if roster.version != self.next_version():
            raise Internal(f"roster version {roster.version} does not follow", reason="ROSTER_VERSION")
        with self._database.transaction():
            self.save(roster)
            self._remove("key <= ?", roster.version - _KEPT)

    def next_version(self) -> int:
        """One above the newest, or the first after those that were skipped."""
        latest, skipped = self.latest(), self._skipped.find(_SKIPPED)
        return max(latest.version if latest else 0, skipped.number if skipped else 0) + 1

    def skip(self, count: int) -> None:
        """Never sign the next `count` versions: members may hold others of these numbers."""
        self._skipped.save(StoredNumber(name=_SKIPPED, number=self.next_version() - 1 + count))

    def begin_term(self) -> int:
        """Sign from now on in the term after this one, of which no version was ever signed."""
        term = term_of(self.next_version() - 1) + 1
        self._skipped.save(StoredNumber(name=_SKIPPED, number=term << TERM_BITS))
        return term

    def latest(self) -> StoredRoster | None:
        """The newest version, if any was ever signed."""
        return self._last()
