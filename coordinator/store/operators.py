"""The operators of the Admin service with their keys and roles."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sealring.coordinator.store.database import Database, columns
from sealring.mesh.errors import NotFound


class OperatorRole(enum.StrEnum):
    """The rights of an operator: read, or read and change."""

    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True)
class StoredOperator:
    """An operator. `key_hash` is SHA-256 of its TLS key's SubjectPublicKeyInfo; times are unix seconds.

    A role that this release does not know is None, and may do nothing.
    """

    name: str
    role: OperatorRole | None
    key_hash: bytes
    added: int
    expires: int


class Operators:
    """The operators, one key each. All others are refused, whatever certificate they hold."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, operator: StoredOperator) -> None:
        """Add an operator, or replace its role and key."""
        self._database.write("operators", vars(operator))

    def all(self) -> list[StoredOperator]:
        """Every operator, by name."""
        rows = self._database.rows("SELECT * FROM operators ORDER BY name")
        known = set(OperatorRole)
        return [
            StoredOperator(
                **columns(row) | {"role": OperatorRole(row["role"]) if row["role"] in known else None}
            )
            for row in rows
        ]

    def find(self, name: str) -> StoredOperator | None:
        """The operator of this name, if there is one."""
        return next((one for one in self.all() if one.name == name), None)

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

    def remove(self, name: str) -> None:
        """Forget an operator: its certificate counts for nothing from now on."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM operators WHERE name = ?", (name,))
