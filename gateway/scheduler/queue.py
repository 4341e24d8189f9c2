"""The waiting requests of one ring: a bounded queue in which API keys take turns, earliest due first per key.

A request is due when it comes, `STEP_SECONDS` later for every step of its priority, or a little before its
deadline if that is earlier. So a request is never overtaken by one that comes more than 200 s after it,
whatever their priorities, and nothing waits for ever. Keys take turns whatever the priorities of their
requests: nobody gets ahead of others by calling everything urgent.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from heapq import heapify, heappop, heappush

from sealring.gateway.scheduler.actions import Request

STEP_SECONDS = 10.0
"""Seconds of waiting that a step of priority is worth."""

AHEAD_SECONDS = 10.0
"""How long before its deadline a request is due."""

_SLACK = 64


class _Line:
    """Requests by a time; entries of the heap whose request is not there any more count for nothing."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[float, int, Request]] = {}
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, due: float, order: int, request: Request) -> None:
        entry = self._requests[request.id] = (due, order, request)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self) + _SLACK:
            self._heap = list(self._requests.values())
            heapify(self._heap)

    def pop(self) -> Request:
        while True:
            entry = heappop(self._heap)
            if self._requests.get(entry[2].id) is entry:
                return self.remove(entry[2].id)

    def remove(self, request_id: str) -> Request:
        return self._requests.pop(request_id)[2]

    def discard(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def due(self) -> float:
        """The time of the first; infinity where there is none."""
        while self._heap and self._requests.get(self._heap[0][2].id) is not self._heap[0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def before(self, due: float) -> int:
        """How many go before one that comes now and is due then."""
        return sum(entry[0] <= due for entry in self._requests.values())

    def last(self) -> Request:
        """The one that would be the last."""
        return max(self._requests.values())[2]


class FairQueue:
    """`push` and `pop` take a time that grows with the logarithm of what waits, `ahead` with what waits."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[str, _Line] = OrderedDict()
        self._key_of: dict[str, str] = {}
        self._deadlines = _Line()
        self._back = itertools.count()
        self._front = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._key_of

    @property
    def full(self) -> bool:
        return len(self) >= self._capacity

    def push(self, request: Request, now: float) -> None:
        """Adds a request that comes `now`, or came before; a key that was not waiting gets the last turn."""
        self._add(request, place(request, now), next(self._back))

    def ahead(self, request: Request, now: float) -> int:
        """How many that wait would be taken before a request that comes `now`."""
        own = self._keys.get(request.key, _Line())
        before = own.before(_due(request, now))
        ahead, turns = before, before + 1
        for waiting in self._keys.values():
            if waiting is own:
                turns = before  # those behind its own key have had one turn less
            else:
                ahead += min(len(waiting), turns)
        return ahead

    def push_front(self, request: Request) -> None:
        """Gives a request its place back that it had before it was taken; never refused for length."""
        self._add(request, -math.inf, next(self._front))
        self._keys.move_to_end(request.key, last=False)

    def _add(self, request: Request, due: float, order: int) -> None:
        self._keys.setdefault(request.key, _Line()).push(due, order, request)
        self._key_of[request.id] = request.key
        if request.deadline < math.inf:
            self._deadlines.push(request.deadline, order, request)

    def pop(self) -> Request:
        """What is due first of the key whose turn it is. Raises KeyError when none waits."""
        if not self._keys:
            raise KeyError("no request waits")
        key, waiting = next(iter(self._keys.items()))
        request = waiting.pop()
        self._deadlines.discard(request.id)
        del self._key_of[request.id]
        if waiting:
            self._keys.move_to_end(key)
        else:
            del self._keys[key]
        return request

    def remove(self, request_id: str) -> Request:
        """Takes a request out. Raises KeyError when it does not wait."""
        key = self._key_of.pop(request_id)
        self._deadlines.discard(request_id)
        waiting = self._keys[key]
        request = waiting.remove(request_id)
        if not waiting:
            del self._keys[key]
        return request

    def displace(self, key: str) -> Request | None:
        """Makes room for `key` in a full queue: takes out the last request of the key that has most.

        None when `key` itself would then have no less than that one has, or when what would go has
        already been accepted by the head once.
        """
        largest = max(self._keys, key=lambda name: len(self._keys[name]), default=None)
        if largest is None or len(self._keys.get(key, ())) + 1 >= len(self._keys[largest]):
            return None
        last = self._keys[largest].last()
        return None if last.begun or last.attempts else self.remove(last.id)

    def expired(self, now: float) -> list[Request]:
        """Takes out the requests whose deadlines have passed."""
        gone = []
        while self._deadlines.due() <= now:
            gone.append(self.remove(self._deadlines.pop().id))
        return gone

    def drain(self) -> list[Request]:
        """Takes everything out, in the order of turns."""
        requests = []
        while self._keys:
            requests.append(self.pop())
        return requests


def place(request: Request, now: float) -> float:
    """When a request is due that comes `now`, or came before: it has a deadline from its arrival on."""
    if request.due is None:
        request.deadline, request.due = now + request.patience, _due(request, now)
    return request.due


def _due(request: Request, now: float) -> float:
    return now + min(STEP_SECONDS * request.priority, request.patience - AHEAD_SECONDS)
