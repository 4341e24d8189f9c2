"""Requests that give way where one key has more than its share of the rows, and a row of another key waits.

A row that lacks memory waits PATIENCE for rows to end by themselves. Then requests of the key with most rows
give way, the newest first, as many as the row needs. Their key is left with no fewer rows than the other one
has then, so keys do not take each other's turns. A request without a chunk keeps its place at the head and
gives up its memory alone. Others wait again, and go on with their answers as after the end of an epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from sealring.gateway.scheduler.memory import Ledger
from sealring.gateway.scheduler.request import Row

PATIENCE = 2.0
"""Seconds for which a row lacks memory before others give way to it."""

LEAST = 64
"""Tokens that each choice of a request brings, on the average, before it gives way: what is computed twice
stays a part of what it costs."""


class GivingWay:
    """`favoured` is the number of the row to which others gave way. It comes before the rows whose turn it
    is: the room was made for it."""

    def __init__(self, ledger: Ledger) -> None:
        self.favoured = 0
        self._ledger = ledger
        self._since: dict[int, float] = {}
        self._leaving: Sequence[int] = ()

    def choose(
        self, waiting: Sequence[Row], requests: Collection[Sequence[Row]], now: float
    ) -> list[Sequence[Row]]:
        """The rows of each request that is to give way now. `waiting` rows lack memory; `requests` are the
        rows of each request, without copies."""
        self._since = {row.number: self._since.get(row.number, now) for row in waiting}
        late = [row for row in waiting if now >= self._since[row.number] + PATIENCE]
        leaving = any(number in self._ledger for number in self._leaving)
        if not late or leaving:
            return []
        self._since |= dict.fromkeys((row.number for row in late), now)  # so it is not tried at every step
        held = Counter[str]()
        for rows in requests:
            held[rows[0].request.key] += len(self._held(rows))
        greediest, most = held.most_common(1)[0]
        for row in late if most else ():
            beyond = most - held[row.request.key] - len(row.group)
            found = self._enough(row, [rows for rows in requests if rows[0].request.key == greediest], beyond)
            if found:
                self.favoured = row.number
                leave = (rows for rows in found if any(each.begun for each in rows))
                self._leaving = [each.number for rows in leave for each in self._held(rows)]
                return found
        return []

    def _enough(self, row: Row, requests: Iterable[Sequence[Row]], most: int) -> list[Sequence[Row]]:
        """The newest of these requests of which `most` rows together leave room for a row and its copies;
        none where they do not. The last of them may have more rows, which are soon computed again."""
        found, taken, fits = list[Sequence[Row]](), list[tuple[int, int, int]](), False
        for rows in sorted(
            filter(_may, requests), key=lambda rows: (any(row.begun for row in rows), -rows[0].number)
        ):
            held = self._held(rows)[: max(0, most - len(taken))]
            if fits or not held:
                continue
            found.append(rows)
            taken += [(each.number, *self._ledger.release(each.number)) for each in held]
            fits = self._ledger.reserve_all(row.group, row.reserved)
        for each in row.group if fits else ():
            self._ledger.release(each.number)
        for number, lane, size in taken:
            self._ledger.reserve(number, lane, size)
        return found if fits else []

    def _held(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of a request, with their copies, that have memory."""
        return [each for row in rows for each in row.group if each.number in self._ledger]


def _may(rows: Sequence[Row]) -> bool:
    """Whether a request loses little when it gives way."""
    if any(row.begun for row in rows):
        return rows[0].request.progress.new_tokens >= LEAST * rows[0].request.choices
    return not any(row.recalling for row in rows)
