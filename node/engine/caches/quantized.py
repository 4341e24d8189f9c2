"""Quantized keys and values of all tokens, for one row and for several.

mlx-lm 0.32 can quantize the cache of one sequence but cannot batch it. `QuantizedBatchCache` is a `RowsCache`
over the three arrays that `mx.quantize` makes of keys and of values: words, scales and biases. A model's
attention finds `bits` on either cache and computes with `quantized_scaled_dot_product_attention`. Keys and
values are quantized the moment that they are put into a cache
(docs/decisions/0004-quantized-from-the-first-token.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from .kind import Snapshot
from .plain import Plain, RowsCache, step

QuantizedKVCache.step = step

Arrays = list[mx.array]
"""Words (uint32), scales and biases of [rows, heads, tokens, width]."""


class QuantizedRowCache(QuantizedKVCache):  # type: ignore[misc]
    """One row. As mlx-lm's, which cannot say its size while it is empty."""

    @property
    def nbytes(self) -> int:
        return _nbytes(self.keys, self.values)


class QuantizedBatchCache(RowsCache):
    """Several rows, left-padded; `keys` and `values` are `Arrays`, or None while there is nothing."""

    keys: Arrays | None
    values: Arrays | None

    def __init__(self, left_padding: Sequence[int], group_size: int, bits: int) -> None:
        super().__init__(list(left_padding))
        self.group_size = group_size
        self.bits = bits

    @classmethod
    def merge(cls, rows: Sequence[Any], *_: int) -> Self:
        return super().merge(rows, rows[0].group_size, rows[0].bits)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Arrays, Arrays]:
        """Appends [rows, heads, tokens, width] and returns all that is held, quantized."""
        added = keys.shape[2]
        self.keys = self._append(self.keys, keys)
        self.values = self._append(self.values, values)
        self._idx += added
        self.offset = self.offset + added
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Arrays, Arrays]:
        return self._held(self.keys), self._held(self.values)

    def _held(self, arrays: Arrays | None) -> Arrays:
        return [array[..., : self._idx, :] for array in arrays or ()]

    def _append(self, held: Arrays | None, new: mx.array) -> Arrays:
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
    """The held array with room for `room` more tokens."""
    empty = mx.zeros((*like.shape[:2], room, like.shape[3]), like.dtype)
    return empty if held is None else mx.concatenate([held, empty], axis=2)


def _nbytes(*held: Arrays | None) -> int:
    return sum(int(array.nbytes) for arrays in held for array in arrays or ())


class Quantized(Plain):
    """As plain ones, in fewer bits."""

    several = QuantizedBatchCache

    def restore(self, cache: Any, at: Snapshot) -> None:
        cache.keys, cache.values = tuple(at.arrays[:3]), tuple(at.arrays[3:])
        cache.offset = at.rest

    def stored(self, cache: Any) -> int:
        return 6
