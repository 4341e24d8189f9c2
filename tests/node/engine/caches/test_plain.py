"""Caches that grow: seldom in proportion to their length, and by no more than is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from sealring.node.engine import caches
from sealring.node.engine.caches.plain import BLOCK, RowsCache, extra_bytes
from sealring.node.engine.caches.quantized import QuantizedRowCache

LONG, MORE, CHUNK = 16_384, 4_096, 64


def batch(of: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        rows = [of(), of()]
        for row in rows:
            row.update_and_fetch(*tokens(1, 1))
        return caches.merge([[row] for row in rows])[0]

    return make


def tokens(rows: int, count: int) -> tuple[mx.array, mx.array]:
    drawn = mx.random.normal((2, rows, 1, count, 64)).astype(mx.float16)
    return drawn[0], drawn[1]


def row() -> QuantizedRowCache:
    return QuantizedRowCache(64, 4)


@pytest.mark.parametrize("make", [KVCache, row, batch(KVCache), batch(row)])
def test_a_long_cache_is_seldom_copied_and_has_the_room_that_is_charged(make: Callable[[], Any]) -> None:
    cache = make()
    rows = len(cache.paddings) if isinstance(cache, RowsCache) else 1

    def capacity() -> int:
        array = cache.keys if isinstance(cache.keys, mx.array) else cache.keys[0]
        return int(array.shape[2])

    cache.update_and_fetch(*tokens(rows, LONG))
    copied = 0
    for held in range(LONG, LONG + MORE, CHUNK):
        before = capacity()
        keys, _ = cache.update_and_fetch(*tokens(rows, CHUNK))
        copied += held if capacity() > before else 0
        charged = held + CHUNK + 1 + BLOCK + extra_bytes(held + CHUNK, held + CHUNK)
        assert capacity() <= charged
    mx.eval(keys)
    assert copied < LONG + MORE + MORE * LONG // (2 * BLOCK)


def test_rows_that_meet_have_the_room_that_is_charged() -> None:
    rows = [KVCache(), KVCache()]
    for cache, held in zip(rows, (LONG, 100), strict=True):
        cache.update_and_fetch(*tokens(1, held))
    (lane,) = caches.merge([[row] for row in rows])
    assert LONG < lane.keys.shape[2] <= LONG + BLOCK + extra_bytes(LONG, LONG)
