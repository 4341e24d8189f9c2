"""One lane: rows that are stepped together, and when it pays to change which ones they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from sealring.gateway.scheduler.row import Row

ANNOUNCED = 2
"""Steps of a lane that are announced at most: the one in flight and one ahead."""

_NEVER = 1 << 62
_SLACK = 64

EXTEND_AHEAD = 256
"""Tokens before its limit at which a row without a limit of its own asks for more memory."""


class Lane:
    """`steps` counts the decode steps announced. `ready` rows are prefilled and wait to be admitted.
    `done_at` and `before` are of its last step that is done: when that was, and what was announced before it.

    Nothing here looks at every row at every step: `_limits` is a heap of (lane step, row number), where an
    entry that its row no longer agrees with counts for nothing, and `_wants_from` is a lane step before which
    no row is near its limit, corrected when it is reached.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: dict[int, Row] = {}
        self.ready: list[Row] = []
        self.outstanding = 0
        self.steps = 0
        self.done_at = 0.0
        self.before = (0, 0.0, 0)
        self._closed: dict[int, Row] = {}
        self._ended: dict[int, Row] = {}
        self._changed_at = 0
        self._limits: list[tuple[int, int]] = []
        self._wants_from = _NEVER

    @property
    def running(self) -> bool:
        """True when a step of this lane would give a token to somebody who wants it."""
        return bool(self.ready) or len(self._closed) < len(self.rows)

    @property
    def stuck(self) -> bool:
        """True while a row is at its limit and its last token is on the way: the head reports no tokens of a
        row after it was told to evict it."""
        return bool(self.outstanding) and any(not row.closed for row in self._ended.values())

    def close(self, row: Row) -> None:
        """Nothing more is wanted of a row of this lane."""
        self._closed[row.number] = row

    def leaving(self) -> list[Row]:
        """Rows to leave out of the next step, closed or at their limit, by rising number."""
        if not self._closed and not self._ended:
            return []
        return [row for _, row in sorted((self._closed | self._ended).items())]

    def must_change(self, leaving: list[Row], pressed: bool, interval: Callable[[], int]) -> bool:
        """True when the next step has to change the lane's rows, or when it is worth it.

        A change copies the lane's caches, so changes are gathered over `interval` steps; a small lane is
        cheap to copy and waits for no more steps than it has rows.
        """
        if len(leaving) == len(self.rows):
            return True
        if leaving and (pressed or self._ended):
            return True
        return bool(leaving or self.ready) and self.since_change >= min(interval(), len(self.rows))

    @property
    def near(self) -> bool:
        """True when a row may be near its limit."""
        return self.steps >= self._wants_from

    def wanting(self) -> list[Row]:
        """Rows near their limit that could go on with more memory, in constant time when there are none."""
        if not self.near:
            return []
        found = [row for row in self.rows.values() if self._want(row) <= self.steps and not row.closed]
        if not found:
            self._wants_from = min(map(self._want, self._going()), default=_NEVER)
        return found

    def change(self, leaving: list[Row], joining: list[Row]) -> None:
        for row in leaving:
            del self.rows[row.number]
            self._closed.pop(row.number, None)
            self._ended.pop(row.number, None)
        for row in joining:
            self.rows[row.number] = row
            row.last_lane_step = self.steps + row.limit - 1
            self._expect(row)
        self._changed_at = self.steps

    def left(self, row: Row) -> int:
        """Steps of this lane before the row is at its limit."""
        return row.last_lane_step - self.steps

    @property
    def since_change(self) -> int:
        """Steps since its rows changed."""
        return self.steps - self._changed_at

    def extend(self, row: Row, limit: int) -> None:
        """Allows a row of this lane more tokens."""
        row.last_lane_step += limit - row.limit
        row.limit = limit
        self._ended.pop(row.number, None)
        self._expect(row)

    def count_step(self) -> list[Row]:
        """Counts an announced decode; returns the rows whose last allowed token it samples."""
        self.steps += 1
        self.outstanding += 1
        while self._limits and self._limits[0][0] <= self.steps:
            limit, row_number = heappop(self._limits)
            row = self.rows.get(row_number)
            if row is not None and row.last_lane_step == limit:
                self._ended[row_number] = row
        return list(self._ended.values())

    def _expect(self, row: Row) -> None:
        if row.last_lane_step <= self.steps:
            self._ended[row.number] = row
        else:
            heappush(self._limits, (row.last_lane_step, row.number))
        if len(self._limits) > 2 * len(self.rows) + _SLACK:
            self._limits = [(each.last_lane_step, each.number) for each in self.rows.values()]
            heapify(self._limits)
        self._wants_from = min(self._wants_from, self._want(row))

    def _going(self) -> Iterator[Row]:
        return (row for row in self.rows.values() if not row.closed)

    @staticmethod
    def _want(row: Row) -> int:
        return row.last_lane_step - EXTEND_AHEAD if row.limit < row.ceiling else _NEVER
