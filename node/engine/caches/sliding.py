"""Keys and values of the last tokens: windows and chunks, which drop the oldest."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .kind import Kind, Snapshot


class Sliding(Kind):
    """A snapshot has the tokens that are in bounds, in their order. A note has those that a run drops."""

    goes_back = True
    recomputes = False

    def held(self, cache: Any) -> list[mx.array]:
        """Keys and values of the tokens that a cache holds, in their order."""
        return list(cache.keys_and_values())

    def begins(self, cache: Any, tokens: int) -> None:
        """Notes that a cache holds the last `tokens` tokens of the row, from the first slot on."""

    def snapshot(self, cache: Any) -> Snapshot:
        """Keys and values, each [1, heads, tokens, width], and the number of tokens of the row."""
        if cache.keys is None:
            return Snapshot((), 0)
        count = min(int(cache.offset), self.bound(cache) or 0)
        return Snapshot([array[..., array.shape[2] - count :, :] for array in self.held(cache)], cache.offset)

    def restore(self, cache: Any, at: Snapshot) -> None:
        cache.keys, cache.values = copy.deepcopy(list(at.arrays)) or (None, None)
        cache.offset = at.rest
        self.begins(cache, 0 if cache.keys is None else cache.keys.shape[2])

    def stored(self, cache: Any) -> int:
        return 2

    def _join(
        self, cache: Any, notes: Sequence[Snapshot], held: Sequence[mx.array], tokens: int, left: int
    ) -> None:
        """Makes a cache of what the runs dropped and of what is `held`: without the last `tokens`, the last
        `left`. Its offset is that of then already."""
        parts = [note.arrays for note in notes if note.arrays] + [held]
        joined = [mx.concatenate(list(arrays), axis=2) for arrays in zip(*parts, strict=True)]
        end = joined[0].shape[2] - tokens
        cache.keys, cache.values = (array[..., end - left : end, :] for array in joined)
        self.begins(cache, left)
