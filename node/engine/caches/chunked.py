"""Keys and values of the last chunks, mlx-lm's `ChunkedKVCache`, for one row and for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from .kind import Snapshot, cannot_be_cut
from .plain import RowsCache
from .sliding import Sliding

_SPARE = 64
"""Tokens before a chunk that a batch may hold: to drop them copies all that is left."""


class ChunkedRowsCache(RowsCache):
    """Rows that attend within chunks of `chunk_size` tokens; tokens before all their chunks are dropped."""

    repeats = False

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

    def take_back(self, tokens: Sequence[int]) -> None:
        cannot_be_cut()


class Chunked(Sliding):
    """It drops what is before the chunk when it takes the next tokens in."""

    several = ChunkedRowsCache

    def bound(self, cache: Any) -> int:
        return int(cache.chunk_size)

    def begins(self, cache: Any, tokens: int) -> None:
        cache.start_position = cache.offset - tokens

    def note(self, cache: Any) -> Snapshot:
        """The rest is where the cache began."""
        count = cache.offset - cache.start_position - cache.chunk_size
        held = (cache.keys, cache.values) if count > 0 else ()
        return Snapshot([mx.contiguous(array[..., :count, :]) for array in held], cache.start_position)

    def back(self, cache: Any, notes: Sequence[Snapshot], tokens: int) -> None:
        if cache.start_position == notes[0].rest:
            cache.trim(tokens)
            return
        held = cache.keys_and_values()
        cache.offset -= tokens
        self._join(cache, notes, held, tokens, cache.offset - notes[0].rest)
