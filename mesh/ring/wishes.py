"""How long those who use a model on demand want it to stay loaded."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

MOST = 1024
"""Users of a model whose wishes are kept; of more, the newest."""

K = TypeVar("K", bound=Hashable)


class Wishes(Generic[K]):
    """The wish of each user's newest request. It ends no other user's. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._asked: dict[K, tuple[float, float | None]] = {}  # by user, the newest at the end

    def ask(self, user: K, seconds: float | None, now: float) -> None:
        """A request comes `now`, after which the model is to stay for `seconds`; None: as it is deployed."""
        self._asked.pop(user, None)
        self._asked[user] = now, seconds
        if len(self._asked) > MOST:
            del self._asked[next(iter(self._asked))]

    def keep(self, users: Collection[K]) -> None:
        """Forgets all other users."""
        self._asked = {user: asked for user, asked in self._asked.items() if user in users}

    def longest(self, deployed: float) -> float | None:
        """Seconds from the newest request on until no user's wish holds any more, where a user that names no
        time wants it `deployed` seconds. None if no user has named a time."""
        if all(seconds is None for _, seconds in self._asked.values()):
            return None
        newest = max(at for at, _ in self._asked.values())
        ends = (at + (deployed if seconds is None else seconds) for at, seconds in self._asked.values())
        return max(ends) - newest
