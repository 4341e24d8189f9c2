"""Rows of several caches: what is done with all of them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from sealring.mesh.errors import Internal
from sealring.node.engine import caches
from sealring.node.engine.caches.quantized import QuantizedRowCache


def row(cache: Any, tokens: int) -> Any:
    held = mx.arange(tokens, dtype=mx.float32)[None, None, :, None] + mx.zeros((1, 1, tokens, 32))
    cache.update_and_fetch(held, -held)
    return cache


def held(cache: Any) -> list[float]:
    found: list[float] = cache.keys[0, 0, : cache.offset, 0].tolist()
    return found


def test_rows_of_lists_of_caches_are_taken_back_and_given_empty_places() -> None:
    """They are trimmable, so drafts are made for several rows of a lane."""
    assert caches.cuts_together([CacheList(KVCache(), QuantizedRowCache(32, 8))])
    rows = [[CacheList(row(KVCache(), tokens), row(KVCache(), tokens + 1))] for tokens in (5, 8, 7)]
    lane = caches.merge(rows[:2])
    caches.take_back(lane, [3, 1])
    assert [[held(part) for part in caches.extract(lane, place)[0].caches] for place in (0, 1)] == [
        [[0, 1], [0, 1, 2]],
        [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7]],
    ]
    assert caches.holds(lane, [1], [rows[2]], 1000)
    caches.put(lane, [0], [rows[2]])
    assert [held(part) for part in caches.look_at(lane, 0)[0].caches] == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


@pytest.mark.parametrize("make", [lambda: RotatingKVCache(4), lambda: ChunkedKVCache(4)])
def test_what_slides_is_not_cut(make: Any) -> None:
    """Nor does it say so while it is short, when mlx-lm's own could be."""
    assert not caches.trimmable([make()])
    one = [row(make(), 3)]
    for cut in (lambda: caches.first_tokens(one, 2), lambda: caches.trim(one, 1)):
        with pytest.raises(Internal, match="was to be cut"):
            cut()
    lane = caches.merge([[row(make(), 3)] for _ in range(2)])
    with pytest.raises(Internal, match="was to be cut"):
        caches.take_back(lane, [1, 1])
    assert held(caches.first_tokens(one, 3)[0]) == [0, 1, 2]


def test_a_state_is_not_cut() -> None:
    state = ArraysCache(1)
    state[0] = mx.ones((1, 2))
    with pytest.raises(Internal, match="was to be cut"):
        caches.trim([state], 1)
