"""Prompts that wait to be read, by client: clients take turns, and of each one prompt is read at a time.

So a client whose prompts are costly holds up itself. Of all clients together one prompt of a costly kind is
read at a time: it takes memory, and the other readers are left to others. A client is charged for the time
for which it holds such a turn, and the client with the least comes first. Turns are given up in the middle.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_REMEMBERED = 1024
"""Clients whose time is kept while they have nothing to read."""


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
        self._spent: OrderedDict[bytes, float] = OrderedDict()  # seconds of costly turns, by client
        self._least = 0.0  # with which clients begin that come anew

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def put(self, client: bytes, number: int, item: T, kind: str = "") -> None:
        """Adds what comes after all others of its client. It can be taken back by its number. `kind` names
        what makes it costly, if anything does."""
        with self._changed:
            if kind and client not in self._clients and client not in self._busy:
                self._spent[client] = max(self._of(client), self._least)  # nobody saves up
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

    def charge(self, turn: Turn[T], seconds: float) -> bool:
        """Adds to the time of a client's costly turns. Whether this turn is to be given up, because another
        client with less waits for this kind."""
        with self._changed:
            self._spend(turn.client, seconds)
            rivals = (one for one in self._free() if one != turn.client and self._kind(one) == turn.kind)
            return bool(turn.kind) and any(self._of(one) < self._of(turn.client) for one in rivals)

    def put_back(self, turn: Turn[T], number: int) -> None:
        """What was taken goes on later, before all else of its client."""
        with self._changed:
            self._clients.setdefault(turn.client, deque()).appendleft(_Waiting(number, turn.item, turn.kind))
            self._count += 1
            self._end(turn)

    def done(self, turn: Turn[T]) -> None:
        """What was taken has been read."""
        with self._changed:
            self._end(turn)

    def _end(self, turn: Turn[T]) -> None:
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
        """The client that has waited for longest; or, if that waits for a costly kind, the client with the
        least time of all that wait for it."""
        if self._closed:
            return None
        free = [one for one in self._free() if self._kind(one) not in self._kinds]
        if not free or not (kind := self._kind(free[0])):
            return free[0] if free else None
        first = min((one for one in free if self._kind(one) == kind), key=self._of)
        self._least = max(self._least, self._of(first))
        return first

    def _free(self) -> Iterator[bytes]:
        return (client for client in self._clients if client not in self._busy)

    def _kind(self, client: bytes) -> str:
        return self._clients[client][0].kind

    def _of(self, client: bytes) -> float:
        return self._spent.get(client, self._least)

    def _spend(self, client: bytes, seconds: float) -> None:
        self._spent[client] = self._of(client) + seconds
        self._spent.move_to_end(client)
        if len(self._spent) > _REMEMBERED:
            self._spent.popitem(last=False)
