"""Which rows of an epoch are given to the head, get memory and begin, in one order (`EpochRows.go`).

Rows that run come first, then rows that have their memory, then rows that the head has read, then the queue.
A row that lacks memory holds up all behind it: later ones would take its room again and again.

Keys take turns at memory, as in the queue. Those rows of a key that the head has read are started in the
order in which they were taken from the queue, but answers that go on come before others. A large one is
overtaken while the head reads it, and by other keys' rows in their turns. A row to which requests gave way is
started next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from sealring.gateway.scheduler.actions import OpenRow, RecallBlocks
from sealring.gateway.scheduler.facts import RingFacts
from sealring.gateway.scheduler.giving import GivingWay
from sealring.gateway.scheduler.memory import Ledger
from sealring.gateway.scheduler.planner import StepPlanner
from sealring.gateway.scheduler.queue import FairQueue, Pace, Turns
from sealring.gateway.scheduler.request import Request, Row
from sealring.mesh.prompt.validate import MAX_ENVELOPE_BYTES
from sealring.v1 import inference_pb2 as inference

EXTENSION = 1024
"""Tokens that a row without a limit of its own reserves at a time."""

OPEN_AHEAD = 16
"""Most rows that the head has and of which no chunk has been announced."""

OPEN_BYTES = MAX_ENVELOPE_BYTES
"""Bytes of images and of sealed prompts in the prompts that the head still reads; one alone may have more.
With 16 texts of 4 MiB they are less than a head takes (node.engine.text.reading.MAX_UNREAD_BYTES)."""

OPEN_SPARE = 2
"""How many more of them than can start now: rows of one key are no longer reordered once they are opened."""

ALONE_ATTEMPTS = 2
"""Attempts after which a request is begun alone, before others, until it has brought more. Later attempts
then count for the request that ends epochs and for no other."""


class Admitted(NamedTuple):
    """What is given to the head now, the requests that give way, and the number of those that have not begun.
    `pressed`: a row lacks memory that rows which leave would free."""

    opened: list[OpenRow]
    giving_way: list[Request]
    waiting: int
    pressed: bool


class EpochRows:
    """The rows of one epoch, from the moment they are given to the head: `rows` by number, without those that
    are closed, `requests` by request and without copies, and `opened` those that have not begun, by rising
    number."""

    def __init__(self, ring: RingFacts, planner: StepPlanner, queue: FairQueue, pace: Pace) -> None:
        self.rows: dict[int, Row] = {}
        self.requests: dict[str, list[Row]] = {}
        self.opened: dict[int, Row] = {}
        self.last_row = 0
        self._ring = ring
        self._planner = planner
        self._queue = queue
        self._pace = pace
        self._turns = Turns()  # for memory
        self._giving = GivingWay(planner.ledger)
        self._alone: Request | None = None

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._queue) + len(self.opened)

    @property
    def unstarted(self) -> list[Row]:
        """Rows that the head has and of which no chunk has been announced."""
        return [*self.opened.values(), *self._planner.unstarted]

    def can_hold(self, row: Row, answers: int | None = None) -> bool:
        """Whether the rows of the request's first `answers`, or of all, fit when nothing else is there."""
        return Ledger(self._ring).reserve_all(row.group[:answers], row.reserved)

    def go(self, now: float, *, holding: bool) -> Admitted:
        """Admits what can be admitted. `holding`: no request begins that no head has had."""
        self._planner.sweep()
        giving_way = list[Request]()
        pressed = self._start(now, giving_way, pressed=self._grow())
        opened = list(self._open(pressed, holding))
        waiting = self.waiting
        if not waiting:
            self._pace.rest()
        return Admitted(opened, giving_way, waiting, pressed)

    def _grow(self) -> bool:
        """Gives rows that run the memory to go on; whether any lacks it."""
        for row in self._planner.wanting():
            limit = min(row.ceiling, row.limit + EXTENSION)
            if not self._planner.ledger.grow(row.number, row.prompt_tokens + limit):
                return True
            row.limit = limit
        return False

    def _start(self, now: float, giving_way: list[Request], *, pressed: bool) -> bool:
        """Begins rows that have their memory, and gives it to those that the head has read; whether any lacks
        it. Adds requests that are `giving_way`."""
        ledger, waiting = self._planner.ledger, list[Row]()
        for row in list(self.opened.values()):
            if row.number not in ledger:
                waiting.append(row)
            elif not row.recalling:  # members read by turns: later rows may be ready before
                self._begin(row, now)
        while ready := [row for row in waiting if not row.opening and row.number not in ledger]:
            row = self._first(ready)
            no_room = pressed or self._planner.prefixes.waits_for(row)
            if no_room or not ledger.reserve_all(row.group, row.reserved, self.waiting):
                if not self._make_way(ready, giving_way, now) or pressed:
                    return True
                continue
            self._turns.taken(row.request.key)
            self._begin(row, now)
        return pressed

    def _first(self, waiting: Sequence[Row]) -> Row:
        """The row that gets memory next. Others gave way to the favoured one; else keys take turns. An answer
        goes on before others of its key begin."""
        favoured = (row for row in waiting if row.number == self._giving.favoured)
        return next(favoured, None) or max(self._turns.next(waiting), key=lambda row: row.answered > 0)

    def _make_way(self, waiting: Sequence[Row], giving_way: list[Request], now: float) -> bool:
        """Whether rows without a chunk have given up their memory. Adds the requests of others that give way
        to `giving_way`: they have to leave first."""
        found = self._giving.choose(waiting, self.requests.values(), now)
        if not found:
            return False
        giving_way += [rows[0].request for rows in found if any(row.begun for row in rows)]
        for row in (row for rows in found if rows[0].request not in giving_way for row in rows):
            if row.number in self._planner.ledger:  # one of several answers that go on may have none yet
                self._planner.take_back(row)
                self.opened[row.number] = row
        self.opened = dict(sorted(self.opened.items()))
        return not giving_way

    def _begin(self, row: Row, now: float) -> None:
        """Puts a row that has its memory in line, once it has nothing to wait for."""
        if self._planner.recalls.begin(row, now):
            return
        self._planner.start(row)
        del self.opened[row.number]
        self._pace.begun(now)

    def _open(self, pressed: bool, holding: bool) -> Iterator[OpenRow]:
        """Gives requests of the queue to the head."""
        if self._alone is not None:
            if self._alone.id in self.requests and not self._alone.progress.harmless:
                return
            self._alone = None
        back = list[Request]()  # the head has no room for them yet, nor for bytes that come behind them
        while (request := self._next({one.key for one in back}, pressed, holding)) is not None:
            reads = sum(row.request.bulk for row in self.opened.values() if row.opening)
            if request.bulk and reads and (back or reads + request.bulk > OPEN_BYTES):
                back.append(request)
                continue
            if alone(request):
                if not all(rows[0].request.progress.harmless for rows in self.requests.values()):
                    back.append(request)
                    break
                self._alone = request
            rows = self.requests[request.id] = _rows(request, self.last_row + 1)
            for row in rows:
                self.opened[row.number] = row
                self.rows.update((each.number, each) for each in row.group)
                self.last_row = row.group[-1].number
                yield OpenRow(row.number, request, _resume(row))
        for request in reversed(back):
            self._queue.push_front(request)

    def _next(self, waits: Collection[str], pressed: bool, holding: bool) -> Request | None:
        """Takes the request that is to be opened now, if any is, of another key than those in `waits`.

        Where rows have taken all room, a key with none among them has one more: nobody waits for what another
        one's prompts cost. Requests that go on have one more, too.
        """
        if self._alone is not None:
            return None
        ledger = self._planner.ledger
        startable = 0 if pressed else self._ring.max_rows - ledger.rows
        ahead = [row for row in self.opened.values() if row.number not in ledger]
        ahead += self._planner.unstarted
        room = min(OPEN_AHEAD, OPEN_SPARE + startable) - len(ahead)
        if holding:
            resuming = [one for one in self._queue.resuming if one.key not in waits] if room > 0 else []
            return self._queue.remove(resuming[0].id) if resuming else None
        if room > 0:
            return self._queue.pop_but(waits)
        if room <= -OPEN_AHEAD:
            return None
        if (found := self._queue.pop_but({*(row.request.key for row in ahead), *waits})) is not None:
            return found
        goes_on = any(row.request.progress.goes_on for row in ahead)
        return None if goes_on or waits else self._queue.pop_first()

    def close(self, row: Row) -> Iterator[RecallBlocks]:
        """Nothing more of a row is wanted."""
        del self.rows[row.number]
        self.opened.pop(row.number, None)
        yield from self._planner.recalls.close(row)
        self._planner.close(row)


def alone(request: Request) -> bool:
    """Whether to begin a request alone. Claimed attempts do not count: a client's word makes nobody wait."""
    return request.progress.attempts >= ALONE_ATTEMPTS


def _rows(request: Request, number: int) -> list[Row]:
    """The rows to be opened, numbered from `number` on: one for all answers, or one for each that goes on."""
    if not request.progress.earlier_tokens:
        row = Row(number, request)
        row.copies = tuple(Row(number + choice, request, choice) for choice in range(1, request.choices))
        return [row]
    left = [number for number, choice in enumerate(request.progress.choices) if choice.end is None]
    return [Row(number + index, request, choice) for index, choice in enumerate(left)]


def _resume(row: Row) -> inference.Resume | None:
    if not row.request.progress.earlier_tokens:
        return None
    return inference.Resume(tokens=row.progress.tokens, held=row.progress.held, choice=row.choice)
