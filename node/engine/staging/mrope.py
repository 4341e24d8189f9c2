"""Rotary positions in three dimensions (M-RoPE; Qwen2-VL, arXiv:2409.12191, section 2.1).

A token has a position in time, height and width. Those of text are alike in all three and count up. The
tokens of an image begin behind the text before it; they have the frame, row and column that they stand for.
The text behind an image goes on behind its largest position. So a row's positions follow from where its
images are and how large they are, and behind its last image they are the token's index and a difference that
is negative mostly. Nothing of them is kept beside caches: keys in caches are turned already.

mlx-lm's models know positions in one dimension. For rows with images, their rotary embeddings are replaced by
one that takes three, with the operations of mlx-vlm's language models; other rows keep mlx-lm's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from sealring.mesh.errors import ModelError
from sealring.node.engine.staging.grid import Grid, has_three
from sealring.node.engine.staging.pictured import INTERLEAVED, pictured

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Positions:
    """Positions of the tokens of rows, in the places of a batch, of which some have images. Immutable."""

    def __init__(
        self, deltas: Sequence[int], seen: Sequence[bool], parts: npt.NDArray[np.int32] | None = None
    ) -> None:
        """`deltas` are added to the indices of tokens, and `seen` says which places have rows with images.

        A row alone has `parts`, [5, parts], texts and images by turns: the index of the first token, its
        position, height and width in tokens, and 1 for a text.
        """
        self.deltas = tuple(deltas)
        self._seen, self._parts = tuple(seen), parts

    @classmethod
    def of(cls, grids: Sequence[Grid]) -> Positions:
        """Those of one row with these images, rising."""
        import numpy as np

        parts, delta = [(0, 0, 1, 1, 1)], 0
        for grid in grids:
            parts.append((grid.begin, grid.begin + delta, grid.height, grid.width, 0))
            delta += max(grid.frames, grid.height, grid.width) - grid.tokens
            parts.append((grid.end, grid.end + delta, 1, 1, 1))
        return cls([delta], [True], np.array(parts, np.int32).T)

    @classmethod
    def together(cls, rows: Sequence[Positions | None]) -> Positions | None:
        """Those of rows that decode together, in this order; None if no row has images."""
        if len(rows) == 1 or not any(rows):
            return rows[0] if rows else None
        return cls([0 if one is None else one.deltas[0] for one in rows], [one is not None for one in rows])

    def row(self, place: int) -> Positions | None:
        """Those of the row in a place."""
        if len(self._seen) == 1:
            return self
        return Positions([self.deltas[place]], [True]) if self._seen[place] else None

    @property
    def seen(self) -> mx.array | None:
        """Which places have rows with images, bool [places]; None if all have."""
        return None if all(self._seen) else mx.array(self._seen)

    def images(self, begin: int, tokens: int) -> npt.NDArray[np.int32] | None:
        """The image to which each of `tokens` tokens from the index `begin` on belongs, int32 [tokens], as a
        number; -1 for text. None where all is text, or generated."""
        import numpy as np

        if self._parts is None:
            return None
        part = np.searchsorted(self._parts[0], np.arange(begin, begin + tokens), side="right") - 1
        found = np.where(self._parts[4][part] == 0, part, -1).astype(np.int32)
        return found if (found >= 0).any() else None

    def at(self, offset: int | mx.array, tokens: int) -> mx.array:
        """Positions of the next `tokens` tokens behind `offset` others, int32 [3, places, tokens]."""
        index = mx.array(offset, mx.int32).reshape(-1, 1) + mx.arange(tokens, dtype=mx.int32)
        if self._parts is None:
            found = index + mx.array(self.deltas, mx.int32)[:, None]
            return mx.broadcast_to(found[None], (3, *found.shape))
        parts = mx.array(self._parts)
        part = (index[..., None] >= parts[0]).sum(axis=-1) - 1
        begin, first, height, width, text = (mx.take(each, part) for each in parts)
        behind = index - begin
        frame, line, column = behind // (height * width), behind // width % height, behind % width
        inside = mx.stack([frame, mx.where(text, behind, line), mx.where(text, behind, column)])
        return (inside + first).astype(mx.int32)


class MRope:
    """The rotary embedding of one model for positions in three dimensions."""

    def __init__(self, rope: nn.RoPE, sections: Sequence[int], *, interleaved: bool) -> None:
        """`rope` is mlx-lm's, and `sections` the frequencies of each dimension."""
        count = rope.dims // 2
        if interleaved:
            turns = [number % 3 for number in range(count)]
            dimension = [one if at < 3 * sections[one] else 0 for at, one in enumerate(turns)]
        else:
            dimension = [one for one in range(3) for _ in range(sections[one])][:count]
        self._dimension = mx.array(dimension)
        self._frequencies = 1.0 / (rope.base ** (mx.arange(0, rope.dims, 2).astype(mx.float32) / rope.dims))
        self._pairs = rope.traditional
        turned = _turned_in_pairs if self._pairs else _turned
        self._turned = mx.compile(turned) if interleaved else turned

    def angles(self, positions: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Cosines and sines, [rows, 1, tokens, dims], for positions [3, rows, tokens]."""
        chosen = mx.take(positions, self._dimension, axis=0).transpose(1, 2, 0)
        half = chosen.astype(mx.float32) * self._frequencies
        both = mx.repeat(half, 2, axis=-1) if self._pairs else mx.concatenate([half, half], axis=-1)
        both = both[:, None]
        return mx.cos(both).astype(dtype), mx.sin(both).astype(dtype)

    def __call__(self, array: mx.array, angles: tuple[mx.array, mx.array]) -> mx.array:
        """Queries or keys, [rows, heads, tokens, width], turned by these angles."""
        return self._turned(array, *angles)


def _turned(array: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """A number is turned with the one that is half of the dimensions further."""
    half = cos.shape[-1] // 2
    across = mx.concatenate([-array[..., half : 2 * half], array[..., :half]], axis=-1)
    return _combined(array, across, cos, sin)


def _turned_in_pairs(array: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """A number is turned with its neighbour (`traditional` in MLX)."""
    dims = cos.shape[-1]
    across = mx.stack([-array[..., 1:dims:2], array[..., :dims:2]], axis=-1).flatten(-2)
    return _combined(array, across, cos, sin)


def _combined(array: mx.array, across: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    dims = cos.shape[-1]
    part, rest = array[..., :dims], array[..., dims:]
    turned = (part * cos + across * sin).astype(array.dtype)
    return mx.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def mrope_of(model: Any, model_type: str, rope: nn.Module) -> MRope:
    """The embedding of a model that has positions in three dimensions; `rope` is one layer's.

    Raises ModelError (VISION_UNSUPPORTED).
    """
    sections = _sections(model, model_type)
    if sections is None or not isinstance(rope, nn.RoPE) or rope.scale != 1:
        raise ModelError(
            f"this release has no positions of images for {model_type} models with this configuration",
            hint="send prompts without images",
            reason="VISION_UNSUPPORTED",
        )
    return MRope(rope, sections, interleaved=pictured(model_type).rope == INTERLEAVED)


def _sections(model: Any, model_type: str) -> Sequence[int] | None:
    """The frequencies of each dimension, from the configuration; None if it has none."""
    if not has_three(model_type):
        return None
    text = getattr(getattr(model, "args", None), "text_config", None)
    if not isinstance(text, Mapping):
        return None
    for name in ("rope_parameters", "rope_scaling"):
        found = (text.get(name) or {}).get("mrope_section")
        if isinstance(found, list) and len(found) == 3:
            return found
    return None
