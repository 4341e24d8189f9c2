"""The dict that DeepSeek V4.1's layers share, as tensors of a stage state.

Its sparse attention compresses groups of tokens into entries, chooses entries by an index of keys, and some
layers make what later ones read: `compress_kv` and `index_k` (an entry for each group that is complete),
`topk_idx` (the entries that a token attends to) and `candidates` (the blocks of entries to choose from). All
of them grow with the row, while a stage state is as wide for every token. So an entry travels in the place of
the token that completes its group, chosen entries with -1 for none, and blocks by their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from sealring.node.engine.caches.latents import ENTRIES, LatentRows

SHARED = (*ENTRIES, "topk_idx", "candidates")


@dataclass(frozen=True)
class Step:
    """The tokens of each row from `starts` on, in front of one layer."""

    args: Any
    """The model's arguments, mlx-lm's `ModelArgs`."""
    crossing: dict[str, int]
    """Shared tensors that layers from here on read, each with the earlier layer that makes it."""
    keys: dict[str, int]
    """The number of keys that each of the two indexers chooses from."""
    starts: tuple[int, ...]
    shared: dict[str, mx.array | None]
    shape: tuple[int, int]
    """Rows and tokens."""

    def to_wire(self, name: str) -> mx.array | None:
        """The tensor [rows, tokens, width] that is handed on; None if it is not."""
        if name not in self.crossing:
            return None
        held = self.shared.get(name)
        if name in ENTRIES:
            width = self.args.head_dim if name == "compress_kv" else self.args.index_head_dim
            wire = mx.zeros((*self.shape, width), mx.float32)
            if places := self._completed(name):
                assert held is not None
                rows, tokens, entries = map(mx.array, zip(*places, strict=True))
                wire[rows, tokens] = held[rows, entries]
            return wire
        width = self.args.index_topk if name == "topk_idx" else self.args.candidate_topk_blocks
        if held is None:
            return mx.full((*self.shape, width), -1, mx.int32)
        if name == "candidates":
            held = held[..., :: self.args.candidate_block_size]
            held = -mx.sort(-mx.where(held, mx.arange(held.shape[-1]), -1), axis=-1)[..., :width]
        missing = width - held.shape[-1]
        return mx.pad(held.astype(mx.int32), [(0, 0), (0, 0), (0, missing)], constant_values=-1)

    def from_wire(self, name: str, wire: mx.array, cache: Any) -> None:
        """Puts what arrived into `shared`. Earlier entries are in the first layer's cache, which has no use
        of its own for that place: else they would not cross."""
        if name in ENTRIES:
            places = self._completed(name)
            new = wire[tuple(map(mx.array, list(zip(*places, strict=True))[:2]))] if places else None
            self.shared[name] = self._kept(name, [row for row, _, _ in places], new, cache)
            return
        keys = self.keys[name]
        if name == "topk_idx":
            self.shared[name] = wire[..., : min(self.args.index_topk, keys)]
        elif keys:
            block = self.args.candidate_block_size
            blocks = (keys + block - 1) // block
            chosen = mx.where(wire < 0, blocks, wire)
            flags = mx.zeros((*self.shape, blocks + 1), mx.bool_)
            flags = mx.put_along_axis(flags, chosen, mx.array(True), axis=-1)[..., :blocks]
            self.shared[name] = mx.repeat(flags, block, axis=-1)[..., :keys]
        else:
            self.shared[name] = None

    def _kept(self, name: str, rows: list[int], new: mx.array | None, cache: Any) -> mx.array | None:
        """All entries so far, with the new ones [len(rows), width]."""
        if isinstance(cache, LatentRows):
            ragged = cache.ragged[name]
            if new is not None:
                ragged.add(rows, new)
            return ragged.held()
        held: mx.array | None = getattr(cache, name)
        if new is not None:
            new = new.reshape(self.shape[0], -1, new.shape[-1])
            held = new if held is None else mx.concatenate([held, new], axis=1)
            setattr(cache, name, held)
        return held

    def _completed(self, name: str) -> list[tuple[int, int, int]]:
        """The tokens of this step that complete a group: row, place among the tokens, the group's number."""
        ratio = int(self.args.compress_ratios[self.crossing[name]])
        return [
            (row, token, (start + token) // ratio)
            for row, start in enumerate(self.starts)
            for token in range((start // ratio + 1) * ratio - 1 - start, self.shape[1], ratio)
        ]
