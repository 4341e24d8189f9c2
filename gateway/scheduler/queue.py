"""The waiting requests of one ring: a bounded queue in which API keys take turns, earliest due first per key.

A request is due when it comes, `STEP_SECONDS` later for every step of its priority, or a little before its
deadline if that is earlier. So a request is never overtaken by one that comes more than 200 s after it,
whatever their priorities, and nothing waits for ever. One that goes on comes before others of its key.
Keys take turns whatever the priorities of their requests: nobody gets ahead of others by calling everything
urgent.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Container, Mapping, Sequence
from typing import TypeAlias

from sealring.gateway.scheduler.request import Request, Row

STEP_SECONDS = 10.0
"""Seconds of waiting that a step of priority is worth."""

AHEAD_SECONDS = 10.0
"""How long before its deadline a request is due."""

WINDOW = 128
"""Requests that the estimate looks back at: twice the rows of most rings or more, because all may become free
at once."""

_LEAST = 4
"""Intervals below which there is no estimate: one long prompt is no pace."""

_LONGEST = 60
"""Longest `retry-after` in seconds: common clients ignore more."""

MOST_KEYS = 1024
"""Keys whose turns are remembered, more than have rows at once. The key whose last turn is the longest ago is
forgotten first: it comes first as a new one too."""

_Entry: TypeAlias = tuple[float, int, Request]
"""The time it is due, and a number that no other has, so that requests are never compared."""


class FairQueue:
    """The requests of each key are a sorted list, which is cheap for the few hundreds that wait."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._turns: OrderedDict[str, list[_Entry]] = OrderedDict()  # in the order of their turns
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
        """Adds a request that comes `now`, or came before; a key that was not waiting gets the last turn. One
        that goes on comes before others of its key."""
        due = due_time(request, now)
        self._add(request, -math.inf if request.progress.goes_on else due, next(self._number))

    def push_front(self, request: Request) -> None:
        """Puts a request that was taken back in front; the queue's length does not matter."""
        self._add(request, -math.inf, -next(self._number))
        self._turns.move_to_end(request.key, last=False)

    def _add(self, request: Request, due: float, order: int) -> None:
        entry = self._entries[request.id] = (due, order, request)
        insort(self._turns.setdefault(request.key, []), entry)

    def ahead(self, request: Request, now: float, taken: Mapping[str, int] = {}) -> int:
        """The number of requests that begin before one that comes `now`, by key those that were `taken` out
        and have not begun among them."""
        before = bisect_right(self._turns.get(request.key, []), (_due(request, now), math.inf))
        ahead = before = before + taken.get(request.key, 0)
        turns = before + 1
        for key, waiting in self._turns.items():
            if key == request.key:
                turns = before  # those behind its own key have had one turn less
            else:
                ahead += min(len(waiting) + taken.get(key, 0), turns)
        others = taken.keys() - self._turns.keys() - {request.key}
        return ahead + sum(min(taken[key], before + 1) for key in others)

    def pop(self) -> Request:
        """Takes the request that is due first of the key whose turn it is. Raises KeyError when none
        waits."""
        found = self.pop_but(())
        if found is None:
            raise KeyError("no request waits")
        return found

    def pop_but(self, keys: Container[str]) -> Request | None:
        """The request that is due first of the next key not in `keys`; None if no other key waits."""
        key = next((each for each in self._turns if each not in keys), None)
        if key is None:
            return None
        self._turns.move_to_end(key)
        return self.remove(self._turns[key][0][2].id)

    def pop_first(self) -> Request | None:
        """A request that comes before others of its key; None without one."""
        found = (waiting[0] for waiting in self._turns.values())
        first = next((request for due, _, request in found if due == -math.inf), None)
        return None if first is None else self.remove(first.id)

    @property
    def resuming(self) -> list[Request]:
        """The requests that a head has had before."""
        return [request for _, _, request in self._entries.values() if request.progress.resumes]

    def remove(self, request_id: str) -> Request:
        """Takes a request out. Raises KeyError when it does not wait."""
        entry = self._entries.pop(request_id)
        key = entry[2].key
        waiting = self._turns[key]
        del waiting[bisect_left(waiting, entry)]
        if not waiting:
            del self._turns[key]
        return entry[2]

    def displace(self, request: Request) -> Request | None:
        """Makes room for `request` in a full queue: takes out the last one of the key that has most.

        Where its own key would then have no less, one that goes on takes the place of a new one of its key,
        and any other has none. None also when what would go has been accepted by the head once.
        """
        own, most = self._turns.get(request.key, []), max(self._turns.values(), key=len, default=[])
        if among_own := len(own) + 1 >= len(most):
            most = own if request.progress.goes_on else []
        if not most or (last := most[-1][2]).progress.resumes or (among_own and last.progress.goes_on):
            return None
        return self.remove(last.id)

    def expired(self, now: float) -> list[Request]:
        """Takes out the requests whose deadlines have passed, the earliest first."""
        late = [request for _, _, request in self._entries.values() if request.progress.deadline <= now]
        return [self.remove(request.id) for request in sorted(late, key=lambda each: each.progress.deadline)]

    def drain(self) -> list[Request]:
        """Takes everything out, in the order of turns."""
        return [self.pop() for _ in range(len(self))]


class Turns:
    """The order of keys whose rows wait for one thing. The key goes first whose last turn is the longest ago,
    or a key without one. That a row came before another key's gives it no turn."""

    def __init__(self) -> None:
        self._had: dict[str, int] = {}  # the turns of each key, the key that had the last one at the end

    def next(self, rows: Collection[Row]) -> Sequence[Row]:
        """The rows of the key that is next, in their order; there must be some."""
        keys = {row.request.key for row in rows}
        new = [row.request.key for row in rows if row.request.key not in self._had]
        first = new[0] if new else next(key for key in self._had if key in keys)
        return [row for row in rows if row.request.key == first]

    def taken(self, key: str) -> int:
        """The key has a turn now; returns how many it had before."""
        before = self._had.pop(key, 0)
        self._had[key] = before + 1
        if len(self._had) > MOST_KEYS:
            del self._had[next(iter(self._had))]
        return before


class Pace:
    """The seconds between two requests that were begun while others waited, by which the wait of a new one
    is estimated. Pure; time is an argument."""

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=WINDOW)
        self._last: float | None = None

    def begun(self, now: float) -> None:
        if self._last is not None:
            self._intervals.append(max(0.0, now - self._last))
        self._last = now

    def rest(self) -> None:
        """Nothing waits, or no epoch runs: the time until the next start does not count."""
        self._last = None

    def wait(self, requests: int, now: float) -> float:
        """Seconds until `requests` requests have started, by estimate; 0 while too few have."""
        count = len(self._intervals)
        if count < _LEAST:
            return 0.0
        total = sum(self._intervals)
        standing = 0.0 if self._last is None else max(0.0, now - self._last)
        return requests * max(total / count, (total + standing) / (count + 1))


def retry_after(seconds: float) -> int:
    """The `retry-after` of a refusal: whole seconds, 1 to 60."""
    return round(min(max(1.0, seconds), _LONGEST))


def due_time(request: Request, now: float) -> float:
    """The time at which a request is due; sets its deadline on its arrival, which is `now` or was before."""
    progress = request.progress
    if progress.due is None:
        progress.deadline, progress.due = now + request.patience, _due(request, now)
    return progress.due


def _due(request: Request, now: float) -> float:
    return now + min(STEP_SECONDS * request.priority, request.patience - AHEAD_SECONDS)
