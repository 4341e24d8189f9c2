"""Gemma 3n: an input per layer made from the tokens; the last layers read two earlier layers' caches."""

import mlx.nn as nn

from .base import Adapter


class Gemma3n(Adapter):
    def donors(self, model: nn.Module) -> dict[int, int]:
        caches = model.model.language_model.layer_idx_to_cache_idx
        return {layer: cache for layer, cache in enumerate(caches) if layer != cache}


ADAPTER = Gemma3n(per_layer=(3,), batches=True)
