"""What callers have under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from sealring.mesh.errors import ResourceExhausted


class UnderWay:
    """How much each name has under way, never more than `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    @contextmanager
    def one_more(self, name: str) -> Iterator[None]:
        """Counts the block. Raises ResourceExhausted (TOO_MANY_AT_ONCE)."""
        if self._counts[name] >= self._limit:
            raise ResourceExhausted(
                f"{self._limit} requests are under way already",
                hint="wait until some have ended",
                reason="TOO_MANY_AT_ONCE",
                retry_after=1,
            )
        self._counts[name] += 1
        try:
            yield
        finally:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
