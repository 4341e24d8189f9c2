"""The operators of the Admin service with their keys and roles."""

from __future__ import annotations

import enum

from sealring.coordinator.store.database import Database
from sealring.coordinator.store.messages import Messages
from sealring.mesh.errors import NotFound
from sealring.v1.store_pb2 import StoredOperator


class OperatorRole(enum.StrEnum):
    """The rights of an operator: read, or read and change."""

    READ = "read"
    ADMIN = "admin"


class Operators(Messages[StoredOperator]):
    """The operators by name, one key each. All others are refused, whatever certificate they hold."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, "operator", StoredOperator, lambda one: one.name)

    def get(self, name: str) -> StoredOperator:
        """The operator of this name. Raises NotFound (UNKNOWN_OPERATOR)."""
        found = self.find(name)
        if found is None:
            raise NotFound(
                f"there is no operator {name[:64]!r}",
                hint="see: sealring operator list",
                reason="UNKNOWN_OPERATOR",
                param="name",
            )
        return found
