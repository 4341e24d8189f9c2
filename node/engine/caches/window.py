"""The last tokens' keys and values, mlx-lm's `RotatingKVCache`, for one row and for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache

from .kind import Several, Snapshot
from .sliding import Sliding


class WindowRows(Several, BatchRotatingKVCache):  # type: ignore[misc]
    """mlx-lm's own."""


class Window(Sliding):
    """It drops its oldest tokens while it takes new ones in. After single tokens it begins anywhere."""

    several = WindowRows

    # mlx-lm has no public name for the slot of the next token, `_idx`, nor for the order of slots.

    def knows(self, cache: Any) -> bool:
        return not cache.keep

    def bound(self, cache: Any) -> int:
        return int(cache.max_size)

    def held(self, cache: Any) -> list[mx.array]:
        return [cache._temporal_order(array) for array in (cache.keys, cache.values)]

    def begins(self, cache: Any, tokens: int) -> None:
        cache._idx = tokens

    def note(self, cache: Any) -> Snapshot:
        slots = 0 if cache.keys is None else cache.keys.shape[2]
        rotated = cache._idx < min(slots, cache.offset)
        dropped = max(0, (slots if rotated else cache._idx) - cache.max_size + 1)
        return Snapshot(_slots(cache, cache._idx if rotated else 0, dropped))

    def back(self, cache: Any, notes: Sequence[Snapshot], tokens: int) -> None:
        cache.offset -= tokens
        self._join(cache, notes, (cache.keys, cache.values), tokens, min(cache.offset, cache.max_size))


def _slots(cache: Any, first: int, count: int) -> list[mx.array]:
    """A copy of `count` tokens' keys and values from the slot `first` on, around the end."""
    if not count:
        return []
    slots = cache.keys.shape[2]
    if first + count <= slots:
        return [mx.contiguous(array[..., first : first + count, :]) for array in (cache.keys, cache.values)]
    where = (first + mx.arange(count)) % slots
    return [mx.take(array, where, axis=2) for array in (cache.keys, cache.values)]
