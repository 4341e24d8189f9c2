"""The state of a recurrent or convolution layer, mlx-lm's `ArraysCache`, for one row and for several."""

from __future__ import annotations

import copy
from typing import Any

from mlx_lm.models.cache import ArraysCache

from .kind import Kind, Several, Snapshot


class StateRows(Several, ArraysCache):  # type: ignore[misc]
    """mlx-lm's own."""


class State(Kind):
    """It is as it was after the last token, and knows no positions."""

    several = StateRows
    goes_back = True

    def snapshot(self, cache: Any) -> Snapshot:
        return Snapshot(copy.deepcopy(cache.cache))

    def restore(self, cache: Any, at: Snapshot) -> None:
        cache.cache = copy.deepcopy(list(at.arrays))

    def stored(self, cache: Any) -> int:
        return len(cache.cache)
