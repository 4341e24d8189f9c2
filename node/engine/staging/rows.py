"""Keys and values of several rows: mlx-lm's batch cache, which knows without asking how its rows are padded.

mlx-lm's `BatchKVCache` reads its paddings from the device whenever rows leave or one is copied, in each
layer: whatever was launched has to be done first, and nothing is launched meanwhile. On an H200 that was most
of the 17 ms in which one of 32 rows left 16 layers; by numbers, and with rows copied in runs, it takes 2.

mlx-lm 0.32 can quantize the cache of one sequence but cannot batch it. `QuantizedBatchCache` is the same over
the three arrays that `mx.quantize` makes of keys and of values: words, scales and biases. A model's attention
finds `bits` on either cache and computes with `quantized_scaled_dot_product_attention`. Keys and values are
quantized the moment that they are put into a cache (docs/decisions/0004-quantized-from-the-first-token.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from sealring.node.engine import mlx_lm_import

mlx_lm_import.install()

from mlx_lm.models.cache import BatchKVCache, ChunkedKVCache, KVCache, QuantizedKVCache  # noqa: E402

_SPARE = 64
"""Tokens before a chunk that a batch may hold: to drop them copies all that is left."""


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
    def merge(cls, rows: Sequence[Any], *options: int) -> Self:
        """A batch of rows that are not to be used on; `options` are those of the class."""
        longest = max(row.offset for row in rows)
        batch = cls([longest - row.offset for row in rows], *options)
        filled = [(place, row) for place, row in enumerate(rows) if row.offset]

        def stack(*arrays: mx.array) -> mx.array:
            like = arrays[0]
            whole = mx.zeros((len(rows), like.shape[1], longest, like.shape[3]), like.dtype)
            for (place, row), own in zip(filled, arrays, strict=True):
                whole[place : place + 1, :, longest - row.offset :] = own[..., : row.offset, :]
            return whole

        if filled:
            batch.keys, batch.values = tree_map(stack, *((row.keys, row.values) for _, row in filled))
            batch.offset = batch.offset + longest
            batch._idx = longest
        return batch

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
        filled = [(cache.keys, cache.values) for cache in (self, other) if cache.keys is not None]
        size = max((array.shape[2] for _, array in tree_flatten(filled)), default=0)

        def aligned(cache: Self) -> Any:
            """Keys and values of `size` tokens, those in use up to `end`."""
            rows, left = len(cache.paddings), end - cache._idx

            def align(array: mx.array) -> mx.array:
                if cache.keys is None:
                    return mx.zeros((rows, array.shape[1], size, array.shape[3]), array.dtype)
                room = max(0, size - left - array.shape[2])
                cut = array[..., : size - left, :]
                return mx.pad(cut, [(0, 0), (0, 0), (left, room), (0, 0)]) if left or room else cut

            return tree_map(align, filled[0] if cache.keys is None else (cache.keys, cache.values))

        if filled:
            self.keys, self.values = tree_map(
                lambda *pair: mx.concatenate(list(pair)), aligned(self), aligned(other)
            )
        self.paddings = [padding + end - cache._idx for cache in (self, other) for padding in cache.paddings]
        self._idx = end
        self.left_padding = mx.array(self.paddings)
        self.offset = end - self.left_padding

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


class ChunkedRowsCache(RowsCache):
    """Rows that attend within chunks of so many tokens; what is before all their chunks is dropped."""

    def __init__(self, left_padding: Sequence[int], chunk_size: int) -> None:
        super().__init__(left_padding)
        self.chunk_size = chunk_size
        self.dropped = [0] * len(self.paddings)
        """Tokens of each row that were before the first one held."""

    @classmethod
    def merge(cls, rows: Sequence[Any], *_: int) -> Self:
        held = [
            SimpleNamespace(keys=row.keys, values=row.values, offset=row.offset - row.start_position)
            for row in rows
        ]
        batch = super().merge(held, rows[0].chunk_size)
        batch._count([row.start_position for row in rows])
        return batch

    def _count(self, dropped: list[int]) -> None:
        self.dropped = dropped
        self.offset = self._idx - self.left_padding + mx.array(dropped)

    def make_mask(self, N: int, **_: Any) -> mx.array:  # noqa: N803  mlx-lm's name
        """For N more tokens, [rows, 1, N, held + N]."""
        slots = mx.arange(self._idx + N)
        first = (mx.array(self.dropped) - self.left_padding)[:, None, None, None]
        keys, queries = slots + first, slots[self._idx :, None] + first
        same = keys // self.chunk_size == queries // self.chunk_size
        return same & (keys <= queries) & (slots >= self.left_padding[:, None, None, None])

    def maybe_trim_front(self) -> None:
        """Drops what no row attends to any more."""
        surplus = self._idx - self.chunk_size
        if surplus < _SPARE:
            return
        self.keys, self.values = (array[..., surplus : self._idx, :] for array in (self.keys, self.values))
        self._idx = self.chunk_size
        gone = [max(0, surplus - padding) for padding in self.paddings]
        self.paddings = [max(0, padding - surplus) for padding in self.paddings]
        self.left_padding = mx.array(self.paddings)
        self._count([before + more for before, more in zip(self.dropped, gone, strict=True)])

    def filter(self, batch_indices: Sequence[int]) -> None:
        super().filter(batch_indices)
        self._count([self.dropped[row] for row in batch_indices])

    def extend(self, other: Self) -> None:
        super().extend(other)
        self._count(self.dropped + other.dropped)

    def extract(self, idx: int) -> Any:
        row = super().extract(idx)
        row.start_position = self.dropped[idx]
        row.offset += row.start_position
        return row

    def _empty_row(self) -> Any:
        return ChunkedKVCache(self.chunk_size)


_BATCHES: dict[type[Any], type[RowsCache]] = {KVCache: RowsCache, ChunkedKVCache: ChunkedRowsCache}


def merge(rows: Sequence[Any]) -> Any:
    """One layer's caches of several rows, of whatever kind, as mlx-lm would merge them."""
    own = _BATCHES.get(type(rows[0]))
    return own.merge(rows) if own else rows[0].merge(list(rows))


def can_merge(row: Any) -> bool:
    """Whether there is a batch of several rows like this one."""
    return type(row) in _BATCHES or hasattr(row, "merge")


def _rows(array: mx.array, keep: Sequence[int]) -> mx.array:
    """Rows by their indices. Copies of runs take a fraction of the time that a gather takes."""
    runs = itertools.groupby(enumerate(keep), lambda each: each[1] - each[0])
    spans = [[row for _, row in run] for _, run in runs]
    parts = [array[span[0] : span[-1] + 1] for span in spans]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


Quantized = list[mx.array]
"""Words (uint32), scales and biases of [rows, heads, tokens, width]."""


class QuantizedRowCache(QuantizedKVCache):  # type: ignore[misc]
    """One row. As mlx-lm's, and `merge` makes a batch of several."""

    @classmethod
    def merge(cls, rows: Sequence[QuantizedRowCache]) -> QuantizedBatchCache:
        return QuantizedBatchCache.merge(rows, rows[0].group_size, rows[0].bits)

    def size(self) -> int:
        return int(self.offset)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.keys, self.values)


class QuantizedBatchCache(RowsCache):
    """Several rows, left-padded; `keys` and `values` are `Quantized`, or None while there is nothing."""

    keys: Quantized | None
    values: Quantized | None

    def __init__(self, left_padding: Sequence[int], group_size: int, bits: int) -> None:
        super().__init__(list(left_padding))
        self.group_size = group_size
        self.bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Appends [rows, heads, tokens, width] and returns all that is held, quantized."""
        added = keys.shape[2]
        self.keys = self._append(self.keys, keys)
        self.values = self._append(self.values, values)
        self._idx += added
        self.offset = self.offset + added
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Quantized, Quantized]:
        return self._held(self.keys), self._held(self.values)

    def _held(self, arrays: Quantized | None) -> Quantized:
        return [array[..., : self._idx, :] for array in arrays or ()]

    def _append(self, held: Quantized | None, new: mx.array) -> Quantized:
        start, end = self._idx, self._idx + new.shape[2]
        parts = mx.quantize(new, group_size=self.group_size, bits=self.bits)
        if held is None or end > held[0].shape[2]:
            room = (self.step + new.shape[2] - 1) // self.step * self.step
            held = [
                _joined(None if held is None else held[number][..., :start, :], part, room)
                for number, part in enumerate(parts)
            ]
        for array, part in zip(held, parts, strict=True):
            array[..., start:end, :] = part
        return held

    def prepare(self, **_: Any) -> None:
        """Rows are prefilled alone and merged, so a batch never has padding of its own to prepare."""
        raise NotImplementedError("a quantized batch is made by merge")

    def finalize(self) -> None:
        """Nothing was prepared."""

    def _empty_row(self) -> QuantizedRowCache:
        return QuantizedRowCache(self.group_size, self.bits)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.keys, self.values)


def _joined(held: mx.array | None, like: mx.array, room: int) -> mx.array:
    """What is held, and room for so many tokens more."""
    empty = mx.zeros((*like.shape[:2], room, like.shape[3]), like.dtype)
    return empty if held is None else mx.concatenate([held, empty], axis=2)


def _nbytes(*held: Quantized | None) -> int:
    return sum(int(array.nbytes) for arrays in held for array in arrays or ())
