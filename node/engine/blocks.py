"""The arrays of kept caches as the bytes of blocks on disk, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from sealring.node.engine.staging import ShardSpec, Stage
from sealring.node.engine.staging.caches import Cache, parts_of
from sealring.node.engine.staging.rows import QuantizedRowCache
from sealring.node.engine.weights import weight_files


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of keys or values: [1, heads, tokens, width]."""

    heads: int
    width: int
    dtype: str
    item: int
    """Bytes of an element."""

    def bytes(self, tokens: int) -> int:
        return self.heads * tokens * self.width * self.item


@dataclass(frozen=True, slots=True)
class Layout:
    """The arrays of a stage's caches, in order, and all else that their bytes depend on."""

    leaves: tuple[Leaf, ...]
    described: str

    @property
    def digest(self) -> bytes:
        """A hash of all that the bytes depend on: part of the key of the blocks."""
        return hashlib.sha256(self.described.encode()).digest()

    def bytes(self, tokens: int) -> int:
        """Bytes of a number of tokens."""
        return sum(leaf.bytes(tokens) for leaf in self.leaves)

    def content(self, arrays: Sequence[np.ndarray[Any, Any]], first: int, end: int) -> memoryview:
        """The tokens [first, end) of arrays of bytes, [heads, tokens, width in bytes] each."""
        content, at = np.empty(self.bytes(end - first), np.uint8).data, 0
        for leaf, array in zip(self.leaves, arrays, strict=True):
            shape = (leaf.heads, end - first, leaf.width * leaf.item)
            size = leaf.bytes(end - first)
            np.copyto(np.frombuffer(content, np.uint8, size, at).reshape(shape), array[:, first:end])
            at += size
        return content

    def views(self, cache: Cache) -> list[mx.array]:
        """The bytes of all arrays of one row's cache that have any, to be evaluated. Compute thread."""
        arrays = [array for part in _parts(cache) for array in _leaves(part)]
        return [mx.contiguous(array).view(mx.uint8) for array in arrays if array.size]

    def bytes_of(self, views: Sequence[mx.array], tokens: int) -> list[np.ndarray[Any, Any]]:
        """The bytes of `views` as `content` takes them, without a copy. Waits for the device; any thread."""
        filled = iter(views)
        return [
            np.array(next(filled), copy=False)[0]
            if leaf.bytes(1)
            else np.zeros((leaf.heads, tokens, 0), np.uint8)
            for leaf in self.leaves
        ]

    def arrays(self, content: memoryview, tokens: int) -> list[mx.array]:
        """The arrays of a block as bytes, [1, heads, tokens, width in bytes]. Any thread may: it needs no
        stream."""
        found, at = [], 0
        for leaf in self.leaves:
            size = leaf.bytes(tokens)
            words = np.frombuffer(content, np.uint8, size, at)
            found.append(mx.array(words.reshape(1, leaf.heads, tokens, leaf.width * leaf.item)))
            at += size
        return found

    def fill(self, cache: Cache, blocks: Sequence[list[mx.array]], tokens: int) -> None:
        """Puts blocks, one behind the other, into an empty cache of one row. Lazy; compute thread."""
        joined = []
        for leaf, pieces in zip(self.leaves, zip(*blocks, strict=True), strict=True):
            dtype = getattr(mx, leaf.dtype)
            if leaf.bytes(1):
                joined.append(mx.concatenate(list(pieces), axis=2).view(dtype))
            else:
                joined.append(mx.zeros((1, leaf.heads, tokens, leaf.width), dtype))
        arrays = iter(joined)
        for part in _parts(cache):
            if isinstance(part, QuantizedRowCache):
                part.keys = tuple(next(arrays) for _ in range(3))
                part.values = tuple(next(arrays) for _ in range(3))
            else:
                part.keys, part.values = next(arrays), next(arrays)
            part.offset = tokens


def provenance(path: Path) -> str:
    """What computes caches with the weights of a model's folder: MLX, mlx-lm and the weights, by the times of
    their files. The model's digest does not cover the contents of weights, which may be replaced by others of
    the same shapes. Raises ModelError."""
    from mlx_lm._version import __version__ as mlx_lm_version

    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(path)]
    return repr((mx.__version__, mlx_lm_version, files))  # type: ignore[attr-defined]


def layout_of(stage: Stage, computed_by: str) -> Layout | None:
    """The layout of a stage's caches; None for caches that are not stored. For the compute thread.
    `computed_by` is its `provenance`.

    Those of a tensor ring are not: a rank cannot compute alone, and its caches are parts of every layer.
    """
    if isinstance(stage.spec, ShardSpec):
        return None
    cache = stage.make_cache()
    parts = _parts(cache)
    if any(type(part) not in _kinds() for part in parts):
        return None
    stage([mx.zeros((1, 1, *each.tail), getattr(mx, each.dtype)) for each in stage.spec.receives], cache)
    leaves: list[Leaf] = []
    for part in parts:
        for array in _leaves(part):
            if array.ndim != 4 or array.shape[0] != 1:
                return None
            name = str(array.dtype).removeprefix("mlx.core.")
            leaves.append(Leaf(array.shape[1], array.shape[3], name, array.dtype.size))
    kinds = [
        (type(part).__name__, getattr(part, "group_size", 0), getattr(part, "bits", 0), len(_leaves(part)))
        for part in parts
    ]
    layout = Layout(tuple(leaves), repr((computed_by, stage.spec.model_type, kinds, leaves)))
    return layout if layout.bytes(1) else None


def _kinds() -> tuple[type, ...]:
    """Caches that are nothing but keys and values, one token behind the other; not what derives from them."""
    from mlx_lm.models.cache import KVCache  # whose way in `staging.rows` has prepared

    return KVCache, QuantizedRowCache


def _parts(cache: Cache) -> list[Any]:
    return [part for entry in cache for part in parts_of(entry)]


def _leaves(part: Any) -> list[mx.array]:
    if part.keys is None:
        return []
    return [array for _, array in tree_flatten([part.keys, part.values])]
