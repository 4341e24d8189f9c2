"""Keys and values with keys by which an indexer chooses blocks of them, as Qwen4's attention has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .apart import ApartRows
from .kind import Several, Snapshot
from .plain import Plain


class IndexedKVCache(KVCache):  # type: ignore[misc]
    """The interface of mlx-vlm's `QSAKVCache`, for one row."""

    def __init__(self) -> None:
        super().__init__()
        self.index_keys: mx.array | None = None
        """[1, tokens, width]."""
        self.clear_index_blocks()

    def clear_index_blocks(self) -> None:
        """Forgets the blocks' keys, which the model makes again of the tokens'."""
        self.index_block_keys = self.index_block_ratio = None

    def update_indexer(self, keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys; returns all, and the positions of their tokens, [..., tokens]."""
        if self.index_keys is not None:
            keys = mx.concatenate([self.index_keys, keys], axis=1)
        self.index_keys = keys
        all_of_row = mx.arange(keys.shape[1], dtype=positions.dtype)
        return keys, mx.broadcast_to(all_of_row, (*positions.shape[:-1], keys.shape[1]))

    def trim(self, n: int) -> int:
        taken = int(super().trim(n))
        self.index_keys = None if self.index_keys is None else self.index_keys[:, : self.offset]
        self.clear_index_blocks()
        return taken

    @property
    def nbytes(self) -> int:
        own = [self.index_keys, self.index_block_keys]
        return int(super().nbytes) + sum(array.nbytes for array in own if array is not None)


class Indexed(Plain):
    """As plain keys and values, and the indexer's keys."""

    several: type[Several] = ApartRows

    def snapshot(self, cache: Any) -> Snapshot:
        at = super().snapshot(cache)
        keys = () if cache.index_keys is None else (cache.index_keys[:, None],)
        return Snapshot([*at.arrays, *keys], at.rest)

    def restore(self, cache: Any, at: Snapshot) -> None:
        cache.keys, cache.values, keys = at.arrays
        cache.index_keys, cache.offset = keys[:, 0], at.rest
        cache.clear_index_blocks()

    def append(self, cache: Any, arrays: Sequence[mx.array], start: int) -> None:
        *own, keys = arrays
        super().append(cache, own, start)
        before = [cache.index_keys[:, :start]] if start else []
        cache.index_keys = mx.concatenate([*before, keys[:, 0]], axis=1)
        cache.clear_index_blocks()

    def stored(self, cache: Any) -> int:
        return 3
