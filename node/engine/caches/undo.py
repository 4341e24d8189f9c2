"""A log of the changes that a row's last runs of drafts have made in its caches, so that a settle can take
them back; and marks, at which a kept prefix can be cut.

`Kind` says how a cache is noted before a run, and taken back. Where there are states, the accepted tokens of
a run that is accepted in part are computed again, from the run's kept inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import MAX_UNSETTLED
from sealring.mesh.ring.limits import MAX_RUNS

from .kind import Snapshot
from .known import kinds
from .rows import Batch, Cache, OneRow, copied, trimmable


def runs_of(cache: Cache, stages: int, steps_alike: bool) -> int:
    """The number of runs in flight that can be taken out of caches of this kind; `cache` is an empty one.

    The ring has `stages` stages. The number is 0 for an unknown kind of cache, and for a model that computes
    several tokens in a pass otherwise than in single steps (not `steps_alike`).
    """
    if not can_go_back(cache) or not steps_alike:
        return 0
    return MAX_UNSETTLED // 2 if trimmable(cache) else min(MAX_RUNS, stages)


def can_go_back(cache: Cache) -> bool:
    """Whether a row's last tokens can be taken out of caches of this kind; `cache` is an empty one."""
    return all(kind.goes_back for _, kind in kinds(cache))


def repeats(cache: Cache) -> bool:
    """Whether a run of several rows can be taken back by computing it again; `cache` is an empty one of a
    row, of a model whose code masks states."""
    several = [kind.several for _, kind in kinds(cache)]
    return not isinstance(cache, OneRow) and all(each is not None and each.repeats for each in several)


Mark: TypeAlias = Mapping[int, Snapshot]
"""Snapshots of a row's caches that cannot be cut, at one length; by their place."""


def mark(cache: Cache) -> Mark:
    """The mark of a row's cache as it is now. It keeps the arrays of these caches: windows and states."""
    caches = enumerate(kinds(cache))
    return {place: kind.snapshot(part) for place, (part, kind) in caches if not kind.cuts}


def marked(row: Cache, tokens: int) -> Mark:
    """The mark of a row that goes on behind its `tokens` tokens, lazily, in arrays of its own. Raises
    Internal if the row has another number of them."""
    for part, kind in kinds(row):
        kind.check(part, tokens)
    return {place: snapshot.detached for place, snapshot in mark(row).items()}


def cut_to(cache: Cache, tokens: int, at: Mark) -> Cache:
    """A lazy copy of the first tokens of a row's cache, which was marked at that length."""
    copies = copied(cache)
    for place, (part, kind) in enumerate(kinds(copies)):
        if place in at:
            kind.restore(part, at[place])
        else:
            kind.cut(part, tokens)
    return copies


def go_back(cache: Cache, tokens: int, at: Mark) -> None:
    """Takes the last `tokens` tokens out of a row's cache, which was marked at the length that is left."""
    for place, (part, kind) in enumerate(kinds(cache)):
        if place in at:
            kind.restore(part, at[place])
        else:
            kind.trim(part, tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: int
    notes: Sequence[Snapshot]
    inputs: Sequence[mx.array]
    """Only where tokens may have to be computed again."""


class UndoLog:
    """The log of one row's runs since it was settled."""

    def __init__(self, cache: Cache, runs: int) -> None:
        """`runs`: how many of the last runs are kept, as `runs_of` says."""
        self._caches = list(kinds(cache))
        self._recomputes = any(kind.recomputes for _, kind in self._caches)
        self._runs: deque[_Run] = deque(maxlen=runs)

    def begin(self, inputs: Sequence[mx.array]) -> None:
        """Notes a run that is about to be computed on these inputs, [1, tokens, ...] each."""
        notes = [kind.note(part) for part, kind in self._caches]
        self._runs.append(_Run(inputs[0].shape[1], notes, list(inputs) if self._recomputes else ()))

    def end(self) -> None:
        """Has what was dropped computed with the next step: until then it would hold the whole window."""
        for (part, kind), note in zip(self._caches, self._runs[-1].notes, strict=True):
            if note.arrays and not kind.recomputes:
                part.keys, part.values = mx.depends([part.keys, part.values], note.arrays)

    def settle(self, surplus: int, compute: Callable[[list[mx.array]], object]) -> bool:
        """Takes the last `surplus` tokens back; `compute` runs the stage on inputs of the row.

        Returns whether tokens were computed again, lazily. Raises InvalidInput (BAD_STEP) if they go back
        further than the runs that are kept.
        """
        undone: list[_Run] = []
        left = surplus
        while left > 0:
            if not self._runs:
                raise InvalidInput(
                    "drafts are to be taken back further than this member can",
                    reason="BAD_STEP",
                    hint="the gateway must go by what the member said when it attached",
                )
            undone.insert(0, self._runs.pop())
            left -= undone[0].tokens
        if not undone:
            return False
        again = -left if self._recomputes else 0
        for place, (part, kind) in enumerate(self._caches):
            kind.back(part, [run.notes[place] for run in undone], surplus + again)
        if again:
            compute([array[:, :again] for array in undone[0].inputs])
        return again > 0


class RowsUndo:
    """The log of one run of a lane's rows, of each of which another number of tokens may count."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._inputs: Sequence[mx.array] = ()

    def begin(self, inputs: Sequence[mx.array]) -> None:
        """Notes a run that is about to be computed on these inputs, [places, tokens, ...] each."""
        self._notes = [part.note() for part in self._batch]
        self._inputs = list(inputs)

    def settle(self, surplus: Sequence[int], compute: Callable[[list[mx.array]], object]) -> bool:
        """Takes the last `surplus` tokens of each place back; returns whether tokens were computed again,
        lazily. `compute` runs the stage."""
        if not any(surplus):
            return False
        tokens = self._inputs[0].shape[1]
        kept = [tokens - count for count in surplus]
        for part, note in zip(self._batch, self._notes, strict=True):
            part.before(note, tokens, kept)
        most = max(kept)
        compute([array[:, :most] for array in self._inputs])
        for part in self._batch:
            part.repeated([most - count for count in kept])
        return True
