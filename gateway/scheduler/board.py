"""What the plan makes of a ring's rows: the members' own composition, run by the gateway."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from sealring.gateway.scheduler.facts import RingFacts
from sealring.gateway.scheduler.request import Row
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import Composition, Eviction, Settling, check_count, rank
from sealring.v1 import control_pb2 as control


class PlanError(RuntimeError):
    """The scheduler has planned what members would refuse: a fault of its own."""


class Board(Composition):
    """The composition of an epoch, with its rows, and how much of open drafts counts by the tokens that have
    come.

    A change counts as soon as it is planned, and members get it with the next step. Nothing is announced that
    members would refuse: `refused` says why, nothing is planned any more, and the epoch must end.
    """

    def __init__(self, ring: RingFacts) -> None:
        super().__init__(epoch=ring.epoch, max_rows=ring.max_rows, prefill_chunk=ring.prefill_chunk)
        self.refused: InvalidInput | None = None
        self._planned: list[tuple[int, control.Change]] = []  # with their ranks
        self._brought: dict[int, int] = {}  # row with open drafts -> tokens since it was settled
        self._rows_of = defaultdict[int, dict[int, Row]](dict)  # lane -> its rows

    @property
    def changes(self) -> bool:
        """Whether changes wait for the next step."""
        return bool(self._planned)

    @property
    def evicts(self) -> bool:
        """Whether rows leave with the next step."""
        return any(change.HasField("evict") for _, change in self._planned)

    def plan(self, change: control.Change) -> None:
        """Makes a change of the next step."""
        if self.refused is not None:
            return
        try:
            made = self.change(change)
        except InvalidInput as error:
            self.refused = error
            return
        if isinstance(made, Settling | Eviction):
            self._brought.pop(made.row, None)
        if isinstance(made, Eviction) and made.lane is not None:
            del self._rows_of[made.lane][made.row]
        self._planned.append((rank(made), change))

    def admit(self, row: Row, lane: int) -> None:
        """Plans that a prefilled row joins a lane."""
        self._rows_of[lane][row.number] = row
        self.plan(control.Change(admit=control.Admit(row=row.number, lane=lane)))

    def evict(self, row: Row) -> None:
        """Plans the end of a row."""
        self.plan(control.Change(evict=control.Evict(row=row.number)))

    def rows_of(self, lane: int) -> Mapping[int, Row]:
        """The rows of a lane in order, by number, as they are from now on."""
        return self._rows_of[lane]

    def announce(self, step: control.Step) -> None:
        """Makes a step without changes the next one, with the changes that are planned. Raises PlanError."""
        self.check()
        planned, self._planned = self._planned, []
        if planned:
            planned.sort(key=lambda each: each[0])
            step.changes.extend(change for _, change in planned)
        step.number = self._last_step + 1
        try:
            check_count(len(planned))
            self.work(step, changed=bool(planned))
        except InvalidInput as error:
            self.refused = error
            raise PlanError from error

    def check(self) -> None:
        """Raises PlanError, if anything was refused."""
        if self.refused is not None:
            raise PlanError from self.refused

    def settle(self, row: int) -> None:
        """Plans the end of a row's open drafts, if it has any: those that have come count."""
        if row in self.lanes.drafted:
            self.plan(control.Change(settle=control.Settle(row=row, tokens=self.counts(row))))

    def bring(self, row: int, tokens: int) -> None:
        """A run of drafts has brought these tokens of a row."""
        self._brought[row] = self._brought.get(row, 0) + tokens

    def counts(self, row: int) -> int:
        """Tokens in the caches of a row that count by now: of open drafts those that have come."""
        held, drafted = self.held(row), self.lanes.drafted
        return held - drafted.get(row, 0) + self._brought.get(row, 0) if drafted else held

    def left(self, row: Row) -> int:
        """Steps without drafts, of those not announced, before the row is at its limit."""
        return row.prompt_tokens + row.limit - 1 - self.counts(row.number)

    def goes_on(self, lane: int, rows: Iterable[Row]) -> bool:
        """Whether anything is `left` of a lane's row that somebody wants."""
        if self.lanes.drafted:
            return any(not row.closed and self.left(row) > 0 for row in rows)
        base, steps = self.lanes.base, self.lanes.steps(lane) + 1
        return any(
            not row.closed and row.prompt_tokens + row.limit - base[row.number] > steps for row in rows
        )

    def near(self, lane: int, rows: Iterable[Row], steps: int) -> list[Row]:
        """Those of a lane's rows of which no more steps than these are `left`."""
        if self.lanes.drafted:
            return [row for row in rows if self.left(row) <= steps]
        base, most = self.lanes.base, self.lanes.steps(lane) + steps + 1
        return [row for row in rows if row.prompt_tokens + row.limit - base[row.number] <= most]
