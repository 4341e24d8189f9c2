"""Keys and values of several rows: mlx-lm's batch cache, which knows without asking how its rows are padded.

mlx-lm's `BatchKVCache` reads its paddings from the device whenever rows leave or one is copied, in each
layer: whatever was launched has to be done first, and nothing is launched meanwhile. On an H200 that was most
of the 17 ms in which one of 32 rows left 16 layers; by numbers, and with rows copied in runs, it takes 2.

A cache that is full is copied into a larger one. mlx-lm's grow by 256 tokens, however long they are. Here
they grow by `growth`, so that a long one is copied as seldom as a short one in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache

from .kind import Kind, Several, Snapshot, cannot_be_cut

BLOCK = 256
"""Tokens by which mlx-lm's caches grow."""

_PART = 16
"""Part of a cache by which it grows, if that is more. A cache of 32,768 tokens of an 8B model has 4 GiB: it
is copied, and as many pages are taken anew, every 2,048 tokens instead of 256. `extra_bytes` counts the
rest."""


def growth(held: int) -> int:
    """Tokens by which a cache of `held` tokens grows, a multiple of BLOCK."""
    return max(BLOCK, held // _PART // BLOCK * BLOCK)


def _room(held: int) -> int:
    """Tokens that a cache of `held` tokens is laid out for."""
    return -(-(held + 1) // BLOCK) * BLOCK + growth(held) - BLOCK


def extra_bytes(per_token: int, context: int) -> int:
    """Bytes beside each token's `per_token` for what rows of up to `context` tokens grow by beyond BLOCK."""
    return per_token // _PART if growth(context) > BLOCK else 0


step = property(lambda cache: growth(cache.offset))
KVCache.step = step


class RowsCache(Several, BatchKVCache):  # type: ignore[misc]
    """Rows of [rows, heads, tokens, width], left-padded; `paddings` are those of `left_padding`."""

    keys: Any
    values: Any
    left_padding: mx.array
    offset: mx.array
    _idx: int  # the common end of the rows: mlx-lm's own methods read and move it by this name
    repeats = True

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


def _with_room(held: mx.array | None, new: mx.array, start: int) -> mx.array:
    """The first `start` tokens, and room for those of `new` and some more."""
    batch, heads, tokens, width = new.shape
    room = mx.zeros((batch, heads, _room(start + tokens) - start, width), new.dtype)
    return room if held is None else mx.concatenate([held[..., :start, :], room], axis=2)


class Plain(Kind):
    """Keys and values of all tokens, mlx-lm's `KVCache`."""

    cuts = goes_back = True
    recomputes = False
    several: type[Several] = RowsCache

    def snapshot(self, cache: Any) -> Snapshot:
        """Keys and values, each [1, heads, tokens, width], and the number of tokens."""
        held = () if cache.keys is None else cache.keys_and_values()
        return Snapshot([array for _, array in tree_flatten(held)], int(cache.offset))

    def restore(self, cache: Any, at: Snapshot) -> None:
        cache.keys, cache.values = at.arrays
        cache.offset = at.rest

    def append(self, cache: Any, arrays: Sequence[mx.array], start: int) -> None:
        end, held = start + arrays[0].shape[2], [each for _, each in tree_flatten((cache.keys, cache.values))]
        if not start or end > held[0].shape[2]:
            held = [_with_room(held[at] if start else None, new, start) for at, new in enumerate(arrays)]
        for array, new in zip(held, arrays, strict=True):
            array[..., start:end, :] = new
        half = len(held) // 2
        cache.keys, cache.values = held if half == 1 else (tuple(held[:half]), tuple(held[half:]))
        cache.offset = end

    def stored(self, cache: Any) -> int:
        return 2

    def cut(self, cache: Any, tokens: int) -> None:
        self.trim(cache, int(cache.offset) - tokens)
        if cache.keys is not None:
            held = (cache.keys, cache.values)
            cache.keys, cache.values = tree_map(lambda array: array[..., :tokens, :], held)

    def trim(self, cache: Any, tokens: int) -> None:
        if tokens < 0 or cache.trim(tokens) != tokens:
            cannot_be_cut()

    def note(self, cache: Any) -> Snapshot:
        return Snapshot(())

    def back(self, cache: Any, notes: Sequence[Snapshot], tokens: int) -> None:
        self.trim(cache, tokens)
