"""The caches of one epoch: those of rows in prefill, and those of lanes, whose rows are computed together.

A lane of one row has that row's own caches, which need neither padding nor a mask. It has batch caches from
its second row on. Caches are copied only when a lane's rows change, once for all changes of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from sealring.mesh.errors import Internal
from sealring.mesh.ring.composition import Admission, Eviction, Keeping, Settling
from sealring.node.engine.params import RowParameters
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage, caches
from sealring.node.engine.staging.caches import Cache
from sealring.node.engine.staging.undo import UndoLog


@dataclass(slots=True)
class Row:
    """A row in no lane. Only the tail knows its parameters, and its sampler from the first token on."""

    number: int
    cache: Cache
    parameters: RowParameters | None = None
    sampler: Sampler | None = None
    scores: list[mx.array] = field(default_factory=list)
    """The words of its prompt's log-probabilities, until they leave with its first token."""

    def copy(self, number: int, tokens: int) -> Row:
        """Another row with the same prompt; its seed differs by as much as its number."""
        parameters = self.parameters
        if parameters is not None:
            seed = (parameters.seed + number - self.number) % (1 << 64)
            matcher = parameters.matcher and parameters.matcher.copy()
            parameters = dataclasses.replace(parameters, seed=seed, matcher=matcher)
        return Row(number, caches.first_tokens(self.cache, tokens), parameters)


@dataclass(slots=True)
class Lane:
    """Rows in order, their caches ([] without rows) and, at the tail, their sampler."""

    rows: list[int] = field(default_factory=list)
    cache: Cache = field(default_factory=list)
    sampler: Sampler | None = None
    age: int = 0
    undo: UndoLog | None = None
    """While its only row has drafts that are not settled."""

    def recompose(self, keep: Sequence[int], joining: Sequence[Row]) -> None:
        """Keeps the rows with the indices `keep`, in order, and appends `joining`."""
        self.cache = self._recomposed(keep, joining)
        if len(keep) < len(self.rows):
            self.rows = [self.rows[index] for index in keep]
            if self.sampler is not None:
                self.sampler.filter(keep)
        self.rows += [row.number for row in joining]
        for row in joining:
            if self.sampler is None:
                self.sampler = row.sampler
            elif row.sampler is not None:
                self.sampler.extend(row.sampler)

    def _recomposed(self, keep: Sequence[int], joining: Sequence[Row]) -> Cache:
        arriving = [row.cache for row in joining]
        if not keep:
            return arriving[0] if len(arriving) == 1 else caches.merge(arriving)
        if len(self.rows) == 1:
            return caches.merge([self.cache, *arriving]) if arriving else self.cache
        if len(keep) == 1 and not arriving:
            return caches.extract(self.cache, keep[0])
        return caches.recompose(self.cache, keep, arriving)


class Lanes:
    """All rows that hold memory. Used by the compute thread only."""

    def __init__(self) -> None:
        self._prefilling: dict[int, Row] = {}
        self._lanes: dict[int, Lane] = {}

    def start(self, row: Row) -> None:
        """A row begins its prefill."""
        self._prefilling[row.number] = row

    def prefilling(self, row: int) -> Row:
        return self._prefilling[row]

    def cache_of(self, keeping: Keeping) -> Cache:
        """The cache of one row, to look at."""
        if keeping.lane is None:
            return self._prefilling[keeping.row].cache
        lane = self._lanes[keeping.lane]
        return lane.cache if len(lane.rows) == 1 else caches.look_at(lane.cache, keeping.index)

    def settle(self, change: Settling, stage: Stage) -> Cache:
        """Takes the caches of a lane's only row back to its last accepted token.

        Returns them if tokens were computed again, lazily, else []. Raises InvalidInput (BAD_STEP), as
        `UndoLog.settle`.
        """
        lane = self._lanes[change.lane]
        undo, lane.undo = lane.undo, None
        again = undo is not None and undo.settle(change.surplus, lambda inputs: stage(inputs, lane.cache))
        if lane.sampler is not None:
            lane.sampler.settle(change.accepted)
        return lane.cache if again else []

    def apply(self, changes: Iterable[Admission | Eviction]) -> None:
        """Carries out a step's changes; each lane's caches are touched once, whatever the changes' number."""
        keep: dict[int, list[int]] = {}
        joining: dict[int, list[Row]] = {}
        for change in changes:
            if change.lane is None:
                del self._prefilling[change.row]
                continue
            lane = self._lanes.setdefault(change.lane, Lane())
            kept = keep.setdefault(change.lane, list(range(len(lane.rows))))
            joined = joining.setdefault(change.lane, [])
            if isinstance(change, Admission):
                joined.append(self._prefilling.pop(change.row))
            elif change.index < len(kept):
                kept.pop(change.index)
            else:
                joined.pop(change.index - len(kept))
        for number, kept in keep.items():
            self._recompose(number, kept, joining[number])

    def _recompose(self, number: int, keep: list[int], joining: list[Row]) -> None:
        lane = self._lanes[number]
        if not keep and not joining:
            del self._lanes[number]
            return
        if not keep:
            lane = self._lanes[number] = Lane()
        lane.recompose(keep, joining)

    def check(self, number: int, rows: Sequence[int]) -> Lane:
        """The lane. Raises Internal unless it has exactly these rows in this order."""
        lane = self._lanes.get(number)
        if lane is None or tuple(lane.rows) != tuple(rows):
            raise Internal("the rows of a lane are not those of the composition")
        return lane

    def clear(self) -> None:
        self._prefilling.clear()
        self._lanes.clear()
