"""What the steps announced so far make of a ring's rows: the members' own composition, run by the gateway."""

from __future__ import annotations

from collections.abc import Iterable

from sealring.gateway.scheduler.facts import RingFacts
from sealring.gateway.scheduler.request import Row
from sealring.mesh.ring.composition import Composition, Eviction, ResolvedStep, Settling
from sealring.v1 import control_pb2 as control


class Board(Composition):
    """The composition of an epoch, and how much of open drafts counts by the tokens that have come."""

    def __init__(self, ring: RingFacts) -> None:
        super().__init__(epoch=ring.epoch, max_rows=ring.max_rows, prefill_chunk=ring.prefill_chunk)
        self._brought: dict[int, int] = {}  # row with open drafts -> tokens since it was settled

    def apply(self, step: control.Step) -> ResolvedStep:
        resolved = super().apply(step)
        for change in resolved.changes:
            if isinstance(change, Settling | Eviction):
                self._brought.pop(change.row, None)
        return resolved

    def bring(self, row: int, tokens: int) -> None:
        """A run of drafts has brought these tokens of a row."""
        self._brought[row] = self._brought.get(row, 0) + tokens

    def counts(self, row: int) -> int:
        """Tokens in the caches of a row that count by now: of open drafts those that have come."""
        unsettled = self._drafted.get(row)
        if unsettled is None:
            return self.held(row)
        return self.held(row) - unsettled + self._brought.get(row, 0)

    def left(self, row: Row) -> int:
        """Steps without drafts, of those not announced, before the row is at its limit."""
        return row.prompt_tokens + row.limit - 1 - self.counts(row.number)

    def near(self, lane: int, rows: Iterable[Row], steps: int) -> list[Row]:
        """Those of a lane's rows of which no more steps than these are `left`."""
        if self._drafted:
            return [row for row in rows if self.left(row) <= steps]
        base, most = self._lane_base, self._lane_steps.get(lane, 0) + steps + 1
        return [row for row in rows if row.prompt_tokens + row.limit - base[row.number] <= most]
