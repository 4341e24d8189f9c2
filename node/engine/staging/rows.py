"""Keys and values of several rows: mlx-lm's batch cache, which knows without asking how its rows are padded.

mlx-lm's `BatchKVCache` reads its paddings from the device whenever rows leave or one is copied, in each
layer: whatever was launched has to be done first, and nothing is launched meanwhile. On an H200 that was most
of the 17 ms in which one of 32 rows left 16 layers; by numbers, and with rows copied in runs, it takes 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx.utils import tree_map

from sealring.node.engine import mlx_lm_import

mlx_lm_import.install()

from mlx_lm.models.cache import BatchKVCache, KVCache  # noqa: E402


class RowsCache(BatchKVCache):  # type: ignore[misc]
    """Rows of [rows, heads, tokens, width], left-padded; `paddings` are those of `left_padding`."""

    keys: Any
    values: Any
    left_padding: mx.array
    offset: mx.array
    _idx: int

    def __init__(self, left_padding: Sequence[int]) -> None:
        super().__init__(list(left_padding))
        self.paddings = list(left_padding)

    @classmethod
    def merge(cls, rows: Sequence[Any]) -> Self:
        """A batch of rows that are not to be used on."""
        if not any(row.size() for row in rows):
            return cls([0] * len(rows))
        merged: Self = super().merge(rows)
        return merged

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keeps these rows, in this order, and drops padding that all of them have."""
        keep = list(batch_indices)
        spare = min(self.paddings[row] for row in keep)
        if self.keys is not None:
            self.keys, self.values = tree_map(
                lambda array: _rows(array, keep)[..., spare:, :], (self.keys, self.values)
            )
        self._idx -= spare
        self.paddings = [self.paddings[row] - spare for row in keep]
        self.left_padding = mx.array(self.paddings)
        self.offset = self._idx - self.left_padding

    def extend(self, other: Self) -> None:
        """Appends the rows of `other`; whichever is shorter is padded on its left."""
        end = max(self._idx, other._idx)
        paddings = [padding + end - cache._idx for cache in (self, other) for padding in cache.paddings]
        self._extend(other)
        self.paddings = paddings

    def _extend(self, other: Self) -> None:
        super().extend(other)

    def extract(self, idx: int) -> Any:
        """A copy of one row."""
        row = self._empty_row()
        if self.keys is None:
            return row
        padding = self.paddings[idx]
        row.keys, row.values = tree_map(
            lambda array: mx.contiguous(array[idx : idx + 1, :, padding : self._idx]),
            (self.keys, self.values),
        )
        row.offset = self._idx - padding
        return row

    def _empty_row(self) -> Any:
        return KVCache()


def merge(rows: Sequence[Any]) -> Any:
    """One layer's caches of several rows, of whatever kind, as mlx-lm would merge them."""
    if all(type(row) is KVCache for row in rows):
        return RowsCache.merge(rows)
    return rows[0].merge(list(rows))


def _rows(array: mx.array, keep: Sequence[int]) -> mx.array:
    """Rows by their indices. Copies of runs take a fraction of the time that a gather takes."""
    runs = itertools.groupby(enumerate(keep), lambda each: each[1] - each[0])
    spans = [[row for _, row in run] for _, run in runs]
    parts = [array[span[0] : span[-1] + 1] for span in spans]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
