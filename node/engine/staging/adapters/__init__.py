"""Small named adapters for architectures that the generic way of `anatomy` cannot split by itself.

An adapter is found by the name of the mlx-lm module that defines the model's layers, so a wrapper (a vision
model around a text model, say) uses that of its text model.
"""

from __future__ import annotations

import importlib
import importlib.util

from .base import Adapter
from .batching import BATCHING

__all__ = ["Adapter", "adapter_for"]


def adapter_for(module: str) -> Adapter:
    """The adapter of the mlx-lm module that defines the layers (`mlx_lm.models.gemma3n` -> `gemma3n`)."""
    name = module.rpartition(".")[2].replace("-", "_")
    full = f"{__name__}.{name}"
    if name in ("base", "batching") or importlib.util.find_spec(full) is None:
        return Adapter(batches=name in BATCHING)
    adapter: Adapter = importlib.import_module(full).ADAPTER
    return adapter
