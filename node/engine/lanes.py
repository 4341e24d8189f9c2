"""The caches of one epoch: those of rows in prefill, and those of lanes, whose rows are computed together.

A lane of one row has that row's own caches, which need neither padding nor a mask. It has batch caches from
its second row on. In these each row has a place. A row that joins gets the place of one that has left, if it
is no longer than the rows there, and then nothing else is copied. A place stays empty for some steps if that
costs little time and no memory that is not there. Otherwise the caches of all rows are laid out anew, once
for all changes of a step. Places are each member's own: on the ring rows travel in the composition's order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from sealring.mesh.errors import Internal
from sealring.mesh.ring.composition import Admission, Eviction, Keeping, Settling
from sealring.mesh.ring.limits import MAX_RUNS
from sealring.mesh.ring.spread import Times, between
from sealring.node.engine import caches
from sealring.node.engine.caches import Cache
from sealring.node.engine.caches.undo import RowsUndo, UndoLog
from sealring.node.engine.params import RowParameters
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.mrope import Positions

EMPTY = 8
"""One place in EMPTY may be empty, and a step may take longer by that part.

To lay a lane out anew takes as long as a step or two, and mostly a row joins within some steps.
"""

PATIENCE = 16
"""Steps after which places that are still empty are given up."""

Empty = Callable[[int, int], int | None]
"""Tokens that places may take beyond those of their rows, by the numbers of rows and places; None if that
leaves too many places empty."""


def no_empty_place(rows: int, places: int) -> int | None:
    """An `Empty`."""
    return 0 if rows == places else None


@dataclass(slots=True)
class Row:
    """A row in no lane. Only the tail knows its parameters, and its sampler from the first token on."""

    number: int
    cache: Cache
    tokens: int = 0
    """The number of its prompt's tokens that are computed."""
    parameters: RowParameters | None = None
    sampler: Sampler | None = None
    scores: list[mx.array] = field(default_factory=list)
    """The words of its prompt's log-probabilities, until they leave with its first token."""
    positions: Positions | None = None
    """Those of its tokens, where they have three dimensions and it has images."""

    def copy(self, number: int) -> Row:
        """Another row with the same prompt, without its cache; its seed differs by as much as its number."""
        parameters = self.parameters
        if parameters is not None:
            seed = (parameters.seed + number - self.number) % (1 << 64)
            matcher = parameters.matcher and parameters.matcher.copy()
            parameters = dataclasses.replace(parameters, seed=seed, matcher=matcher)
        return Row(number, [], self.tokens, parameters, positions=self.positions)


@dataclass(slots=True)
class Lane:
    """Rows in order, their caches ([] without rows) and, at the tail, their sampler."""

    rows: list[int] = field(default_factory=list)
    cache: Cache = field(default_factory=list)
    sampler: Sampler | None = None
    age: int = 0
    undo: UndoLog | RowsUndo | None = None
    """The log that takes back drafts, while rows have some that are not settled."""
    places: list[int] = field(default_factory=list)
    """Each row's place in the lane's caches, if there are several rows."""
    width: int = 0
    """Places, empty ones too."""
    steps: int = 0
    """Steps since the rows changed."""
    positions: Positions | None = None
    """Those of the rows in their places, if any row has images and the model's have three dimensions."""
    _each: list[Positions | None] = field(default_factory=list)
    _into: mx.array | None = None
    _out: mx.array | None = None

    def recompose(self, keep: Sequence[int], joining: Sequence[Row], empty: Empty = no_empty_place) -> None:
        """Keeps the rows with the indices `keep`, in order, and appends `joining`."""
        self._each = [self._each[index] for index in keep] + [row.positions for row in joining]
        self._place([self.places[index] for index in keep], [row.cache for row in joining], empty)
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

    def close_up(self) -> None:
        """Gives empty places up."""
        self._place(self.places, [], no_empty_place)

    def _place(self, keep: list[int], arriving: list[Cache], empty: Empty) -> None:
        """Keeps the rows in the places `keep`, in this order, and behind them those of `arriving`."""
        count, self.steps = len(keep) + len(arriving), 0
        spare = empty(count, self.width) if keep and 1 < count <= self.width else None
        if spare is not None and caches.holds(self.cache, keep, arriving, spare):
            free = [place for place in range(self.width) if place not in keep][: len(arriving)]
            caches.put(self.cache, free, arriving)
            self.places = keep + free
        else:
            self.cache = self._laid_out(keep, arriving)
            self.places, self.width = list(range(count)), count
        self._into = self._out = None
        if self.places != list(range(self.width)):
            into = [0] * self.width
            for row, place in enumerate(self.places):
                into[place] = row
            self._into, self._out = mx.array(into, mx.uint32), mx.array(self.places, mx.uint32)
        self.positions = None
        if any(self._each):
            by_place = dict(zip(self.places, self._each, strict=True))
            self.positions = Positions.together([by_place.get(place) for place in range(self.width)])

    def _laid_out(self, keep: list[int], arriving: list[Cache]) -> Cache:
        if not keep:
            return arriving[0] if len(arriving) == 1 else caches.merge(arriving)
        if self.width == 1:
            return caches.merge([self.cache, *arriving]) if arriving else self.cache
        if len(keep) == 1 and not arriving:
            return caches.extract(self.cache, keep[0])
        return caches.recompose(self.cache, keep, arriving)

    def note(self, runs: int, inputs: Sequence[mx.array]) -> None:
        """Notes a run of drafts that is about to be computed on these inputs, [places, tokens, ...] each.
        `runs`: as in `UndoLog`."""
        if self.undo is None and self.width == 1:
            self.undo = UndoLog(self.cache, runs)
        elif self.undo is None and runs <= MAX_RUNS:  # else caches can be cut
            self.undo = RowsUndo(self.cache)
        if self.undo is not None:
            self.undo.begin(inputs)

    def by_place(self, surplus: Mapping[int, int]) -> list[int]:
        """Tokens of each row that do not count, as those of each place."""
        counts = [min(surplus.values())] * self.width
        for row, place in zip(self.rows, self.places, strict=True):
            counts[place] = surplus.get(row, 0)
        return counts

    def spread(self, arrays: list[mx.array]) -> list[mx.array]:
        """Arrays [rows, ...] as [places, ...]. In an empty place is what the first row has."""
        return arrays if self._into is None else [array[self._into] for array in arrays]

    def gathered(self, arrays: list[mx.array]) -> list[mx.array]:
        """Arrays [places, ...] as [rows, ...], the reverse of `spread`."""
        return arrays if self._out is None else [array[self._out] for array in arrays]


class Lanes:
    """All rows that hold memory. Used by the compute thread only."""

    def __init__(self, times: Times = (), spare: Callable[[], int] = lambda: 0) -> None:
        """`times`: how long decode steps take by their rows; without, no place stays empty. `spare`: tokens
        for which there is memory beside all that is counted."""
        self._times = times
        self._spare = spare
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
        return lane.cache if lane.width == 1 else caches.look_at(lane.cache, lane.places[keeping.index])

    def settle(self, changes: Sequence[Settling], stage: Stage) -> Cache:
        """Takes the caches of one lane's rows back to the last accepted token of each.

        Rows that are not among them leave the lane with the same step. Returns the caches if tokens were
        computed again, lazily, else []. Raises InvalidInput (BAD_STEP), as `UndoLog.settle`.
        """
        lane = self._lanes[changes[0].lane]
        undo, lane.undo = lane.undo, None
        surplus = {change.row: change.surplus for change in changes}

        def compute(inputs: list[mx.array]) -> object:
            stage.tapping = len(inputs) > len(stage.spec.receives)  # as the steps had it that came here
            return stage(inputs, lane.cache, lane.positions)

        again = False
        if isinstance(undo, UndoLog):
            again = undo.settle(changes[0].surplus, compute)
        elif undo is not None:
            again = undo.settle(lane.by_place(surplus), compute)
        else:
            caches.take_back(lane.cache, lane.by_place(surplus))
        if lane.sampler is not None:
            accepted = {change.row: change.accepted for change in changes}
            lane.sampler.settle([accepted.get(row, 1) for row in lane.rows])
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
        lane.recompose(keep, joining, self._empty)

    def _empty(self, rows: int, places: int) -> int | None:
        """An `Empty`. All lanes share what memory there is."""
        if rows == places:
            return 0
        if not self._times or EMPTY * (places - rows) > places:
            return None
        slow = EMPTY * between(self._times, places) > (EMPTY + 1) * between(self._times, rows)
        return None if slow else self._spare() // len(self._lanes)

    def check(self, number: int, rows: Sequence[int]) -> Lane:
        """The lane, for a step. Raises Internal unless it has exactly these rows in this order."""
        lane = self._lanes.get(number)
        if lane is None or tuple(lane.rows) != tuple(rows):
            raise Internal("the rows of a lane are not those of the composition")
        lane.steps += 1
        if lane.steps > PATIENCE and lane.width > len(lane.rows):
            lane.close_up()
        return lane

    def clear(self) -> None:
        self._prefilling.clear()
        self._lanes.clear()
