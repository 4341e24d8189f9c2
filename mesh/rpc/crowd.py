"""Those who wait without having been let in. They keep nobody out, whoever they are and however many."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator


class Place:
    """One of a crowd, charged to a name: an address, or an API key."""

    def __init__(self, crowd: Crowd, name: str, leave: Callable[[], object]) -> None:
        self.leave = leave
        self._crowd = crowd
        self._name = name
        self._inside = 0
        self._closed = False
        crowd.add(self, name)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def let_in(self, name: str) -> Iterator[None]:
        """Within the block it is not of the crowd. Afterwards it is its newest, charged to `name`."""
        self._inside += 1
        self._crowd.remove(self, self._name)
        try:
            yield
        finally:
            self._inside -= 1
            if not (self._inside or self._closed):
                self._name = name
                self._crowd.add(self, name)

    def close(self) -> None:
        """It is gone, or going."""
        self._closed = True
        self._crowd.remove(self, self._name)


class Crowd:
    """Waits in a bounded number of places. Who comes is never refused: when there is one too many, the oldest
    of the name that has most is sent away. So a name loses none before it has more than any other."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: defaultdict[str, dict[Place, None]] = defaultdict(dict)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, name: str, leave: Callable[[], object]) -> Place:
        """A place for who comes. `leave` is called at most once, when it is sent away."""
        return Place(self, name, leave)

    def add(self, place: Place, name: str) -> None:
        self._waiting[name][place] = None
        self._count += 1
        if self._count > self._most:
            self.send_away()

    def remove(self, place: Place, name: str) -> None:
        """Does nothing where it is not of the crowd."""
        if place in self._waiting.get(name, ()):
            del self._waiting[name][place]
            self._count -= 1
            if not self._waiting[name]:
                del self._waiting[name]

    def send_away(self) -> None:
        """Sends one away, if anybody waits."""
        if self._count:
            _, name = max(zip(map(len, self._waiting.values()), self._waiting, strict=True))
            place = next(iter(self._waiting[name]))
            place.close()
            place.leave()
