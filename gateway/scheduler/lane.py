"""One lane: rows that are stepped together, and the moments when a change of them pays."""

from __future__ import annotations

from sealring.gateway.scheduler.board import Board
from sealring.gateway.scheduler.request import Row

ANNOUNCED = 2
"""Steps of a lane that are announced at most: the one in flight and one ahead."""

GATHERED = 8
"""Steps of a lane between changes that can wait. A change copies the lane's caches."""

EXTEND_AHEAD = 256
"""Tokens before its limit at which a row without a limit of its own asks for more memory."""


class Lane:
    """`outstanding` are the decode steps without drafts that are announced and not done. `ready` rows are
    prefilled and wait to be admitted. `done_at` and `before` are of its last step that is done: when that
    was, and what was announced before it.

    A row that has reached its limit takes part in one more step at most. That step puts its last token into
    its cache, which has room for it. No more than ANNOUNCED steps are under way, so by then the token has
    come and the row is closed. A lane therefore never waits for a row to leave.
    """

    def __init__(self, number: int, board: Board) -> None:
        self.number = number
        self._board = board
        self.rows = board.rows_of(number)
        self.ready: list[Row] = []
        self.outstanding = 0
        self.done_at = 0.0
        self.before = (0, 0.0)
        self._changed_at = 0

    @property
    def running(self) -> bool:
        """True when a step of this lane would give a token to somebody who wants it."""
        return bool(self.ready) or self._board.goes_on(self.number, self.rows.values())

    @property
    def spent(self) -> bool:
        """True when nothing more is wanted of its rows."""
        return bool(self.rows) and not self.ready and all(row.closed for row in self.rows.values())

    @property
    def overdue(self) -> bool:
        """True when a row goes on though the last token that it may have has come."""
        near = self._board.near(self.number, self.rows.values(), -self.outstanding)
        return not all(row.closed for row in near)

    def leaving(self) -> list[Row]:
        """Rows to leave out of the next step, by rising number."""
        return sorted([row for row in self.rows.values() if row.closed], key=lambda row: row.number)

    def must_change(self, leaving: list[Row], pressed: bool) -> bool:
        """True when the next step has to change the lane's rows, or when it is worth it: a small lane is
        cheap to copy and waits for no more steps than it has rows. Closed rows with open drafts have to
        leave: no other drafts can be made before.
        """
        if len(leaving) == len(self.rows):
            return True
        board = self._board
        if leaving and (
            pressed or any(board.lanes.unsettled(row.number) or board.left(row) <= 0 for row in leaving)
        ):
            return True
        gathered = board.lanes.steps(self.number) - self._changed_at >= min(GATHERED, len(self.rows))
        return bool(leaving or self.ready) and gathered

    def wanting(self) -> list[Row]:
        """Rows near their limit that could go on with more memory."""
        growing = [row for row in self.rows.values() if row.limit < row.ceiling and not row.closed]
        return self._board.near(self.number, growing, EXTEND_AHEAD) if growing else growing

    def changed(self) -> None:
        """Rows leave or join with the next step."""
        self._changed_at = self._board.lanes.steps(self.number)
