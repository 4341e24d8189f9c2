"""How long changes of a lane's rows are gathered before they are made, by what they are measured to cost."""

from __future__ import annotations

from collections import deque
from math import ceil
from statistics import median

SHARE = 0.1
"""Part of the time that copying caches may take, as far as changes can wait."""

SHORTEST, LONGEST = 4, 32
"""Steps of a lane between changes that can wait, at least and at most."""

_SAMPLES = 18


class ChangeCost:
    """The measured cost of a change. It copies the lane's caches, and longer rows take longer.

    Rounds with and without changes tell how long; rounds with prefill are left out.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_SAMPLES)
        self._costs: deque[float] = deque(maxlen=_SAMPLES)

    def measure(self, seconds: float, changes: int) -> None:
        """A lane's round took so long, with so many changes of lanes in it."""
        if not changes:
            self._plain.append(seconds)
        elif self._plain:
            self._costs.append((seconds - median(self._plain)) / changes)

    def interval(self, lanes: int) -> int:
        """Steps between changes of one of so many lanes, all of which wait for each other's."""
        if not self._costs:
            return SHORTEST
        share = SHARE * max(median(self._plain), 1e-9)
        return min(max(SHORTEST, ceil(lanes * median(self._costs) / share)), LONGEST)
