"""One lane: rows that are stepped together, and when it pays to change which ones they are."""

from __future__ import annotations

from gateway.scheduler.row import Row

ANNOUNCED = 2
"""Steps of a lane that are announced at most: the one in flight and one ahead."""

CHANGE_INTERVAL = 4
"""Lane steps between changes that can wait. A change copies the lane's caches, so changes are gathered; a
small lane is cheap to copy and waits for no more steps than it has rows."""

_NEVER = 1 << 62

EXTEND_AHEAD = 256
"""Tokens before its limit at which a row without a limit of its own asks for more memory."""


class Lane:
    """`steps` counts the decode steps announced. `ready` rows are prefilled and wait to be admitted."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: dict[int, Row] = {}
        self.ready: list[Row] = []
        self.outstanding = 0
        self.steps = 0
        self.last_step = 0
        self.closed = 0
        self._changed_at = 0
        self._first_limit = 0
        self._first_want = 0

    @property
    def running(self) -> bool:
        """True when a step of this lane would give a token to somebody who wants it."""
        return bool(self.ready) or self.closed < len(self.rows)

    @property
    def stuck(self) -> bool:
        """True while a row is at its limit and its last token is on the way: a head that is told to evict a
        row does not tell of tokens that come later."""
        return bool(self.outstanding) and any(not row.closed for row in self.leaving())

    def leaving(self) -> list[Row]:
        """Rows that the next step need not or may not have: closed, or at their limit."""
        if not self.closed and self.steps < self._first_limit:
            return []
        return [row for row in self.rows.values() if row.closed or row.last_lane_step <= self.steps]

    def must_change(self, leaving: list[Row], pressed: bool) -> bool:
        """True when the next step has to change the lane's rows, or may and had better."""
        if len(leaving) == len(self.rows):
            return True
        if leaving and (pressed or self.steps >= self._first_limit):
            return True
        waited = self.steps - self._changed_at
        return bool(leaving or self.ready) and waited >= min(CHANGE_INTERVAL, len(self.rows))

    def wanting(self) -> list[Row]:
        """Rows near their limit that could go on with more memory, in constant time when there are none."""
        if self.steps < self._first_want:
            return []
        return [row for row in self.rows.values() if self._want(row) <= self.steps and not row.closed]

    def change(self, leaving: list[Row], joining: list[Row]) -> None:
        for row in leaving:
            del self.rows[row.number]
            self.closed -= row.closed
        for row in joining:
            self.rows[row.number] = row
            self.closed += row.closed
            row.last_lane_step = self.steps + row.limit - 1
        self._changed_at = self.steps
        self.recount()

    def recount(self) -> None:
        """Must follow every change of a row's limit."""
        rows = self.rows.values()
        self._first_limit = min((row.last_lane_step for row in rows), default=0)
        self._first_want = min((self._want(row) for row in rows), default=_NEVER)

    def extend(self, row: Row, limit: int) -> None:
        """Allows a row of this lane more tokens."""
        row.last_lane_step += limit - row.limit
        row.limit = limit
        self.recount()

    def count_step(self, number: int) -> list[Row]:
        """Notes an announced decode; returns the rows whose last allowed token it samples."""
        self.steps += 1
        self.outstanding += 1
        self.last_step = number
        if self.steps < self._first_limit:
            return []
        return [row for row in self.rows.values() if row.last_lane_step <= self.steps]

    @staticmethod
    def _want(row: Row) -> int:
        return row.last_lane_step - EXTEND_AHEAD if row.limit < row.ceiling else _NEVER
