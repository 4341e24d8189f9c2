"""Entries of groups of tokens are the same however a row was cut into chunks, also where groups overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, KVCache

from sealring.node.engine import caches, mlx_lm_import
from sealring.node.engine.caches.pools import Pools, Unfilled

RATIO, WIDTH, TOKENS = 4, 6, 43


def entries_of(cache: Any, tokens: mx.array, sizes: Sequence[int], overlaps: bool) -> mx.array:
    """The entries of a row, [1, entries, width], as DeepSeek V4 makes them: of a group and the one before."""
    made = mx.zeros((1, 0, WIDTH))
    place = 0
    for size in [*sizes, TOKENS]:
        part = tokens[:, place : place + size]
        if not part.shape[1]:
            break
        ready, gates, first = cache.accumulate_windows(part, part * 2, place)
        groups = ready.reshape(1, -1, RATIO, WIDTH)
        new = groups.sum(axis=2) * gates.reshape(groups.shape).max(axis=2)
        if groups.shape[1]:
            assert mx.array_equal(ready[:, 0], tokens[:, first])
            before = mx.concatenate([mx.zeros((1, 1, WIDTH)), groups[:, :-1, -1]], axis=1)
            new = new + before if overlaps else new
        made = cache.update_and_fetch(new)
        place += part.shape[1]
    return made


def some_tokens() -> mx.array:
    return mx.random.normal((1, TOKENS, WIDTH), key=mx.random.key(3))


@given(st.lists(st.integers(1, 11), max_size=20), st.booleans())
def test_entries_do_not_depend_on_chunks(sizes: list[int], overlaps: bool) -> None:
    tokens = some_tokens()
    at_once = entries_of(Pools(RATIO, overlaps=overlaps), tokens, [], overlaps)
    cache = Pools(RATIO, overlaps=overlaps)
    in_chunks = entries_of(cache, tokens, sizes, overlaps)
    assert at_once.shape == (1, TOKENS // RATIO, WIDTH)
    assert mx.array_equal(at_once, in_chunks)
    assert cache.offset == TOKENS // RATIO
    assert cache.pending[0].shape[1] == TOKENS % RATIO
    assert len(cache.before) == 2 * overlaps


@pytest.mark.parametrize("sizes", [[], [3, 1, 1, 1, 9, 2], [1] * 20])
def test_without_overlap_they_are_those_of_mlx_vlm(sizes: list[int]) -> None:
    mlx_lm_import.register("mlx_vlm")
    from mlx_vlm.models.cache import PoolingCache

    own, theirs = Pools(RATIO), PoolingCache(RATIO)
    found = [entries_of(cache, some_tokens(), sizes, False) for cache in (own, theirs)]
    assert mx.array_equal(*found)
    assert (own.offset, own.size()) == (theirs.offset, theirs.size())
    for tokens, offset in ((1, TOKENS), (5, TOKENS - 5)):
        masks = [cache.make_mask(tokens, offset) for cache in (own, theirs)]
        assert (masks[0] is None) == (masks[1] is None) == (tokens == 1)
        assert masks[0] is None or mx.array_equal(*masks)


@pytest.mark.parametrize("further", [(), (Unfilled,), (lambda: Pools(RATIO),)])
def test_rows_with_groups_or_unfilled_caches_take_no_place_of_another(further: tuple[Any, ...]) -> None:
    """Stages of GLM 5.3 hand slots on: rows have the same in all of them, whatever caches a stage has."""

    def row(tokens: int) -> list[Any]:
        keys = KVCache()
        keys.update_and_fetch(mx.ones((1, 1, tokens, 8)), mx.ones((1, 1, tokens, 8)))
        return [CacheList(keys, *(make() for make in further))]

    lane = caches.merge([row(5), row(8)])
    assert caches.holds(lane, [1], [row(3)], spare=1 << 20) == (not further)
