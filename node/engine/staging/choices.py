"""Entries that an indexer of DeepSeek V4 chooses in a batch of rows, which have different numbers of them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from sealring.node.engine.caches.pools import PoolsRows


def choose_entries(
    indexer: Any, x: mx.array, q_residual: mx.array, rope: Any, cache: PoolsRows, offset: mx.array
) -> mx.array | None:
    """As mlx-vlm's `Indexer.__call__`, for one token of each row, x [rows, 1, width]. Returns the entries
    [rows, 1, index_topk], or None where every row attends to all of its own.

    A row with enough entries is chosen for in two steps, as alone: the best blocks by their means, then the
    best entries of these. The entries behind a row's last whole block are in none.
    """
    entries = indexer.compressor(x, cache, offset)
    counts, most = cache.counts, indexer.index_topk
    if entries.shape[1] <= most:
        return None
    rows, ends = len(counts), mx.array(counts)[:, None, None]
    queries = indexer.wq_b(q_residual).reshape(rows, 1, indexer.n_heads, indexer.head_dim)
    queries = rope(queries.transpose(0, 2, 1, 3), offset).astype(mx.float32)
    weights = indexer.weights_proj(x).astype(mx.float32) * (indexer.n_heads**-0.5)
    weights = weights.swapaxes(-1, -2)[..., None]

    def best(keys: mx.array, seen: mx.array, count: int) -> mx.array:
        scores = queries @ keys[:, None].swapaxes(-1, -2).astype(mx.float32)
        scores = (mx.maximum(scores, 0) * indexer.scale * weights).sum(axis=1)
        scores = mx.where(seen, scores, mx.finfo(mx.float32).min)
        return mx.argpartition(-scores, kth=count - 1, axis=-1)[..., :count]

    size, kept = indexer.index_block, indexer.index_keep
    stepwise = [size > 0 and size * kept >= most and count >= size * kept for count in counts]
    chosen = None
    if not all(stepwise):
        chosen = best(entries, mx.arange(entries.shape[1]) < ends, most)
    if any(stepwise):
        blocks = entries.shape[1] // size
        means = entries[:, : blocks * size].reshape(rows, blocks, size, -1).mean(axis=2)
        found = best(means, mx.arange(blocks) < ends // size, kept)
        places = (found[..., None] * size + mx.arange(size)).reshape(rows, 1, kept * size)
        candidates = mx.take_along_axis(entries, places.reshape(rows, -1, 1), axis=1)
        places = mx.take_along_axis(places, best(candidates, mx.array(True), most), axis=-1)
        chosen = places if chosen is None else mx.where(mx.array(stepwise)[:, None, None], places, chosen)
    return chosen
