"""Rows of DeepSeek V4.1 in a batch: what each has in its window and compressed, and attention over that.

mlx-lm's cache has one position for all its rows. Here each row has its own, which the host knows, and gets
one token in a step. Rows complete groups of tokens, and so entries, at different steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

_ROOM = 64
"""Entries that a batch makes room for at once."""

ENTRIES = ("compress_kv", "index_k")
_PENDING = ("pending_kv", "pending_gate")


class Ragged:
    """Entries [rows, room, width], of each row as many as `counts` says, from the front."""

    def __init__(self) -> None:
        self._array: mx.array | None = None
        self.counts: list[int] = []

    def recompose(self, keep: Sequence[int], rows: Sequence[mx.array | None]) -> None:
        """Keeps the rows with these indices, in this order, and appends rows [1, entries, width]."""
        held = [self.row(index) for index in keep] + list(rows)
        self.counts = [0 if one is None else one.shape[1] for one in held]
        filled = [one for one in held if one is not None]
        self._array = None
        if filled:
            room = _with_room(max(self.counts))
            self._array = mx.concatenate(
                [
                    mx.zeros((1, room, filled[0].shape[2]), filled[0].dtype)
                    if one is None
                    else mx.pad(one, [(0, 0), (0, room - one.shape[1]), (0, 0)])
                    for one in held
                ]
            )

    def row(self, index: int) -> mx.array | None:
        """A row's entries [1, entries, width]; None where there are none."""
        if self._array is None or not self.counts[index]:
            return None
        return mx.contiguous(self._array[index : index + 1, : self.counts[index]])

    def add(self, rows: list[int], entries: mx.array) -> None:
        """One more entry for each of these rows, [len(rows), width]."""
        room = _with_room(1 + max(self.counts))
        if self._array is None:
            self._array = mx.zeros((len(self.counts), room, entries.shape[-1]), entries.dtype)
        elif room > self._array.shape[1]:
            self._array = mx.pad(self._array, [(0, 0), (0, room - self._array.shape[1]), (0, 0)])
        self._array[mx.array(rows), mx.array([self.counts[row] for row in rows])] = entries
        for row in rows:
            self.counts[row] += 1

    def take(self, rows: list[int]) -> mx.array:
        """The entries of rows that have the same number, [len(rows), entries, width]; they have none then."""
        assert self._array is not None
        taken = self._array[mx.array(rows), : self.counts[rows[0]]]
        for row in rows:
            self.counts[row] = 0
        return taken

    def held(self) -> mx.array | None:
        """Entries as long as the longest row; those behind shorter rows' ends have no meaning."""
        longest = max(self.counts, default=0)
        return self._array[:, :longest] if self._array is not None and longest else None

    @property
    def arrays(self) -> list[mx.array]:
        return [] if self._array is None else [self._array]


def _with_room(entries: int) -> int:
    return -(-entries // _ROOM) * _ROOM


class LatentRows:
    """The content of mlx-lm's `LayerCache` for several rows. Windows end with the newest token, and shorter
    ones begin later."""

    def __init__(self, kind: Any, window_size: int) -> None:
        """`kind` is mlx-lm's class."""
        self._kind = kind
        self._window_size = window_size
        self._window: mx.array | None = None
        self.offsets: list[int] = []
        """Tokens of each row so far."""
        self.ragged = {name: Ragged() for name in (*ENTRIES, *_PENDING)}

    @classmethod
    def merge(cls, rows: Sequence[Any]) -> Self:
        """A batch of rows."""
        batch = cls(type(rows[0]), rows[0].window_size)
        batch.recompose([], rows)
        return batch

    def recompose(self, keep: Sequence[int], rows: Sequence[Any]) -> None:
        """Keeps the rows with these indices, in this order, and appends rows."""
        windows = [self._row_window(index) for index in keep] + [row.window for row in rows]
        self.offsets = [self.offsets[index] for index in keep] + [row.offset for row in rows]
        for name, ragged in self.ragged.items():
            ragged.recompose(keep, [_if_any(getattr(row, name)) for row in rows])
        filled = [window for window in windows if window is not None]
        self._window = None
        if filled:
            slots, width = max(window.shape[1] for window in filled), filled[0].shape[2]
            nothing = mx.zeros((1, 0, width), filled[0].dtype)
            own = [nothing if window is None else window for window in windows]
            self._window = mx.concatenate(
                [mx.pad(one, [(0, 0), (slots - one.shape[1], 0), (0, 0)]) for one in own]
            )

    def extract(self, index: int) -> Any:
        """A copy of one row, as mlx-lm's cache of one."""
        row = self._kind(self._window_size)
        row.offset, row.window = self.offsets[index], self._row_window(index)
        for name, ragged in self.ragged.items():
            setattr(row, name, ragged.row(index))
        return row

    def update_window(self, kv: mx.array) -> mx.array:
        """Appends a token of each row, [rows, 1, width], and returns the window with it."""
        window = kv if self._window is None else mx.concatenate([self._window, kv], axis=1)
        self._window = window[:, -self._window_size :]
        self.offsets = [offset + 1 for offset in self.offsets]
        return window

    def window_indices(self) -> mx.array:
        """The slots that each row's next token attends to in what `update_window` will return, -1 for none:
        [rows, 1, slots]."""
        last = 0 if self._window is None else self._window.shape[1]
        width = min(self._window_size, last + 1)
        firsts = [max(last - width + 1, last - length) for length in self._lengths()]
        slots = mx.array(firsts)[:, None, None] + mx.arange(width)
        return mx.where(slots > last, -1, slots)

    @property
    def state(self) -> list[mx.array]:
        """All its arrays."""
        held = [] if self._window is None else [self._window]
        return held + [array for ragged in self.ragged.values() for array in ragged.arrays]

    def _lengths(self) -> list[int]:
        return [min(offset, self._window_size) for offset in self.offsets]

    def _row_window(self, index: int) -> mx.array | None:
        length = self._lengths()[index]
        if self._window is None or not length:
            return None
        return mx.contiguous(self._window[index : index + 1, self._window.shape[1] - length :])


def _if_any(entries: mx.array | None) -> mx.array | None:
    return entries if entries is not None and entries.shape[1] else None


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
        kv, gate = (cache.ragged[name] for name in _PENDING)
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
