"""The waiting requests of one ring: bounded, first come first served per key, turn by turn over keys."""

from __future__ import annotations

from collections import OrderedDict

from gateway.scheduler.actions import Request


class FairQueue:
    """Every operation but `displace` takes constant time, whatever waits."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[str, OrderedDict[str, Request]] = OrderedDict()
        self._key_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._key_of

    @property
    def full(self) -> bool:
        return len(self) >= self._capacity

    def push(self, request: Request) -> None:
        """Adds behind the others of its key; a key that was not waiting gets the last turn."""
        self._keys.setdefault(request.key, OrderedDict())[request.id] = request
        self._key_of[request.id] = request.key

    def push_front(self, request: Request) -> None:
        """Gives a request its place back that it had before it was taken; never refused for length."""
        self.push(request)
        self._keys[request.key].move_to_end(request.id, last=False)
        self._keys.move_to_end(request.key, last=False)

    def pop(self) -> Request:
        """The next request: the oldest of the key whose turn it is. Raises KeyError when none waits."""
        key, waiting = next(iter(self._keys.items()))
        _, request = waiting.popitem(last=False)
        del self._key_of[request.id]
        if waiting:
            self._keys.move_to_end(key)
        else:
            del self._keys[key]
        return request

    def remove(self, request_id: str) -> Request:
        """Takes a request out. Raises KeyError when it does not wait."""
        key = self._key_of.pop(request_id)
        waiting = self._keys[key]
        request = waiting.pop(request_id)
        if not waiting:
            del self._keys[key]
        return request

    def displace(self, key: str) -> Request | None:
        """Makes room for `key` in a full queue: takes out the newest request of the key that has most.

        None when `key` itself would then have no less than that one has, or when what would go has
        already been accepted by the head once.
        """
        largest = max(self._keys, key=lambda name: len(self._keys[name]), default=None)
        if largest is None or len(self._keys.get(key, ())) + 1 >= len(self._keys[largest]):
            return None
        newest = next(reversed(self._keys[largest].values()))
        return None if newest.attempts else self.remove(newest.id)

    def drain(self) -> list[Request]:
        """Takes everything out, in the order of turns."""
        requests = []
        while self._keys:
            requests.append(self.pop())
        return requests
