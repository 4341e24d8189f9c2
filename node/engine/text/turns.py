"""Prompts that wait to be read, by client: clients take turns, and of each one prompt is read at a time.

So a client whose prompts are costly holds up itself. Of all clients together one prompt of a costly kind is
read at a time: it takes memory, and the other readers are left to others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Waiting(NamedTuple, Generic[T]):
    number: int
    item: T
    kind: str


class Turn(NamedTuple, Generic[T]):
    """What a reader has taken, until it says `done`."""

    client: bytes
    item: T
    kind: str


class Turns(Generic[T]):
    """Used by any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._clients: OrderedDict[bytes, deque[_Waiting[T]]] = OrderedDict()  # in the order of their turns
        self._busy: set[bytes] = set()
        self._kinds: set[str] = set()  # costly ones, of which one is being read
        self._closed = False
        self._count = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def put(self, client: bytes, number: int, item: T, kind: str = "") -> None:
        """Adds what comes after all others of its client. It can be taken back by its number. `kind` names
        what makes it costly, if anything does."""
        with self._changed:
            self._clients.setdefault(client, deque()).append(_Waiting(number, item, kind))
            self._count += 1
            self._changed.notify()

    def take(self) -> Turn[T] | None:
        """Waits for what can be read now, of the client whose turn it is; None once these are closed."""
        with self._changed:
            while (client := self._next()) is None:
                if self._closed:
                    return None
                self._changed.wait()
            waiting = self._clients.pop(client)
            found = waiting.popleft()
            if waiting:
                self._clients[client] = waiting  # behind the others
            self._count -= 1
            self._busy.add(client)
            if found.kind:
                self._kinds.add(found.kind)
            return Turn(client, found.item, found.kind)

    def done(self, turn: Turn[T]) -> None:
        """What was taken has been read."""
        with self._changed:
            self._busy.discard(turn.client)
            self._kinds.discard(turn.kind)
            self._changed.notify_all()

    def remove(self, number: int) -> T | None:
        """Takes back what waits; None where it does not."""
        with self._changed:
            for client, waiting in self._clients.items():
                for place, each in enumerate(waiting):
                    if each.number == number:
                        del waiting[place]
                        if not waiting:
                            del self._clients[client]
                        self._count -= 1
                        return each.item
        return None

    def clear(self) -> list[T]:
        """Takes back all that waits."""
        with self._changed:
            left = [each.item for waiting in self._clients.values() for each in waiting]
            self._clients.clear()
            self._count = 0
            return left

    def close(self) -> None:
        """Ends all `take`, those that wait included: there is nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> bytes | None:
        if self._closed:
            return None
        free = (client for client in self._clients if client not in self._busy)
        return next((one for one in free if self._clients[one][0].kind not in self._kinds), None)
