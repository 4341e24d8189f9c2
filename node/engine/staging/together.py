"""Changes of models whose code in mlx-lm is for one row only, so that they compute a batch of rows.

Each function changes a model once. A row alone gets the result of mlx-lm's own code; in a batch each row has
its own positions and kept tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.node.engine.caches.apart import ApartRows
from sealring.node.engine.caches.chunked import ChunkedRowsCache
from sealring.node.engine.caches.latents import LatentRows
from sealring.node.engine.caches.pools import PoolsRows

from . import latents
from .choices import choose_entries
from .interception import Call, intercept_call


def deepseek_v4(model: nn.Module) -> None:
    """An indexer takes all rows to have as many entries as the longest."""

    def choose(original: Call, *args: Any) -> Any:
        *_, cache, _ = args
        if not isinstance(cache, PoolsRows):
            return original(*args)
        return choose_entries(original.__self__, *args)  # type: ignore[attr-defined]

    for layer in model.layers:
        if "indexer" in layer.attn:
            intercept_call(layer.attn.indexer, choose)


def deepseek_v41(model: nn.Module) -> None:
    """Positions, windows and compressed entries are those of one row: `latents` has them of several."""
    module = sys.modules[type(model).__module__]

    def call(original: Call, inputs: mx.array, cache: Any = None) -> Any:
        if cache is None or not isinstance(cache[0], LatentRows):
            return original(inputs, cache)
        return latents.run_layers(model.model, module, inputs, cache)

    def choose(original: Call, x: mx.array, q_residual: mx.array, **given: Any) -> Any:
        if not isinstance(given["start_pos"], mx.array):
            return original(x, q_residual, **given)
        return latents.choose_entries(original.__self__, module, x, q_residual, **given)  # type: ignore[attr-defined]

    def _compress(self: Any, x: mx.array, *, cache: Any, shared: Any, **given: Any) -> None:
        if isinstance(cache, LatentRows):
            latents.compress(self, module, x, cache, shared)
        else:
            super(type(self), self)._compress(x, cache=cache, shared=shared, **given)

    intercept_call(model.model, call)
    for layer in model.layers:
        attention = layer.self_attn
        _override(attention, _compress=_compress)
        if attention.is_index_source:
            intercept_call(attention.indexer, choose)


def llama4(model: nn.Module) -> None:
    """Chunks depend on numbers, and layers without rotary embeddings scale queries by their position."""
    inner = model.language_model.model
    scales: list[mx.array] = []

    def call(original: Call, inputs: mx.array, cache: Any = None) -> Any:
        if cache is None or not isinstance(cache[0], ChunkedRowsCache):
            return original(inputs, cache)
        for own in cache:
            if isinstance(own, ChunkedRowsCache):
                own.maybe_trim_front()
        tokens = inputs.shape[1]
        in_chunk, before = cache[0].make_mask(tokens), cache[3].make_mask(tokens)
        positions = cache[3].offset[:, None] + mx.arange(1, tokens + 1)
        h = inner.embed_tokens(inputs)
        with _scaled(inner, positions, scales):
            for index, (layer, own) in enumerate(zip(inner.layers, cache, strict=True)):
                h = layer(h, in_chunk if (index + 1) % 4 else before, cache=own)
        return inner.norm(h)

    def scale(original: Call, x: mx.array) -> Any:
        queries = original(x)
        return (queries * scales[-1]).astype(queries.dtype) if scales else queries

    intercept_call(inner, call)
    for layer in inner.layers:
        if not layer.self_attn.use_rope:
            intercept_call(layer.self_attn.q_proj, scale)


@contextlib.contextmanager
def _scaled(inner: nn.Module, positions: mx.array, scales: list[mx.array]) -> Iterator[None]:
    """Meanwhile scales [rows, tokens, 1] are applied, and mlx-lm's own, by one row's position, are not."""
    own = [layer.self_attn for layer in inner.layers if not layer.self_attn.use_rope]
    tuning = [attention.attn_temperature_tuning for attention in own]
    if any(tuning):
        first = own[0]
        by_position = mx.log(mx.floor(positions / first.floor_scale) + 1.0) * first.attn_scale + 1.0
        scales.append(by_position[..., None])
    try:
        for attention in own:
            attention.attn_temperature_tuning = 0
        yield
    finally:
        scales.clear()
        for attention, value in zip(own, tuning, strict=True):
            attention.attn_temperature_tuning = value


def longcat_flash(model: nn.Module) -> None:
    """N-grams: the last tokens are kept, of a short row fewer, and different widths do not merge. Here zeros
    stand before the first token, which is what mlx-lm's code takes to be there."""
    embeddings = getattr(model.model, "ngram_embeddings", None)
    if embeddings is None:
        return

    def call(original: Call, inputs: mx.array, cache: Any = None) -> Any:
        embedded = original(inputs, cache=cache)
        if cache is not None and cache[0].shape[-1] < embeddings.n - 1:
            cache[0] = mx.pad(cache[0], [(0, 0), (embeddings.n - 1 - cache[0].shape[-1], 0)])
        return embedded

    intercept_call(embeddings, call)


def minimax_m3(model: nn.Module) -> None:
    """Blocks of keys are cut over slots, which hold padding: here each row's begin at its first token."""
    for layer in model.layers:
        attention = layer.self_attn
        if attention.is_sparse_attn:
            _override(attention, _block_mask=_block_mask)


def _override(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Gives a module's methods other code, which finds its own by `super`."""
    plain = type(module)
    module.__class__ = type(plain.__name__, (plain,), {**methods, "__module__": plain.__module__})


def _block_mask(self: Any, x: mx.array, mask: Any, offset: Any, cache: Any) -> Any:
    """As mlx-lm's `Attention._block_mask`, with the keys of each row moved so that they begin in slot 0."""
    if not isinstance(offset, mx.array):
        return super(type(self), self)._block_mask(x, mask, offset, cache)
    (rows, tokens, _), heads, width = x.shape, self.index_n_heads, self.index_head_dim
    keys = self.index_k_norm(self.index_k_proj(x).reshape(rows, tokens, 1, width)).transpose(0, 2, 1, 3)
    keys, _ = cache.update_and_fetch(
        self.index_rope(keys, offset=offset), mx.zeros((rows, 1, tokens, 0), keys.dtype)
    )
    slots, size, topk = keys.shape[2], self.index_block_size, self.index_topk_blocks
    blocks = -(-slots // size)
    if topk >= blocks:
        return mask
    queries = self.index_q_norm(self.index_q_proj(x).reshape(rows, tokens, heads, width))
    queries = self.index_rope(queries.transpose(0, 2, 1, 3), offset=offset)
    padding = (slots - tokens - offset)[:, None, None, None]
    there = (mx.arange(slots) + padding) % slots  # [rows, 1, 1, slots]
    back = (mx.arange(slots) - padding) % slots
    scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
    scores = mx.take_along_axis(mx.where(mask, scores, -mx.inf), there, axis=-1)
    scores = mx.pad(scores, [(0, 0), (0, 0), (0, 0), (0, blocks * size - slots)], constant_values=-mx.inf)
    scores = scores.reshape(rows, heads, tokens, blocks, size).max(axis=-1)
    if self.index_local_blocks > 0:
        own = ((offset[:, None] + mx.arange(tokens)) // size)[:, None, :, None]
        ids = mx.arange(blocks)
        scores = mx.where((ids <= own) & (ids > own - self.index_local_blocks), mx.inf, scores)
    chosen = mx.argpartition(-scores, kth=topk - 1, axis=-1)[..., :topk]
    keep = mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), chosen, mx.array(True), axis=-1)
    keep = mx.take_along_axis(mx.repeat(keep, size, axis=-1)[..., :slots], back, axis=-1) & mask
    return mx.repeat(keep, self.num_attention_heads // heads, axis=1)


def qwen4_exp(model: nn.Module) -> None:
    """Blocks of keys begin at a row's first token, and their keys are kept: rows attend one after the other,
    each with its own cache. The products before and behind are made for all rows."""
    for layer in model.layers:
        if not layer.is_linear:
            _attend_by_row(layer.self_attn)


def _attend_by_row(attention: Any) -> None:
    before = [attention.q_proj, attention.k_proj, attention.v_proj, attention.indexer.index_qk_proj]
    behind, products = attention.o_proj, dict[int, mx.array]()

    def call(
        original: Call, x: mx.array, mask: Any = None, cache: Any = None, position_ids: Any = None
    ) -> Any:
        if not isinstance(cache, ApartRows):
            return original(x, mask=mask, cache=cache, position_ids=position_ids)
        made, outputs = [module(x) for module in before], []
        try:
            for row, own in enumerate(cache.rows):
                one = slice(row, row + 1)
                products.update({id(module): array[one] for module, array in zip(before, made, strict=True)})
                positions = position_ids[..., one, :]
                outputs.append(original(x[one], cache=own, position_ids=positions))
        finally:
            products.clear()
        return behind(mx.concatenate(outputs))

    intercept_call(attention, call)
    for module in before:

        def product(original: Call, x: mx.array, place: int = id(module)) -> Any:
            return products[place] if products else original(x)

        intercept_call(module, product)

    def output(original: Call, x: mx.array) -> Any:
        return x if products else original(x)

    intercept_call(behind, output)
