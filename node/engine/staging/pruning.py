"""Takes the parameters that a stage does not need out of a model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .anatomy import Anatomy, outer_modules
from .interception import leaves, own_arrays


def prune(model: nn.Module, anatomy: Anatomy, lo: int, hi: int) -> list[mx.array]:
    """Replaces every parameter that the layers [lo, hi) do not need by NaN without storage.

    Parameters outside the layers stay where the stage's part of the model's call reads them: before layer 0
    on the head, between and within the stage's layers, after the last layer on the tail. Returns those kept.
    """
    kept: dict[int, mx.array] = {}
    for index, layer in enumerate(anatomy.layers):
        for module in layer.modules():
            for key, value in own_arrays(module):
                _keep_or_drop(module, key, value, lo <= index < hi, kept)
    for module in outer_modules(model, anatomy.layers):
        for key, value in own_arrays(module):
            times = anatomy.uses.get((id(module), key), frozenset())
            needed = any(lo < time <= hi or (time == 0 and lo == 0) for time in times)
            _keep_or_drop(module, key, value, needed, kept)
    return list(kept.values())


def _keep_or_drop(module: nn.Module, key: str, value: Any, needed: bool, kept: dict[int, mx.array]) -> None:
    if needed:
        kept.update((id(leaf), leaf) for leaf in leaves(value) if isinstance(leaf, mx.array))
    else:
        module[key] = _absent(value)


def _absent(value: Any) -> Any:
    """The same containers and shapes with nothing behind them."""
    if isinstance(value, dict):
        return {key: _absent(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_absent(item) for item in value)
    if not isinstance(value, mx.array):
        return value
    nothing = float("nan") if mx.issubdtype(value.dtype, mx.floating) else 0
    return mx.broadcast_to(mx.array(nothing, value.dtype), value.shape)
