"""The state of a recurrent or convolution layer, mlx-lm's `ArraysCache`, for one row and for several."""

from __future__ import annotations

from mlx_lm.models.cache import ArraysCache

from .kind import Kind, Several


class StateRows(Several, ArraysCache):  # type: ignore[misc]
    """mlx-lm's own."""


class State(Kind):
    """It is as it was after the last token, and knows no positions."""

    several = StateRows
