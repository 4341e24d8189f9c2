"""Keys and values of several rows: mlx-lm's batch cache, which knows without asking how its rows are padded.

mlx-lm's `BatchKVCache` reads its paddings from the device whenever rows leave or one is copied, in each
layer: whatever was launched has to be done first, and nothing is launched meanwhile. On an H200 that was most
of the 17 ms in which one of 32 rows left 16 layers; by numbers, and with rows copied in runs, it takes 2.

mlx-lm 0.32 can quantize the cache of one sequence but cannot batch it. `QuantizedBatchCache` is the same over
the three arrays that `mx.quantize` makes of keys and of values: words, scales and biases. A model's attention
finds `bits` on either cache and computes with `quantized_scaled_dot_product_attention`. Keys and values are
quantized the moment that they are put into a cache (docs/decisions/0004-quantized-from-the-first-token.md).

A cache that is full is copied into a larger one. mlx-lm's grow by 256 tokens, however long they are. Here
they grow by `growth`, so that a long one is copied as seldom as a short one in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self

import mlx.core as mx
from mlx.utils import tree_map

from sealring.node.engine import mlx_lm_import

from .latents import LatentRows

mlx_lm_import.install()

from mlx_lm.models.cache import BatchKVCache, ChunkedKVCache, KVCache, QuantizedKVCache  # noqa: E402

BLOCK = 256
"""Tokens by which mlx-lm's caches grow."""

_PART = 16
"""Part of a cache by which it grows, if that is more. A cache of 32,768 tokens of an 8B model has 4 GiB: it
is copied, and as many pages are taken anew, every 2,048 tokens instead of 256. `extra_bytes` counts the
rest."""

_SPARE = 64
"""Tokens before a chunk that a batch may hold: to drop them copies all that is left."""


def growth(held: int) -> int:
    """Tokens by which a cache of `held` tokens grows, a multiple of BLOCK."""
    return max(BLOCK, held // _PART // BLOCK * BLOCK)


def _room(held: int) -> int:
    """Tokens that a cache of `held` tokens is laid out for."""
    return -(-(held + 1) // BLOCK) * BLOCK + growth(held) - BLOCK


def extra_bytes(per_token: int, context: int) -> int:
    """Bytes beside each token's `per_token` for what rows of up to `context` tokens grow by beyond BLOCK."""
    return per_token // _PART if growth(context) > BLOCK else 0


KVCache.step = QuantizedKVCache.step = property(lambda cache: growth(cache.offset))


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

    @property
    def step(self) -> int:
        return growth(self._idx)

    @classmethod
    def merge(cls, rows: Sequence[Any], *options: int) -> Self:
        """A batch of rows that are not to be used on; `options` are those of the class."""
        batch = cls([], *options)
        batch.recompose([], rows)
        return batch

    def recompose(self, keep: Sequence[int], rows: Sequence[Any]) -> None:
        """Keeps the rows with these indices, in this order, and appends rows that are not to be used on.

        Whatever changes, every array is laid out once, with room for the next tokens.
        """
        lengths = [self._idx - self.paddings[row] for row in keep]
        kept, before = max(lengths, default=0), self._idx
        lengths += [row.offset for row in rows]
        end = max(lengths, default=0)
        filled = [(place, row) for place, row in enumerate(rows, len(keep)) if row.offset]
        sources = [(self.keys, self.values)] if kept else []
        sources += [(row.keys, row.values) for _, row in filled]

        def lay(*arrays: mx.array) -> mx.array:
            _, heads, _, width = arrays[0].shape
            whole = mx.zeros((len(lengths), heads, _room(end), width), arrays[0].dtype)
            for place, span in _runs(keep) if kept else ():
                whole[place : place + len(span), :, end - kept : end] = arrays[0][
                    span.start : span.stop, :, before - kept : before
                ]
            for (place, row), own in zip(filled, arrays[len(arrays) - len(filled) :], strict=True):
                whole[place : place + 1, :, end - row.offset : end] = own[..., : row.offset, :]
            return whole

        self.keys, self.values = tree_map(lay, *sources) if sources else (None, None)
        self._idx = end
        self._pad([end - length for length in lengths])

    def _pad(self, paddings: list[int]) -> None:
        self.paddings = paddings
        self.left_padding = mx.array(paddings)
        self.offset = mx.array([self._idx - padding for padding in paddings])

    def holds(self, keep: Sequence[int], rows: Sequence[Any], spare: int) -> bool:
        """Whether `rows` can be put into places of others than `keep`, and all others may stay empty.

        Not where a row is longer than those that are there, nor where another layout takes fewer blocks. The
        arrays are larger by `spare` tokens at most than what is counted for the rows: for each the longest of
        them, and a block.
        """
        places = len(self.paddings)
        if self.keys is None or len(keep) + len(rows) > places:
            return False
        lengths = [*(self._idx - self.paddings[place] for place in keep), *(row.offset for row in rows)]
        longest, room = max(lengths), self._leaf().shape[2]
        counted = len(lengths) * (longest + BLOCK)
        return bool(longest <= self._idx and _room(longest) >= room and places * room <= counted + spare)

    def put(self, places: Sequence[int], rows: Sequence[Any]) -> None:
        """Puts rows that are not to be used on into these places. No other row is copied."""
        end, paddings = self._idx, list(self.paddings)

        def write(held: mx.array, own: mx.array) -> None:
            held[place : place + 1, :, end - row.offset : end] = own[..., : row.offset, :]

        for place, row in zip(places, rows, strict=True):
            paddings[place] = end - row.offset
            if row.offset:
                tree_map(write, (self.keys, self.values), (row.keys, row.values))
        self._pad(paddings)

    def take_back(self, tokens: Sequence[int]) -> None:
        """Takes the last of these numbers of tokens off each place. Rows that lose more than others do are
        copied, because all end at the same index."""
        least = min(tokens)
        end = self._idx = self._idx - least
        paddings = list(self.paddings)
        for place, more in enumerate(count - least for count in tokens):
            if not more:
                continue
            start = paddings[place]

            def move(held: mx.array, place: int = place, start: int = start, more: int = more) -> None:
                moved = mx.contiguous(held[place : place + 1, :, start : end - more])
                held[place : place + 1, :, start + more : end] = moved

            tree_map(move, (self.keys, self.values))
            paddings[place] += more
        self._pad(paddings)

    def look_at(self, place: int) -> Any:
        """One row, in arrays that are parts of these; not to be changed."""
        return self._row(place, lambda array: array)

    def extract(self, idx: int) -> Any:
        """A copy of one row."""
        return self._row(idx, mx.contiguous)

    def _leaf(self) -> mx.array:
        """One of the arrays that are as long as all of them."""
        leaf: mx.array = self.keys if isinstance(self.keys, mx.array) else self.keys[0]
        return leaf

    def _row(self, place: int, use: Callable[[mx.array], mx.array]) -> Any:
        row = self._empty_row()
        if self.keys is None:
            return row
        padding = self.paddings[place]
        row.keys, row.values = tree_map(
            lambda array: use(array[place : place + 1, :, padding : self._idx]), (self.keys, self.values)
        )
        row.offset = self._idx - padding
        return row

    def _empty_row(self) -> Any:
        return KVCache()


class ChunkedRowsCache(RowsCache):
    """Rows that attend within chunks of `chunk_size` tokens; tokens before all their chunks are dropped."""

    def __init__(self, left_padding: Sequence[int], chunk_size: int) -> None:
        super().__init__(left_padding)
        self.chunk_size = chunk_size
        self.dropped = [0] * len(self.paddings)
        """Tokens of each row that were before the first one held."""

    @classmethod
    def merge(cls, rows: Sequence[Any], *_: int) -> Self:
        return super().merge(rows, rows[0].chunk_size)

    def recompose(self, keep: Sequence[int], rows: Sequence[Any]) -> None:
        held = [
            SimpleNamespace(keys=row.keys, values=row.values, offset=row.offset - row.start_position)
            for row in rows
        ]
        super().recompose(keep, held)
        self._count([self.dropped[row] for row in keep] + [row.start_position for row in rows])

    def _count(self, dropped: list[int]) -> None:
        self.dropped = dropped
        self.offset = self._idx - self.left_padding + mx.array(dropped)

    def make_mask(self, N: int, **_: Any) -> mx.array:  # noqa: N803  mlx-lm's name
        """The mask for N more tokens, bool [rows, 1, N, held + N]."""
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

    def holds(self, keep: Sequence[int], rows: Sequence[Any], spare: int) -> bool:
        """Never: what was dropped of a row decides what it may see."""
        return False

    def _row(self, place: int, use: Callable[[mx.array], mx.array]) -> Any:
        row = super()._row(place, use)
        row.start_position = self.dropped[place]
        row.offset += row.start_position
        return row

    def _empty_row(self) -> Any:
        return ChunkedKVCache(self.chunk_size)


_BATCHES: dict[tuple[str, str], type[RowsCache | LatentRows]] = {
    (KVCache.__module__, "KVCache"): RowsCache,
    (ChunkedKVCache.__module__, "ChunkedKVCache"): ChunkedRowsCache,
    ("mlx_lm.models.deepseek_v41", "LayerCache"): LatentRows,
}
"""Classes by the module and name of mlx-lm's, because a model's own module is loaded with the model only."""


def merge(rows: Sequence[Any]) -> Any:
    """One layer's caches of several rows, of whatever kind, as mlx-lm would merge them."""
    own = _BATCHES.get(_kind(rows[0]))
    return own.merge(rows) if own else rows[0].merge(list(rows))


def _kind(row: Any) -> tuple[str, str]:
    return type(row).__module__, type(row).__qualname__


def _runs(rows: Sequence[int]) -> list[tuple[int, range]]:
    """Rows that follow each other, and the place of the first. Copies of runs take a fraction of the time
    that a gather takes."""
    runs: list[tuple[int, range]] = []
    for place, row in enumerate(rows):
        if runs and runs[-1][1].stop == row:
            runs[-1] = runs[-1][0], range(runs[-1][1].start, row + 1)
        else:
            runs.append((place, range(row, row + 1)))
    return runs


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
    """The held array with room for `room` more tokens."""
    empty = mx.zeros((*like.shape[:2], room, like.shape[3]), like.dtype)
    return empty if held is None else mx.concatenate([held, empty], axis=2)


def _nbytes(*held: Quantized | None) -> int:
    return sum(int(array.nbytes) for arrays in held for array in arrays or ())
