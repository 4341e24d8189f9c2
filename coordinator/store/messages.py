"""The messages of one kind: what all of the store's parts read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from sealring.coordinator.store.database import Database
from sealring.coordinator.store.schema import Key, checksum_of, packed

M = TypeVar("M", bound=Message)


class Messages(Generic[M]):
    """The messages of one kind by their keys. A reader may change its message, and save it again.

    `check` raises ValueError for what the message's type allows and this release does not know. Whatever
    reads raises ConfigError (STATE_CORRUPT).
    """

    def __init__(
        self,
        database: Database,
        kind: str,
        of: type[M],
        key: Callable[[M], Key],
        check: Callable[[M], object] = lambda _: None,
    ) -> None:
        self._database = database
        self._kind = kind
        self._of = of
        self._key = key
        self._check = check

    def save(self, message: M) -> None:
        """Store a message, with all its fields, in place of the one before."""
        self._check(message)
        row = packed(self._kind, self._key(message), message)
        with self._database.transaction() as connection:
            connection.execute("REPLACE INTO messages VALUES (?, ?, ?, ?)", row)

    def find(self, key: Key) -> M | None:
        """The message under a key."""
        return next(iter(self._select("key = ?", key)), None)

    def all(self) -> list[M]:
        """Every message, by key."""
        return self._select("1 ORDER BY key")

    def remove(self, key: Key) -> bool:
        """Forget a message; whether there was one."""
        return self._remove("key = ?", key) > 0

    def clear(self) -> None:
        """Forget every message of the kind."""
        self._remove("1")

    def _last(self) -> M | None:
        return next(iter(self._select("1 ORDER BY key DESC LIMIT 1")), None)

    def _select(self, where: str, *values: object) -> list[M]:
        """The messages of which an expression over the columns `key` and `message` holds."""
        query = f"SELECT key, message, checksum FROM messages WHERE kind = ? AND {where}"  # noqa: S608
        return [self._read(*row) for row in self._database.rows(query, self._kind, *values)]

    def _read(self, key: Key, data: bytes, checksum: int) -> M:
        try:
            if checksum != checksum_of(self._kind, key, data):
                raise ValueError
            message = self._of.FromString(data)
            self._check(message)
        except (ValueError, TypeError, DecodeError):
            raise self._database.corrupt(f"{self._kind} {str(key)[:128]}".rstrip()) from None
        return message

    def _remove(self, where: str, *values: object) -> int:
        with self._database.transaction() as connection:
            query = f"DELETE FROM messages WHERE kind = ? AND {where}"  # noqa: S608
            return connection.execute(query, (self._kind, *values)).rowcount
