"""What a layer of DeepSeek V4.1 has in its window and compressed, mlx-lm's `LayerCache`; for several rows.

mlx-lm's cache has one position for all its rows. Here each row has its own, which the host knows, and gets
one token in a step. Rows complete groups of tokens, and so entries, at different steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from .kind import Kind, Several, Snapshot
from .ragged import Ragged

ENTRIES = ("compress_kv", "index_k")
PENDING = ("pending_kv", "pending_gate")
_LAST = ("window", *PENDING)


class LatentRows(Several):
    """The content of mlx-lm's `LayerCache` for several rows. Windows end with the newest token, and shorter
    ones begin later."""

    def __init__(self, kind: Any, window_size: int) -> None:
        """`kind` is mlx-lm's class."""
        self._kind = kind
        self._window_size = window_size
        self._window: mx.array | None = None
        self.offsets: list[int] = []
        """Tokens of each row so far."""
        self.ragged = {name: Ragged() for name in (*ENTRIES, *PENDING)}

    @classmethod
    def merge(cls, rows: Sequence[Any]) -> Self:
        """A batch of rows."""
        batch = cls(type(rows[0]), rows[0].window_size)
        batch.recompose([], rows)
        return batch

    def recompose(self, keep: Sequence[int], rows: Sequence[Any]) -> None:
        """Keeps the rows with these indices, in this order, and appends rows."""
        windows = [self._row_window(index) for index in keep] + [row.window for row in rows]
        self.offsets = [self.offsets[index] for index in keep] + [row.offset for row in rows]
        for name, ragged in self.ragged.items():
            ragged.recompose(keep, [_if_any(getattr(row, name)) for row in rows])
        filled = [window for window in windows if window is not None]
        self._window = None
        if filled:
            slots, width = max(window.shape[1] for window in filled), filled[0].shape[2]
            nothing = mx.zeros((1, 0, width), filled[0].dtype)
            own = [nothing if window is None else window for window in windows]
            self._window = mx.concatenate(
                [mx.pad(one, [(0, 0), (slots - one.shape[1], 0), (0, 0)]) for one in own]
            )

    def extract(self, index: int) -> Any:
        """A copy of one row, as mlx-lm's cache of one."""
        row = self._kind(self._window_size)
        row.offset, row.window = self.offsets[index], self._row_window(index)
        for name, ragged in self.ragged.items():
            setattr(row, name, ragged.row(index))
        return row

    def update_window(self, kv: mx.array) -> mx.array:
        """Appends a token of each row, [rows, 1, width], and returns the window with it."""
        window = kv if self._window is None else mx.concatenate([self._window, kv], axis=1)
        self._window = window[:, -self._window_size :]
        self.offsets = [offset + 1 for offset in self.offsets]
        return window

    def window_indices(self) -> mx.array:
        """The slots that each row's next token attends to in what `update_window` will return, -1 for none:
        [rows, 1, slots]."""
        last = 0 if self._window is None else self._window.shape[1]
        width = min(self._window_size, last + 1)
        firsts = [max(last - width + 1, last - length) for length in self._lengths()]
        slots = mx.array(firsts)[:, None, None] + mx.arange(width)
        return mx.where(slots > last, -1, slots)

    @property
    def state(self) -> list[mx.array]:
        """All its arrays."""
        held = [] if self._window is None else [self._window]
        return held + [array for ragged in self.ragged.values() for array in ragged.arrays]

    def _lengths(self) -> list[int]:
        return [min(offset, self._window_size) for offset in self.offsets]

    def _row_window(self, index: int) -> mx.array | None:
        length = self._lengths()[index]
        if self._window is None or not length:
            return None
        return mx.contiguous(self._window[index : index + 1, self._window.shape[1] - length :])


def _if_any(entries: mx.array | None) -> mx.array | None:
    return entries if entries is not None and entries.shape[1] else None


class Latents(Kind):
    """Its entries grow with the row, and the first never change. The rest is that of the last tokens."""

    several = LatentRows
    goes_back = True

    def snapshot(self, cache: Any) -> Snapshot:
        """The arrays besides entries; the tokens of the row, and how many entries it has of each."""
        entries = [getattr(cache, name) for name in ENTRIES]
        counts = [0 if one is None else one.shape[1] for one in entries]
        return Snapshot([copy.copy(getattr(cache, name)) for name in _LAST], (cache.offset, counts))

    def restore(self, cache: Any, at: Snapshot) -> None:
        for name, array in zip(_LAST, at.arrays, strict=True):
            setattr(cache, name, copy.copy(array))
        cache.offset, counts = at.rest
        for name, count in zip(ENTRIES, counts, strict=True):
            setattr(cache, name, getattr(cache, name)[:, :count] if count else None)
