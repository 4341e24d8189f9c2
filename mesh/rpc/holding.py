"""What requests under way hold, bounded so that nobody takes the room of everybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sealring.mesh.errors import ResourceExhausted


def _too_many_bytes() -> ResourceExhausted:
    return ResourceExhausted(
        "the requests under way have too many bytes",
        hint="try again later",
        reason="TOO_MANY_BYTES",
        retry_after=1,
    )


class Holding:
    """Bytes or others in use, by key. No key has more of them than are left for the others."""

    def __init__(self, most: int, full: Callable[[], ResourceExhausted] = _too_many_bytes) -> None:
        """`most`: of all keys together. `full` makes the error for more."""
        self._most = most
        self._full = full
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._held.total()

    def take(self, key: str, size: int) -> None:
        """Raises ResourceExhausted (TOO_MANY_BYTES, or that of `full`)."""
        if self._held[key] + size > self._most - self._held.total() - size:
            self._forget(key)
            raise self._full()
        self._held[key] += size

    def give_back(self, key: str, size: int) -> None:
        """Undoes as many bytes of `take`."""
        self._held[key] -= size
        self._forget(key)

    def _forget(self, key: str) -> None:
        if not self._held[key]:
            del self._held[key]


class Share:
    """The part of one request or connection in a Holding, which gets it back at the end of the block."""

    def __init__(self, holding: Holding, key: str) -> None:
        self._holding = holding
        self._key = key
        self._held = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back(self._held)

    def take(self, size: int) -> None:
        """Raises ResourceExhausted (TOO_MANY_BYTES)."""
        self._holding.take(self._key, size)
        self._held += size

    def give_back(self, size: int) -> None:
        """Undoes as many bytes of `take`."""
        self._holding.give_back(self._key, size)
        self._held -= size
