"""Attention of DeepSeek V4.1 over a batch of rows, of which each has its own positions and entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from sealring.node.engine.caches.latents import PENDING, LatentRows


class SharedOfRows(dict[str, Any]):
    """The dict that layers share in a step of several rows, with the tokens that each row had before."""

    def __init__(self, starts: Sequence[int]) -> None:
        super().__init__()
        self.starts = tuple(starts)


def run_layers(model: Any, module: Any, inputs: mx.array, cache: Sequence[LatentRows]) -> mx.array:
    """As mlx-lm's `TextModel.__call__`, for one token of each row."""
    (rows, tokens), args = inputs.shape, model.args
    assert tokens == 1
    shared = SharedOfRows(cache[0].offsets)
    start_pos, window_idx = mx.array(shared.starts), cache[0].window_indices()
    embedded = model.embed_tokens(inputs)
    streams = mx.broadcast_to(embedded[:, :, None, :], (rows, 1, args.hc_mult, args.hidden_size))
    pre_mix = mx.zeros((rows, 1, args.hc_mult), mx.float32)
    pre_mix[..., 0] = 1.0
    for layer, own in zip(model.pipeline_layers, cache, strict=True):
        streams, pre_mix = layer(
            streams, pre_mix, start_pos=start_pos, window_idx=window_idx, cache=own, shared=shared
        )
    out: mx.array = model.norm(module._collapse(streams, pre_mix))
    return out


def compress(attention: Any, module: Any, x: mx.array, cache: LatentRows, shared: dict[str, Any]) -> None:
    """As mlx-lm's `Attention._compress`: the tokens x [rows, 1, width] are in the window already."""
    compressor, ratio = attention.compressor, attention.ratio
    done, latent = list(range(len(cache.offsets))), x
    if ratio == 1:
        latent = compressor.kv_norm(compressor.kv_proj(x))
    else:
        h = x.astype(mx.float32)
        kv, gate = (cache.ragged[name] for name in PENDING)
        kv.add(done, compressor.kv_proj(h)[:, 0])
        gate.add(done, compressor.gate_proj(h)[:, 0])
        done = [row for row, count in enumerate(kv.counts) if count == ratio]
        if done:
            pooled = mx.sum(kv.take(done) * mx.softmax(gate.take(done), axis=1), axis=1, keepdims=True)
            latent = compressor.kv_norm(pooled.astype(x.dtype))
    if done:
        groups = mx.array([(cache.offsets[row] - 1) // ratio for row in done])

        def turn(entry: mx.array) -> mx.array:
            at: dict[str, Any] = {"rope_dim": attention.rope_dim, "offset": groups, "scale": ratio}
            turned: mx.array = module._apply_rope(entry, attention.rope, **at)
            return turned

        entry = module._fake_quant_fp4(turn(latent), block_size=16, e4m3_scale=True)
        cache.ragged["compress_kv"].add(done, entry[:, 0])
        if attention.is_index_source:
            indexer = attention.indexer
            key = module._fake_quant_fp4(turn(indexer.k_norm(indexer.k_proj(latent))), block_size=32)
            cache.ragged["index_k"].add(done, key[:, 0])
    shared["compress_kv"] = cache.ragged["compress_kv"].held()
    if attention.is_index_source:
        shared["index_k"] = cache.ragged["index_k"].held()


def choose_entries(
    indexer: Any,
    module: Any,
    x: mx.array,
    q_residual: mx.array,
    *,
    index_k: mx.array | None,
    candidates: mx.array | None,
    rope: Any,
    start_pos: mx.array,
) -> tuple[mx.array, mx.array | None]:
    """As mlx-lm's `Indexer.__call__`, where rows see different numbers of entries."""
    rows = x.shape[0]
    if index_k is None:
        return mx.zeros((rows, 1, 0), mx.int32), candidates
    q = indexer.q_b_proj(q_residual).reshape(rows, 1, indexer.num_heads, indexer.head_dim)
    q = module._apply_rope(q, rope, rope_dim=indexer.rope_dim, offset=start_pos)
    q = module._fake_quant_fp4(q, block_size=32).astype(mx.float32)
    weights = indexer.weights_proj(x).astype(mx.float32) * (indexer.num_heads**-0.5)
    scores = mx.matmul(q, index_k.astype(mx.float32)[:, None].swapaxes(-1, -2))
    scores = mx.sum(mx.maximum(scores, 0.0) * (indexer.head_dim**-0.5) * weights[..., None], axis=2)
    entries = index_k.shape[1]
    seen = ((start_pos + 1) // indexer.ratio)[:, None, None]
    scores = mx.where(mx.arange(entries) < seen, scores, -mx.inf)
    if indexer.is_candidate_source and indexer.candidate_topk_blocks > 0:
        candidates = _candidates(indexer, scores, seen)
    elif candidates is not None:
        scores = mx.where(candidates, scores, -mx.inf)
    most = min(indexer.index_topk, entries)
    chosen = mx.argpartition(-scores, most - 1, axis=-1)[..., :most].astype(mx.int32)
    return mx.where(chosen < seen, chosen, -1), candidates


def _candidates(indexer: Any, scores: mx.array, seen: mx.array) -> mx.array:
    """The best blocks of entries, each row's newest always among them: flags by entry."""
    (rows, tokens, entries), block = scores.shape, indexer.candidate_block_size
    padded = mx.pad(scores, [(0, 0), (0, 0), (0, -entries % block)], constant_values=-mx.inf)
    best = padded.reshape(rows, tokens, -1, block).max(axis=-1)
    newest = mx.where(seen > 0, (seen - 1) // block, -1)
    best = mx.where(mx.arange(best.shape[-1]) == newest, mx.inf, best)
    most = min(indexer.candidate_topk_blocks, best.shape[-1])
    chosen = mx.argpartition(-best, most - 1, axis=-1)[..., :most]
    reachable = mx.take_along_axis(best, chosen, axis=-1) > -mx.inf
    flags = mx.put_along_axis(mx.zeros(best.shape, mx.bool_), chosen, reachable, axis=-1)
    return mx.repeat(flags, block, axis=-1)[..., :entries]
