"""One lane: rows that are stepped together, and the moments when a change of them pays."""

from __future__ import annotations

from sealring.gateway.scheduler.request import Row

ANNOUNCED = 2
"""Steps of a lane that are announced at most: the one in flight and one ahead."""

GATHERED = 8
"""Steps of a lane between changes that can wait. A change copies the lane's caches."""

EXTEND_AHEAD = 256
"""Tokens before its limit at which a row without a limit of its own asks for more memory."""


class Lane:
    """`steps` counts the decode steps announced; `outstanding` are those without drafts that are not done.
    `ready` rows are prefilled and wait to be admitted. `done_at` and `before` are of its last step that is
    done: when that was, and what was announced before it.

    A row that has reached its limit takes part in one more step at most. That step puts its last token into
    its cache, which has room for it. No more than ANNOUNCED steps are under way, so by then the token has
    come and the row is closed. A lane therefore never waits for a row to leave.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: dict[int, Row] = {}
        self.ready: list[Row] = []
        self.outstanding = 0
        self.steps = 0
        self.done_at = 0.0
        self.before = (0, 0.0)
        self.unsettled = False
        """Whether closed rows have drafts that are not settled, so that they leave with the next step."""
        self._changed_at = 0

    @property
    def running(self) -> bool:
        """True when a step of this lane would give a token to somebody who wants it."""
        wanted = (not row.closed and self.steps < row.last_lane_step for row in self.rows.values())
        return bool(self.ready) or any(wanted)

    @property
    def spent(self) -> bool:
        """True when nothing more is wanted of its rows."""
        return bool(self.rows) and not self.ready and all(row.closed for row in self.rows.values())

    @property
    def overdue(self) -> bool:
        """True when a row goes on though the last token that it may have has come."""
        done = self.steps - self.outstanding
        return any(row.last_lane_step <= done and not row.closed for row in self.rows.values())

    def leaving(self) -> list[Row]:
        """Rows to leave out of the next step, by rising number."""
        return sorted([row for row in self.rows.values() if row.closed], key=lambda row: row.number)

    def must_change(self, leaving: list[Row], pressed: bool) -> bool:
        """True when the next step has to change the lane's rows, or when it is worth it: a small lane is
        cheap to copy and waits for no more steps than it has rows.
        """
        if len(leaving) == len(self.rows):
            return True
        if leaving and (
            pressed or self.unsettled or any(row.last_lane_step <= self.steps for row in leaving)
        ):
            return True
        gathered = self.steps - self._changed_at >= min(GATHERED, len(self.rows))
        return bool(leaving or self.ready) and gathered

    def wanting(self) -> list[Row]:
        """Rows near their limit that could go on with more memory."""
        near = self.steps + EXTEND_AHEAD
        return [
            row
            for row in self.rows.values()
            if row.last_lane_step <= near and row.limit < row.ceiling and not row.closed
        ]

    def change(self, leaving: list[Row], joining: list[Row]) -> None:
        for row in leaving:
            del self.rows[row.number]
        for row in joining:
            self.rows[row.number] = row
            row.last_lane_step = self.steps + row.limit - 1
        self._changed_at, self.unsettled = self.steps, False

    def left(self, row: Row) -> int:
        """Steps of this lane before the row is at its limit."""
        return row.last_lane_step - self.steps

    def extend(self, row: Row, limit: int) -> None:
        """Allows a row of this lane more tokens."""
        row.last_lane_step += limit - row.limit
        row.limit = limit
