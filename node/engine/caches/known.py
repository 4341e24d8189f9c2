"""The kinds of caches by their exact class, mostly mlx-lm's. What derives from a class is another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .chunked import Chunked
from .indexed import Indexed, IndexedKVCache
from .kind import UNKNOWN, Kind
from .latents import Latents
from .plain import Plain
from .pools import Nothing, Pooled, Pools, Unfilled
from .quantized import Quantized, QuantizedRowCache
from .state import Recurrent, RunningSums, State, States, Sums
from .window import Window

_CACHE = "mlx_lm.models.cache"
KINDS: Mapping[tuple[str, str], Kind] = {
    (_CACHE, "KVCache"): Plain(),
    (QuantizedRowCache.__module__, "QuantizedRowCache"): Quantized(),
    (_CACHE, "RotatingKVCache"): Window(),
    (_CACHE, "ChunkedKVCache"): Chunked(),
    (_CACHE, "ArraysCache"): State(),
    ("mlx_lm.models.deepseek_v41", "LayerCache"): Latents(),
    (IndexedKVCache.__module__, "IndexedKVCache"): Indexed(),
    (States.__module__, "States"): Recurrent(),
    (RunningSums.__module__, "RunningSums"): Sums(),
    (Pools.__module__, "Pools"): Pooled(),
    (Unfilled.__module__, "Unfilled"): Nothing(),
}
"""By module and name, because a model's own module is loaded with the model only."""


def kind_of(cache: Any) -> Kind:
    """The kind of one cache of a row, which is no list of caches."""
    kind = KINDS.get(_named(cache), UNKNOWN)
    return kind if kind.knows(cache) else UNKNOWN


def kinds(cache: Sequence[Any]) -> Iterator[tuple[Any, Kind]]:
    """Each cache of a row, those in lists of caches too, with its kind."""
    for entry in cache:
        if hasattr(entry, "caches") and _named(entry) != (_CACHE, "CacheList"):
            yield entry, UNKNOWN
        else:
            yield from ((part, kind_of(part)) for part in parts_of(entry))


def parts_of(cache: Any) -> Sequence[Any]:
    """The caches that a list of caches consists of, or the one cache."""
    parts: Sequence[Any] = getattr(cache, "caches", (cache,))
    return parts


def _named(cache: Any) -> tuple[str, str]:
    return type(cache).__module__, type(cache).__qualname__
