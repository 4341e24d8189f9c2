"""Entries that stand for whole groups of tokens, and the tokens of a group that is not complete yet.

The class has the interface of mlx-vlm's `PoolingCache`, and one thing more. Where a group's entry is made of
the group before it too (`overlaps`), mlx-vlm begins each call as if there were none, so its entries depend on
how a prompt was cut into chunks. Here the group before is kept and is handed out in front of the new ones.
The entry that is made of it again is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from .kind import Kind, Several, Snapshot
from .ragged import Ragged


class Pools:
    """The entries of one row in one layer. An empty one is true of no tokens, so it is not to be cut."""

    def __init__(self, ratio: int, *, overlaps: bool = False) -> None:
        """`ratio`: tokens of a group."""
        self.ratio, self.overlaps = ratio, overlaps
        self.pooled: mx.array | None = None
        """[1, entries, width]."""
        self.pending: tuple[mx.array, ...] = ()
        """Two arrays [1, tokens, width] of the group that is not complete; none where it has no tokens."""
        self.before: tuple[mx.array, ...] = ()
        """Two arrays of the last complete group, if it `overlaps` the next."""
        self._repeated = 0

    @property
    def offset(self) -> int:
        """The number of entries."""
        return 0 if self.pooled is None else int(self.pooled.shape[1])

    def size(self) -> int:
        return self.offset

    def accumulate_windows(self, kv: mx.array, gate: mx.array, offset: int) -> tuple[mx.array, mx.array, int]:
        """Takes the next tokens, [1, tokens, width] each, of which the first is the row's token `offset`.

        Returns what there is of complete groups, and the number of their first token.
        """
        held = self.pending[0].shape[1] if self.pending else 0
        both = [kv, gate]
        if held:
            both = [mx.concatenate(list(pair), axis=1) for pair in zip(self.pending, both, strict=True)]
        whole = both[0].shape[1] // self.ratio * self.ratio
        ready, first = [array[:, :whole] for array in both], offset - held
        self.pending = tuple(array[:, whole:] for array in both) if whole < both[0].shape[1] else ()
        if not whole:
            return ready[0], ready[1], 0
        self._repeated = len(self.before[:1])
        if self.overlaps:
            if self.before:
                first -= self.ratio
                ready = [mx.concatenate(list(pair), axis=1) for pair in zip(self.before, ready, strict=True)]
            self.before = tuple(mx.contiguous(array[:, -self.ratio :]) for array in ready)
        return ready[0], ready[1], first

    def update_and_fetch(self, entries: mx.array) -> mx.array:
        """Appends the entries of the groups that `accumulate_windows` gave; returns all."""
        entries, self._repeated = entries[:, self._repeated :], 0
        if self.pooled is None:
            self.pooled = entries if entries.shape[1] else None
            return entries
        if entries.shape[1]:
            self.pooled = mx.concatenate([self.pooled, entries], axis=1)
        return self.pooled

    def make_mask(self, tokens: int = 1, offset: int = 0) -> mx.array | None:
        """The entries that each of the last `tokens` tokens sees, [tokens, entries]; None for all."""
        if self.pooled is None or tokens == 1:
            return None
        seen = mx.arange(offset + 1, offset + tokens + 1) // self.ratio
        return mx.arange(self.pooled.shape[1]) < seen[:, None]

    def is_trimmable(self) -> bool:
        return False

    def empty(self) -> bool:
        return self.pooled is None and not self.pending

    @property
    def state(self) -> list[mx.array]:
        held = () if self.pooled is None else (self.pooled,)
        return [*held, *self.pending, *self.before]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)


_FILL = (0.0, -mx.inf)
"""What stands for the two arrays of the group before a row's first: values without weight."""


class PoolsRows(Several):
    """The entries of several rows, which get one token each in a step and complete groups at different steps.
    Only rows that complete one take part in what is made of it."""

    def __init__(self, ratio: int, overlaps: bool) -> None:
        self.ratio, self.overlaps = ratio, overlaps
        self.pooled, self.pending = Ragged(), (Ragged(ratio), Ragged(ratio))
        self._before: list[mx.array] = []
        self._begun: list[bool] = []
        """Whether a row has a group before the next."""
        self._done: list[int] = []

    @classmethod
    def merge(cls, rows: Sequence[Pools]) -> Self:
        batch = cls(rows[0].ratio, rows[0].overlaps)
        batch.recompose([], rows)
        return batch

    def recompose(self, keep: Sequence[int], rows: Sequence[Pools]) -> None:
        befores = [self._row_before(index) for index in keep] + [row.before for row in rows]
        self.pooled.recompose(keep, [row.pooled for row in rows])
        for number, held in enumerate(self.pending):
            held.recompose(keep, [row.pending[number] if row.pending else None for row in rows])
        self._begun, self._before = [bool(before) for before in befores], []
        if any(befores):
            like = next(before for before in befores if before)
            nothing = tuple(
                mx.full(one.shape, fill, one.dtype) for one, fill in zip(like, _FILL, strict=True)
            )
            pairs = zip(*(before or nothing for before in befores), strict=True)
            self._before = [mx.concatenate(list(arrays)) for arrays in pairs]

    def extract(self, index: int) -> Pools:
        row = Pools(self.ratio, overlaps=self.overlaps)
        row.pooled, row.before = self.pooled.row(index), self._row_before(index)
        row.pending = tuple(one for held in self.pending if (one := held.row(index)) is not None)
        return row

    def _row_before(self, index: int) -> tuple[mx.array, ...]:
        held = self._before if self._begun[index] else ()
        return tuple(mx.contiguous(array[index : index + 1]) for array in held)

    @property
    def counts(self) -> list[int]:
        """The number of entries of each row."""
        return self.pooled.counts

    @property
    def offset(self) -> mx.array:
        return mx.array(self.counts)

    def accumulate_windows(
        self, kv: mx.array, gate: mx.array, offset: mx.array
    ) -> tuple[mx.array, mx.array, mx.array | int]:
        """As of one row, of the rows that complete a group with this token. `kv` and `gate` are [rows, 1,
        width], `offset` is [rows]."""
        for held, array in zip(self.pending, (kv, gate), strict=True):
            held.add(list(range(len(kv))), array[:, 0])
        done = self._done = [row for row, count in enumerate(self.pending[0].counts) if count == self.ratio]
        if not done:
            return kv[:, :0], gate[:, :0], 0
        where, ready = mx.array(done), [held.take(done) for held in self.pending]
        first = offset[where] + 1 - self.ratio
        if self.overlaps:
            if not self._before:
                shapes = [(len(kv), self.ratio, array.shape[2]) for array in ready]
                self._before = [
                    mx.full(shape, fill, array.dtype)
                    for shape, fill, array in zip(shapes, _FILL, ready, strict=True)
                ]
            befores = [held[where] for held in self._before]
            for before, array in zip(self._before, ready, strict=True):
                before[where] = array
            for row in done:
                self._begun[row] = True
            ready = [mx.concatenate(list(pair), axis=1) for pair in zip(befores, ready, strict=True)]
            first = first - self.ratio
        return ready[0], ready[1], first

    def update_and_fetch(self, entries: mx.array) -> mx.array:
        """Appends the entries of the groups that `accumulate_windows` gave; returns all, as many as the
        longest row has."""
        if self._done:
            self.pooled.add(self._done, entries[:, -1])
        held = self.pooled.held()
        return mx.zeros((len(self.counts), 0, entries.shape[2]), entries.dtype) if held is None else held

    def make_mask(self, tokens: int = 1, offset: Any = 0) -> mx.array | None:
        """The entries that each row's token sees, [rows, 1, entries]; None for all."""
        counts = self.counts
        if len(set(counts)) == 1:
            return None
        return (mx.arange(max(counts)) < mx.array(counts)[:, None])[:, None]

    @property
    def state(self) -> list[mx.array]:
        return [*(array for held in (self.pooled, *self.pending) for array in held.arrays), *self._before]


class Pooled(Kind):
    """Its arrays are never written into, so a snapshot has them by reference. Their number of tokens is not
    that of the row, and they are not stored on disk."""

    several = PoolsRows
    goes_back = True

    def snapshot(self, cache: Any) -> Snapshot:
        return Snapshot((cache.pooled,), (cache.pending, cache.before))

    def restore(self, cache: Any, at: Snapshot) -> None:
        (cache.pooled,), (cache.pending, cache.before) = at.arrays, at.rest

    def check(self, cache: Any, tokens: int) -> None:
        """Nothing: the last tokens may be those of a group that is not complete."""


class Unfilled:
    """The place of a cache that is never filled, because what mlx-vlm puts into it can be computed again."""

    keys = values = None
    nbytes = 0
    state: tuple[mx.array, ...] = ()

    def size(self) -> int:
        """No number of tokens, so that nobody adds to them."""
        return -1

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        return tokens

    def empty(self) -> bool:
        return True


class UnfilledRows(Several, Unfilled):
    """The places of several rows."""

    @classmethod
    def merge(cls, rows: Sequence[Any]) -> Self:
        return cls()

    def recompose(self, keep: Sequence[int], rows: Sequence[Any]) -> None: ...

    def extract(self, index: int) -> Unfilled:
        return Unfilled()


class Nothing(Kind):
    """Nothing is in it, so nothing changes."""

    several = UnfilledRows
    cuts = goes_back = True
    recomputes = False

    def snapshot(self, cache: Any) -> Snapshot:
        return Snapshot(())

    def restore(self, cache: Any, at: Snapshot) -> None: ...

    def check(self, cache: Any, tokens: int) -> None: ...

    def trim(self, cache: Any, tokens: int) -> None: ...

    def back(self, cache: Any, notes: Any, tokens: int) -> None: ...
