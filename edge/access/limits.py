"""What callers have under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from sealring.mesh.errors import InvalidInput, ResourceExhausted


class UnderWay:
    """How much each name has under way, never more than `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.counts: Counter[str] = Counter()

    @contextmanager
    def more(self, name: str, count: int = 1) -> Iterator[None]:
        """Counts the block as `count`.

        Raises ResourceExhausted (TOO_MANY_AT_ONCE), or InvalidInput (TOO_MANY_ANSWERS) where it would be too
        much with nothing else under way.
        """
        if count >= max(2, self._limit):
            raise InvalidInput(
                f"the request asks for more answers than the {self._limit} that its key may have at once",
                hint="send fewer prompts, or a lower n",
                reason="TOO_MANY_ANSWERS",
                param="n",
                limit=self._limit,
            )
        if self.counts[name] + count > self._limit:
            raise ResourceExhausted(
                f"more than {self._limit} requests would be under way",
                hint="wait until some have ended",
                reason="TOO_MANY_AT_ONCE",
                retry_after=1,
            )
        self.counts[name] += count
        try:
            yield
        finally:
            self.counts[name] -= count
            if not self.counts[name]:
                del self.counts[name]
