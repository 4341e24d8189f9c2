"""The last tokens' keys and values, mlx-lm's `RotatingKVCache`, for one row and for several."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import BatchRotatingKVCache

from .kind import Kind, Several


class WindowRows(Several, BatchRotatingKVCache):  # type: ignore[misc]
    """mlx-lm's own."""


class Window(Kind):
    """It drops its oldest tokens while it takes new ones in."""

    several = WindowRows

    def knows(self, cache: Any) -> bool:
        return not cache.keep

    def cut(self, cache: Any, tokens: int) -> None:
        super().cut(cache, tokens)
        if cache.keys is not None and cache.keys.shape[2] > cache.max_size:
            # behind a chunk it also holds what the chunk's first tokens looked back at
            last = slice(-cache.max_size, None)
            cache.keys, cache.values = cache.keys[..., last, :], cache.values[..., last, :]
            cache._idx = cache.max_size
