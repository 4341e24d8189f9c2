"""Which slots of a cache hold tokens, as flags: mlx-vlm's GLM 5.3 keeps them in a cache of their own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .kind import Several
from .plain import Plain, RowsCache


class Presence(KVCache):  # type: ignore[misc]
    """Flags [1, 1, tokens, 1] of one row, all of them true."""


class PresenceRows(RowsCache):
    """Flags of several rows. They are made of the paddings: what a row has left behind in a slot that is now
    another's padding is no token."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        _, nothing = super().update_and_fetch(keys, values)
        there = mx.arange(self._idx) >= self.left_padding[:, None]
        return there[:, None, :, None], nothing

    def _empty_row(self) -> Any:
        return Presence()


class Present(Plain):
    """As plain keys and values."""

    several: type[Several] = PresenceRows
