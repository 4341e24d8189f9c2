"""Entries that stand for whole groups of tokens, and the tokens of a group that is not complete yet.

The class has the interface of mlx-vlm's `PoolingCache`, and one thing more. Where a group's entry is made of
the group before it too (`overlaps`), mlx-vlm begins each call as if there were none, so its entries depend on
how a prompt was cut into chunks. Here the group before is kept and is handed out in front of the new ones.
The entry that is made of it again is dropped.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .kind import Kind, Snapshot


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


class Pooled(Kind):
    """Its arrays are never written into, so a snapshot has them by reference. Their number of tokens is not
    that of the row, and they are not stored on disk."""

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


class Nothing(Kind):
    """Nothing is in it, so nothing changes."""

    cuts = goes_back = True
    recomputes = False

    def snapshot(self, cache: Any) -> Snapshot:
        return Snapshot(())

    def restore(self, cache: Any, at: Snapshot) -> None: ...

    def check(self, cache: Any, tokens: int) -> None: ...

    def trim(self, cache: Any, tokens: int) -> None: ...

    def back(self, cache: Any, notes: Any, tokens: int) -> None: ...
