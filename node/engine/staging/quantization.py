"""Whether a model's caches can be quantized, and how. Learnt by running its code on lazy arrays.

Only mlx-lm's plain `KVCache` is quantized: windows and states are small for any context. A model's attention
has to leave the product with keys and values to mlx-lm's `scaled_dot_product_attention`, which takes
quantized ones. A model that computes with the cached arrays itself fails in the probe and is refused (latent
attention, attention sinks, layers that share keys and values).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.mesh.errors import ModelError

from .anatomy import full_cache

BITS = (8, 4)
_GROUP_SIZES = (64, 32)
"""Values that share a scale: mlx-lm's own choice, and the least that `mx.quantize` has."""

_PROBE_TOKENS = (3, 1)


@dataclass(frozen=True)
class CacheQuantization:
    """How keys and values are kept."""

    bits: int
    group_size: int

    def new_cache(self, cache: Any) -> Any:
        """An empty quantized cache in the place of an empty plain one; any other cache as it is."""
        from sealring.node.engine.caches.quantized import QuantizedRowCache

        return _replace_plain(cache, lambda _: QuantizedRowCache(self.group_size, self.bits))

    def converted(self, cache: Any) -> Any:
        """A quantized copy of a plain cache, to measure; any other cache as it is."""
        return _replace_plain(
            cache, lambda plain: plain.to_quantized(group_size=self.group_size, bits=self.bits)
        )


def cache_quantization(
    model: nn.Module, model_type: str, bits: int, filled: Sequence[Any] | None = None
) -> CacheQuantization:
    """How the model's caches are kept in `bits` bits. Nothing is evaluated.

    `filled` are the model's caches after a run, if there are any already. Raises ModelError
    (KV_BITS_UNSUPPORTED) for a model whose caches cannot be quantized.
    """
    if filled is None:
        filled = full_cache(model)
        model(mx.zeros((1, 1), mx.uint32), cache=filled)
    widths = {width for cache in filled for width in _widths(cache)}
    if not widths:
        raise _unsupported(model_type, "none of its layers has a plain KV cache")
    size = next((size for size in _GROUP_SIZES if all(width % size == 0 for width in widths)), None)
    if size is None:
        odd = next(width for width in sorted(widths) if width % _GROUP_SIZES[-1])
        raise _unsupported(
            model_type, f"its keys or values are {odd} wide, which no {_GROUP_SIZES[-1]} divides"
        )
    chosen = CacheQuantization(bits, size)
    try:
        cache = [chosen.new_cache(one) for one in full_cache(model)]
        for tokens in _PROBE_TOKENS:
            model(mx.zeros((1, tokens), mx.uint32), cache=cache)
    except Exception as error:  # a model's own code may raise anything on arrays that it does not expect
        why = f"its attention does not take quantized keys and values ({type(error).__name__})"
        raise _unsupported(model_type, why) from error
    return chosen


def _widths(cache: Any) -> list[int]:
    found: list[int] = []

    def note(plain: Any) -> Any:
        if plain.keys is not None:
            found.extend((plain.keys.shape[-1], plain.values.shape[-1]))
        return plain

    _replace_plain(cache, note)
    return found


def _replace_plain(cache: Any, replace: Callable[[Any], Any]) -> Any:
    from mlx_lm.models.cache import CacheList, KVCache

    if type(cache) is CacheList:
        return CacheList(*(_replace_plain(part, replace) for part in cache.caches))
    return replace(cache) if type(cache) is KVCache else cache


def _unsupported(model_type: str, why: str) -> ModelError:
    return ModelError(
        f"the KV cache of {model_type} cannot be quantized: {why}",
        reason="KV_BITS_UNSUPPORTED",
        hint="deploy it without kv_bits",
        model_type=model_type,
    )
