"""Each kind's snapshots stay what they are, whatever is written meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache
from mlx_lm.models.deepseek_v41 import LayerCache

from sealring.node.engine.caches import kind_of
from sealring.node.engine.caches.indexed import IndexedKVCache
from sealring.node.engine.caches.kind import UNKNOWN, Snapshot
from sealring.node.engine.caches.known import KINDS
from sealring.node.engine.caches.pools import Pools, Unfilled
from sealring.node.engine.caches.quantized import QuantizedRowCache
from sealring.node.engine.caches.state import RunningSums, States

SLOTS = 5


class Unknown(ArraysCache):  # type: ignore[misc]
    """A class that nobody has named."""


def take(cache: Any, token: int, count: int = 1) -> None:
    """Has a cache of any kind take tokens in."""
    new = mx.arange(token, token + count, dtype=mx.float32)[None, None, :, None] + mx.zeros((1, 1, count, 32))
    if isinstance(cache, ArraysCache):
        cache[0] = new.sum(axis=2) if cache[0] is None else mx.sin(cache[0] * 3 + new.sum(axis=2))
    elif isinstance(cache, RunningSums):
        before = cache.cum_eKV if cache.cum_eKV is not None else mx.zeros((1, 1, 32))
        cache.cum_eKV = cache.cum_eK = before + new.sum(axis=2)
        cache.win_eKV = cache.win_eK = new[:, :, -1]
        cache.offset += count
    elif isinstance(cache, Pools):
        ready, _, _ = cache.accumulate_windows(new[0], new[0], token)
        cache.update_and_fetch(ready.reshape(1, -1, cache.ratio, 32).sum(axis=2))
    elif isinstance(cache, LayerCache):
        cache.update_window(new[0])
        held = cache.compress_kv
        cache.compress_kv = new[0] if held is None else mx.concatenate([held, new[0]], axis=1)
        cache.pending_kv = new[0, :, -1:]
    elif not isinstance(cache, Unfilled):
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        if isinstance(cache, IndexedKVCache):
            cache.update_indexer(new[0], mx.arange(token, token + count)[None])
        cache.update_and_fetch(new, -new)


def seen(cache: Any) -> list[object]:
    """What later tokens see of a row, in their order."""
    snapshot = kind_of(cache).snapshot(cache)
    found = dict(tree_flatten([snapshot.arrays, snapshot.rest]))
    if isinstance(cache, LayerCache):
        found["entries"] = cache.compress_kv
    return [(name, each.tolist() if isinstance(each, mx.array) else each) for name, each in found.items()]


MAKE: dict[str, Callable[[], Any]] = {
    "KVCache": KVCache,
    "QuantizedRowCache": lambda: QuantizedRowCache(32, 8),
    "RotatingKVCache": lambda: RotatingKVCache(SLOTS),
    "ChunkedKVCache": lambda: ChunkedKVCache(SLOTS),
    "ArraysCache": lambda: ArraysCache(1),
    "LayerCache": lambda: LayerCache(SLOTS),
    "States": lambda: States(1),
    "RunningSums": RunningSums,
    "Pools": lambda: Pools(2, overlaps=True),
    "Unfilled": Unfilled,
    "IndexedKVCache": IndexedKVCache,
    "Unknown": lambda: Unknown(1),
}


def test_every_kind_is_tried_here() -> None:
    assert set(MAKE) == {name for _, name in KINDS} | {"Unknown"}
    assert kind_of(Unknown(1)) is UNKNOWN


@pytest.mark.parametrize("name", [name for name in MAKE if name != "Unfilled"])
@pytest.mark.parametrize("sizes", [[3], [3, 4], [2, 1, 1, 1, 1, 1, 1, 1]])
def test_rows_go_back_to_a_snapshot_again_and_again(name: str, sizes: list[int]) -> None:
    """Short, slid behind a chunk, and slid by single tokens. Rows made of it do not change it, nor each
    other."""
    cache, token = MAKE[name](), 1
    kind = kind_of(cache)
    for size in sizes:
        take(cache, token, size)
        token += size
    at, before = kind.snapshot(cache), seen(cache)
    for at_once in ([1], [1, 1, 1], [4, 1]):
        for size in at_once:
            take(cache, 70 + size, size)
        assert seen(cache) != before
        kind.restore(cache, at)
        assert seen(cache) == before


@pytest.mark.parametrize("name", [name for name in MAKE if MAKE[name]().__class__ is not Unknown])
def test_a_snapshot_and_the_number_of_tokens_are_all_that_is_stored(name: str) -> None:
    """Also of a window that single tokens have turned."""
    cache, other = MAKE[name](), MAKE[name]()
    kind, tokens = kind_of(cache), 9
    for token in range(tokens):
        take(cache, token)
    if not kind.stored(cache):
        assert isinstance(cache, LayerCache | Pools | Unfilled)
        return
    at = kind.snapshot(cache)
    assert len(at.arrays) == kind.stored(cache)
    kind.restore(other, Snapshot(at.arrays, tokens))
    assert seen(other) == seen(cache)
    for one in (cache, other):
        take(one, 50, 2)
        take(one, 60)
    assert seen(other) == seen(cache)
