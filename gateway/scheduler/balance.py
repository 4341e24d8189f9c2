"""When rows are moved from the lane with the most rows to those with the fewest, and how many.

A ring's round takes as long as its largest lane needs in every stage, so rows that leave the largest lane
make every round shorter. Moving a row copies the caches of two lanes once. It pays when the time
that later rounds save is more than the copies cost; both are measured (gateway.scheduler.changes). A row that
has few tokens left is not moved.

Only a difference of two rows or more that is a quarter of the larger lane counts, and only after `PATIENCE`
steps of that lane, because rows that arrive meanwhile fill the gaps for nothing. A move makes two lanes more
even by two rows, an arrival or a departure makes them less even by one at most, so moves come to an end.
"""

from __future__ import annotations

from sealring.gateway.scheduler.changes import ChangeCost
from sealring.gateway.scheduler.lane import Lane
from sealring.gateway.scheduler.memory import Ledger
from sealring.gateway.scheduler.row import Phase, Row

PATIENCE = 16
"""Steps of a lane for which it has to have too many rows."""

SHARE = 0.25
"""Part of the larger lane's rows that the difference must be, at least."""

LEAST_LEFT = 32
"""Tokens that a row which is moved has left at least, as far as its limit tells."""

COUNTED = 256
"""Tokens that a row is expected to go on for at most, for most end before their limit."""


class Balance:
    """One epoch's."""

    def __init__(self, ledger: Ledger, cost: ChangeCost) -> None:
        self._ledger = ledger
        self._cost = cost
        self._uneven: dict[int, int] = {}  # lane -> its step from which on it has had too many rows
        self._moving: list[Row] = []

    def moving(self, lane: Lane, leaving: int, lanes: int) -> list[Row]:
        """Rows that had better leave this one of so many lanes at its next step, beside those that end."""
        most, fewest = self._ledger.sizes()
        difference = most - leaving - fewest
        if self._ledger.lane_rows(lane.number) < most or difference < max(2, SHARE * most):
            self._uneven.pop(lane.number, None)
            return []
        since = self._uneven.setdefault(lane.number, lane.steps)
        if lane.steps - since < PATIENCE or lane.since_change < self._cost.interval(lanes):
            return []
        if any(row.phase is Phase.PREFILLED for row in self._moving):
            return []  # the lanes are not yet what they will be
        self._uneven[lane.number] = lane.steps
        found = [
            row
            for row in lane.movable(LEAST_LEFT)[: difference // 2]
            if self._ledger.fits_better(row.number, leaving)
        ]
        if leaving + len(found) >= len(lane.rows) or not self._pays(lane, found, most):
            return []
        self._moving = found
        return found

    def _pays(self, lane: Lane, rows: list[Row], most: int) -> bool:
        if not rows:
            return False
        rounds = min(COUNTED, *(lane.left(row) for row in rows))
        return self._cost.saved(most, most - len(rows)) * rounds > 2 * self._cost.seconds
