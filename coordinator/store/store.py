"""Everything that the coordinator remembers, in one place."""

from __future__ import annotations

import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from sealring.coordinator.store.audit import AuditLog
from sealring.coordinator.store.database import Database
from sealring.coordinator.store.deployments import Deployments
from sealring.coordinator.store.joincodes import StoredJoinCodes
from sealring.coordinator.store.members import Members
from sealring.coordinator.store.operators import Operators
from sealring.coordinator.store.rosters import Rosters
from sealring.coordinator.store.tokens import Tokens
from sealring.mesh.errors import ConfigError

DATABASE_NAME = "coordinator.db"


class Store:
    """The tables. Use it from one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.tokens = Tokens(database)
        self.join_codes = StoredJoinCodes(database)
        self.members = Members(database)
        self.operators = Operators(database)
        self.deployments = Deployments(database)
        self.rosters = Rosters(database)
        self.audit = AuditLog(database)

    @classmethod
    def create(cls, state_dir: Path) -> Self:
        """A new, empty store. Raises AlreadyExists (STATE_EXISTS), ConfigError (STATE_IN_USE)."""
        return cls(Database.create(state_dir / DATABASE_NAME))

    @classmethod
    def open(cls, state_dir: Path) -> Self:
        """The store of a coordinator. Raises ConfigError (STATE_*)."""
        return cls(Database.open(state_dir / DATABASE_NAME))

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """Changes to several tables, all of them or none."""
        return self._database.transaction()

    def get_meta(self, name: str) -> bytes | None:
        """A value of the cluster's own."""
        row = self._database.row("SELECT value FROM meta WHERE name = ?", name)
        return None if row is None else bytes(row["value"])

    def set_meta(self, name: str, value: bytes) -> None:
        """Store a value of the cluster's own."""
        with self._database.transaction() as connection:
            connection.execute("REPLACE INTO meta VALUES (?, ?)", (name, value))

    def delete_meta(self, name: str) -> None:
        """Forget a value of the cluster's own."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM meta WHERE name = ?", (name,))

    @property
    def changes(self) -> int:
        """Counts what was changed since it was opened."""
        return self._database.changes

    def image(self) -> bytes:
        """All of the database as one file."""
        return self._database.image()

    def corrupt(self, table: str, what: str) -> ConfigError:
        """Something in a table is not what was written (STATE_CORRUPT)."""
        return self._database.corrupt(table, what)

    def close(self) -> None:
        """Let another process have it."""
        self._database.close()
