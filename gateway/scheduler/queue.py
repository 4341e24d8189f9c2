"""The waiting requests of one ring: a bounded queue in which API keys take turns, earliest due first per key.

A request is due when it comes, `STEP_SECONDS` later for every step of its priority, or a little before its
deadline if that is earlier. So a request is never overtaken by one that comes more than 200 s after it,
whatever their priorities, and nothing waits for ever. Keys take turns whatever the priorities of their
requests: nobody gets ahead of others by calling everything urgent.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Container
from typing import TypeAlias

from sealring.gateway.scheduler.request import Request

STEP_SECONDS = 10.0
"""Seconds of waiting that a step of priority is worth."""

AHEAD_SECONDS = 10.0
"""How long before its deadline a request is due."""

_Entry: TypeAlias = tuple[float, int, Request]
"""The time it is due, and a number that no other has, so that requests are never compared."""


class FairQueue:
    """The requests of each key are a sorted list, which is cheap for the few hundreds that wait."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.turns: OrderedDict[str, list[_Entry]] = OrderedDict()  # in the order of their turns
        self._entries: dict[str, _Entry] = {}
        self._number = itertools.count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def full(self) -> bool:
        return len(self) >= self._capacity

    def push(self, request: Request, now: float) -> None:
        """Adds a request that comes `now`, or came before; a key that was not waiting gets the last turn."""
        self._add(request, place(request, now), next(self._number))

    def push_front(self, request: Request) -> None:
        """Puts a request that was taken back in front; the queue's length does not matter."""
        self._add(request, -math.inf, -next(self._number))
        self.turns.move_to_end(request.key, last=False)

    def _add(self, request: Request, due: float, order: int) -> None:
        entry = self._entries[request.id] = (due, order, request)
        insort(self.turns.setdefault(request.key, []), entry)

    def ahead(self, request: Request, now: float) -> int:
        """The number of requests that would be taken before one that comes `now`."""
        ahead = before = bisect_right(self.turns.get(request.key, []), (_due(request, now), math.inf))
        turns = before + 1
        for key, waiting in self.turns.items():
            if key == request.key:
                turns = before  # those behind its own key have had one turn less
            else:
                ahead += min(len(waiting), turns)
        return ahead

    def pop(self) -> Request:
        """Takes the request that is due first of the key whose turn it is. Raises KeyError when none
        waits."""
        found = self.pop_but(())
        if found is None:
            raise KeyError("no request waits")
        return found

    def pop_but(self, keys: Container[str]) -> Request | None:
        """The request that is due first of the next key not in `keys`; None if no other key waits."""
        key = next((each for each in self.turns if each not in keys), None)
        if key is None:
            return None
        self.turns.move_to_end(key)
        return self.remove(self.turns[key][0][2].id)

    def remove(self, request_id: str) -> Request:
        """Takes a request out. Raises KeyError when it does not wait."""
        entry = self._entries.pop(request_id)
        key = entry[2].key
        waiting = self.turns[key]
        del waiting[bisect_left(waiting, entry)]
        if not waiting:
            del self.turns[key]
        return entry[2]

    def displace(self, key: str) -> Request | None:
        """Makes room for `key` in a full queue: takes out the last request of the key that has most.

        None when `key` itself would then have no less than that one has, or when what would go has
        already been accepted by the head once.
        """
        most = max(self.turns.values(), key=len, default=[])
        if len(self.turns.get(key, ())) + 1 >= len(most):
            return None
        last = most[-1][2]
        return None if last.progress.resumes else self.remove(last.id)

    def expired(self, now: float) -> list[Request]:
        """Takes out the requests whose deadlines have passed, the earliest first."""
        late = [request for _, _, request in self._entries.values() if request.progress.deadline <= now]
        return [self.remove(request.id) for request in sorted(late, key=lambda each: each.progress.deadline)]

    def drain(self) -> list[Request]:
        """Takes everything out, in the order of turns."""
        return [self.pop() for _ in range(len(self))]


def place(request: Request, now: float) -> float:
    """The time at which a request is due; sets its deadline on its arrival, which is `now` or was before."""
    progress = request.progress
    if progress.due is None:
        progress.deadline, progress.due = now + request.patience, _due(request, now)
    return progress.due


def _due(request: Request, now: float) -> float:
    return now + min(STEP_SECONDS * request.priority, request.patience - AHEAD_SECONDS)
