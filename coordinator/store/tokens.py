"""Join tokens: only a hash of the secret is kept, and each use is spent by one atomic update."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sealring.coordinator.store.database import Database, columns
from sealring.mesh.errors import NotFound
from sealring.mesh.pki.certificates import Role


@dataclass(frozen=True)
class StoredToken:
    """A token that is not used up; times are seconds since 1970, `uses` are machines that it still enrols."""

    id: str
    role: Role
    created: int
    expires: int
    note: str
    uses: int = 1


class Tokens:
    """The open join tokens."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, token: StoredToken, secret: bytes) -> None:
        """Remember a token, and drop those that have expired when it is made."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM tokens WHERE expires <= ?", (token.created,))
            self._database.write("tokens", vars(token) | {"secret_hash": _hash(secret)}, verb="INSERT")

    def spend(self, identifier: str, secret: bytes, role: Role, *, now: float) -> bool:
        """Whether this token was good; it has one use less afterwards. Of many callers, as many get True."""
        with self._database.transaction() as connection:
            # Check and decrement in one statement: two callers cannot both take the last use.
            spent = connection.execute(
                "UPDATE tokens SET uses = uses - 1"
                " WHERE id = ? AND secret_hash = ? AND role = ? AND expires > ? AND uses > 0",
                (identifier, _hash(secret), role, now),
            )
            connection.execute("DELETE FROM tokens WHERE id = ? AND uses <= 0", (identifier,))
            return spent.rowcount == 1

    def holds(self, identifier: str, secret: bytes, *, now: float) -> bool:
        """Whether a token is open and this is its secret, whatever it is for."""
        found = self._database.row(
            "SELECT 1 FROM tokens WHERE id = ? AND secret_hash = ? AND expires > ?",
            identifier,
            _hash(secret),
            now,
        )
        return found is not None

    def revoke(self, identifier: str) -> None:
        """Forget a token. Raises NotFound (UNKNOWN_TOKEN)."""
        with self._database.transaction() as connection:
            if connection.execute("DELETE FROM tokens WHERE id = ?", (identifier,)).rowcount != 1:
                raise NotFound(
                    "there is no such join token", hint="it may be spent or expired", reason="UNKNOWN_TOKEN"
                )

    def is_open(self, identifier: str) -> bool:
        """Whether a token is neither used up nor revoked; it may have expired."""
        return self._database.row("SELECT 1 FROM tokens WHERE id = ?", identifier) is not None

    def clear(self) -> None:
        """Forget every token."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM tokens")

    def open(self, *, now: float) -> list[StoredToken]:
        """The tokens that are still good. Nothing is written, which a full disk would refuse."""
        rows = self._database.rows(
            "SELECT id, role, created, expires, note, uses FROM tokens WHERE expires > ?"
            " ORDER BY created, id",
            now,
        )
        return [StoredToken(**columns(row) | {"role": Role(row["role"])}) for row in rows]


def _hash(secret: bytes) -> bytes:
    return hashlib.sha256(b"sealring/v1 join token\x00" + secret).digest()
