"""How long changes of a lane's rows are gathered before they are made, and what rows cost, as measured."""

from __future__ import annotations

from collections import deque
from math import ceil
from statistics import median

SHARE = 0.1
"""Part of the time that copying caches may take, as far as changes can wait."""

SHORTEST, LONGEST = 4, 32
"""Steps of a lane between changes that can wait, at least and at most."""

GUESS = 0.25
"""Part of a round that its rows take, and not the step as such, where nothing was seen."""

UNKNOWN = 12
"""Rounds that a change is taken to last before one was measured: few moves are worth that."""

_SAMPLES = 18
_ENOUGH = 4


class ChangeCost:
    """The measured cost of a change. It copies the lane's caches, and longer rows take longer.

    Rounds with and without changes tell how long; rounds with prefill are left out.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_SAMPLES)
        self._costs: deque[float] = deque(maxlen=_SAMPLES)
        self._by_rows: dict[int, deque[float]] = {}

    def measure(self, seconds: float, changes: int, rows: int = 0) -> None:
        """A lane's round took so long, with so many changes of lanes in it, the largest of so many rows."""
        if not changes:
            self._plain.append(seconds)
            if rows:
                self._by_rows.setdefault(rows, deque(maxlen=_SAMPLES)).append(seconds)
        elif self._plain:
            self._costs.append((seconds - self._round) / changes)

    @property
    def _round(self) -> float:
        """Seconds of a round without changes; 0 before there was one."""
        return median(self._plain) if self._plain else 0.0

    @property
    def seconds(self) -> float:
        """What a change costs; `UNKNOWN` rounds before one was measured."""
        return max(0.0, median(self._costs)) if self._costs else UNKNOWN * self._round

    def saved(self, rows: int, fewer: int) -> float:
        """Seconds by which a round is shorter when the largest lane has fewer rows.

        By the round times with other numbers of rows; before there are any, rows are taken for `GUESS` of it.
        """
        others = [other for other, seen in self._by_rows.items() if other != rows and len(seen) >= _ENOUGH]
        if rows not in self._by_rows or not others:
            return GUESS * self._round * (1 - fewer / rows)
        nearest = min(others, key=lambda other: abs(other - fewer))
        difference = median(self._by_rows[rows]) - median(self._by_rows[nearest])
        return difference / (rows - nearest) * (rows - fewer)

    def interval(self, lanes: int) -> int:
        """Steps between changes of one of so many lanes, all of which wait for each other's."""
        if not self._costs:
            return SHORTEST
        share = SHARE * max(self._round, 1e-9)
        return min(max(SHORTEST, ceil(lanes * self.seconds / share)), LONGEST)
