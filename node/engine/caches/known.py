"""The kinds of caches by mlx-lm's exact class. What derives from a class is another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .kind import UNKNOWN, Kind


class _Whole(Kind):
    cuts = merges = True


class _Sliding(Kind):
    merges = True

    def knows(self, cache: Any) -> bool:
        return not getattr(cache, "keep", 0)


_CACHE = "mlx_lm.models.cache"
KINDS: Mapping[tuple[str, str], Kind] = {
    (_CACHE, "KVCache"): _Whole(),
    ("sealring.node.engine.staging.rows", "QuantizedRowCache"): _Whole(),
    (_CACHE, "RotatingKVCache"): _Sliding(),
    (_CACHE, "ChunkedKVCache"): _Sliding(),
    (_CACHE, "ArraysCache"): _Sliding(),
    ("mlx_lm.models.deepseek_v41", "LayerCache"): _Sliding(),
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
