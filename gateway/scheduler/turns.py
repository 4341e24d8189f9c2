"""Finds the lanes that need something without looking at the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from sealring.gateway.scheduler.lane import Lane
from sealring.gateway.scheduler.row import Row


class Turns:
    """Running lanes in the order of their turns, lanes that are spent, and lanes with rows near their limit.

    `note` has to follow whatever changes a lane; its cost does not depend on how many lanes there are.
    """

    def __init__(self) -> None:
        self._running: OrderedDict[int, Lane] = OrderedDict()
        self._parked: dict[int, Lane] = {}
        self._spent: dict[int, Lane] = {}
        self._near: dict[int, Lane] = {}

    def __len__(self) -> int:
        """Lanes that run."""
        return len(self._running) + len(self._parked)

    @property
    def free(self) -> int:
        """Running lanes that are not parked."""
        return len(self._running)

    def __iter__(self) -> Iterator[Lane]:
        """The lanes that run and are not parked, the one whose turn it is first."""
        return iter(self._running.values())

    def note(self, lane: Lane) -> None:
        """A lane has changed; one that begins to run gets the last turn, one that was parked the next."""
        number = lane.number
        parked = self._parked.pop(number, None)
        if lane.running:
            self._running.setdefault(number, lane)
            if parked is not None:
                self._running.move_to_end(number, last=False)
            self._spent.pop(number, None)
        else:
            self._running.pop(number, None)
            if lane.rows:
                self._spent[number] = lane
            else:
                self._spent.pop(number, None)
        if lane.near:
            self._near[number] = lane

    def stepped(self, lane: Lane) -> None:
        """A lane has had its turn."""
        self._running.pop(lane.number, None)
        self.note(lane)

    def park(self, lane: Lane) -> None:
        """A running lane cannot be stepped before one of its steps is done, which is to be noted."""
        self._parked[lane.number] = self._running.pop(lane.number)

    def wake(self, lane: Lane) -> None:
        """A step of the lane is done."""
        if lane.number in self._parked:
            self.note(lane)

    def take_spent(self) -> list[Lane]:
        """The lanes with rows of which nothing more is wanted."""
        spent = list(self._spent.values())
        self._spent.clear()
        return spent

    def wanting(self) -> list[tuple[Lane, Row]]:
        """Rows that could go on with more memory, lane by lane."""
        if not self._near:
            return []
        found = [(lane, row) for lane in self._near.values() for row in lane.wanting()]
        self._near = {lane.number: lane for lane, _ in found}
        return found
