"""Join tokens: only a hash of the secret is kept, and each use is spent by one transaction."""

from __future__ import annotations

import hashlib
import hmac

from sealring.coordinator.store.database import Database
from sealring.coordinator.store.messages import Messages
from sealring.mesh.errors import NotFound
from sealring.mesh.pki.certificates import Role
from sealring.v1.store_pb2 import StoredToken


class Tokens(Messages[StoredToken]):
    """The open join tokens."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, "token", StoredToken, lambda one: one.id, lambda one: Role(one.role))

    def add(self, token: StoredToken, secret: bytes) -> None:
        """Remember a token, and drop those that have expired when it is made."""
        token.secret_hash = _hash(secret)
        with self._database.transaction():
            for one in self.all():
                if one.expires <= token.created:
                    self.remove(one.id)
            self.save(token)

    def spend(self, identifier: str, secret: bytes, role: Role, *, now: float) -> bool:
        """Whether this token was good; it has one use less afterwards. Of many callers, as many get True."""
        with self._database.transaction():
            token = self._held(identifier, secret, now)
            if token is None or token.role != role:
                return False
            token.uses -= 1
            if token.uses:
                self.save(token)
            else:
                self.remove(identifier)
            return True

    def holds(self, identifier: str, secret: bytes, *, now: float) -> bool:
        """Whether a token is open and this is its secret, whatever it is for."""
        return self._held(identifier, secret, now) is not None

    def revoke(self, identifier: str) -> None:
        """Forget a token. Raises NotFound (UNKNOWN_TOKEN)."""
        if not self.remove(identifier):
            raise NotFound(
                "there is no such join token", hint="it may be spent or expired", reason="UNKNOWN_TOKEN"
            )

    def is_open(self, identifier: str) -> bool:
        """Whether a token is neither used up nor revoked; it may have expired."""
        return self.find(identifier) is not None

    def open(self, *, now: float) -> list[StoredToken]:
        """The tokens that are still good. Nothing is written, which a full disk would refuse."""
        found = [one for one in self.all() if one.expires > now]
        return sorted(found, key=lambda one: one.created)

    def _held(self, identifier: str, secret: bytes, now: float) -> StoredToken | None:
        token = self.find(identifier)
        good = token is not None and hmac.compare_digest(token.secret_hash, _hash(secret))
        return token if good and token is not None and token.expires > now else None


def _hash(secret: bytes) -> bytes:
    return hashlib.sha256(b"sealring/v1 join token\x00" + secret).digest()
