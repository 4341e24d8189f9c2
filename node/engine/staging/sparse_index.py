"""What DeepSeek V4.1's layers share, as tensors of a stage state.

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

SHARED = ("compress_kv", "index_k", "topk_idx", "candidates")
_ENTRIES = ("compress_kv", "index_k")


@dataclass(frozen=True)
class Step:
    """The tokens from `start` on of one row, in front of one layer."""

    args: Any
    """The model's arguments, mlx-lm's `ModelArgs`."""
    crossing: dict[str, int]
    """Of what is shared, what layers from here on read, and the earlier layer that makes it."""
    keys: dict[str, int]
    """Of the two that choose, the keys that there are to choose from."""
    start: int
    shared: dict[str, mx.array | None]
    shape: tuple[int, int]
    """Rows and tokens."""

    def to_wire(self, name: str) -> mx.array | None:
        """The tensor [rows, tokens, width] that is handed on; None if it is not."""
        if name not in self.crossing:
            return None
        held = self.shared.get(name)
        if name in _ENTRIES:
            width = self.args.head_dim if name == "compress_kv" else self.args.index_head_dim
            wire = mx.zeros((*self.shape, width), mx.float32)
            first, ratio = self._first_completed(name)
            if first < self.shape[1]:
                assert held is not None
                wire[:, first::ratio] = held[:, held.shape[1] - len(range(first, self.shape[1], ratio)) :]
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
        if name in _ENTRIES:
            first, ratio = self._first_completed(name)
            held = getattr(cache, name)
            if first < self.shape[1]:
                new = wire[:, first::ratio]
                held = new if held is None else mx.concatenate([held, new], axis=1)
                setattr(cache, name, held)
            self.shared[name] = held
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

    def _first_completed(self, name: str) -> tuple[int, int]:
        """The first of the step's tokens that completes a group, and the tokens of a group."""
        ratio = int(self.args.compress_ratios[self.crossing[name]])
        return (self.start // ratio + 1) * ratio - 1 - self.start, ratio
