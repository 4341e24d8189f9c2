"""Everything that the coordinator remembers, in one place."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Self

from sealring.coordinator.store.audit import AuditLog
from sealring.coordinator.store.database import Database
from sealring.coordinator.store.deployments import Deployments
from sealring.coordinator.store.joincodes import StoredJoinCodes
from sealring.coordinator.store.members import Members
from sealring.coordinator.store.messages import Messages
from sealring.coordinator.store.operators import Operators
from sealring.coordinator.store.rosters import Rosters
from sealring.coordinator.store.tokens import Tokens
from sealring.v1.store_pb2 import StoredValue

DATABASE_NAME = "coordinator.db"


class Store(Database):
    """The database with a part for each kind of thing. Use it from one thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int) -> None:
        super().__init__(path, connection, lock)
        self.tokens = Tokens(self)
        self.join_codes = StoredJoinCodes(self)
        self.members = Members(self)
        self.operators = Operators(self)
        self.deployments = Deployments(self)
        self.rosters = Rosters(self)
        self.audit = AuditLog(self)
        self._meta = Messages(self, "meta", StoredValue, lambda one: one.name)

    @classmethod
    def create(cls, folder: Path) -> Self:
        """A new, empty store. Raises AlreadyExists (STATE_EXISTS), ConfigError (STATE_IN_USE)."""
        return super().create(folder / DATABASE_NAME)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The store of a coordinator. Raises ConfigError (STATE_*)."""
        return super().open(folder / DATABASE_NAME)

    def get_meta(self, name: str) -> bytes | None:
        """A value of the cluster's own."""
        found = self._meta.find(name)
        return found.value if found else None

    def set_meta(self, name: str, value: bytes) -> None:
        """Store a value of the cluster's own."""
        self._meta.save(StoredValue(name=name, value=value))

    def delete_meta(self, name: str) -> None:
        """Forget a value of the cluster's own."""
        self._meta.remove(name)
