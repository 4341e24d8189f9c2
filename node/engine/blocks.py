"""The arrays of kept caches as the bytes of blocks on disk, and back.

A block has the keys and values of some tokens. Caches that cannot be cut, windows and recurrent states, are
in a *snapshot*: it is of use at its own length only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from sealring.node.computing import versions
from sealring.node.engine.adapters import adapter_of, tensors_of
from sealring.node.engine.caches import Cache, kinds
from sealring.node.engine.caches.kind import Snapshot
from sealring.node.engine.staging import ShardSpec, Stage
from sealring.node.engine.weights import weight_files
from sealring.node.models.folders import FolderState
from sealring.node.models.kept import note_of
from sealring.node.models.manifest import ADAPTER_CONFIG
from sealring.node.stored.places import LayerBytes, StageTable


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
class Held:
    """One array of a snapshot: a state, or the last tokens of a window, [1, heads, tokens, width]."""

    shape: tuple[int, ...]
    """After the first token of a row."""
    dtype: str
    item: int
    window: int = 0
    """The most tokens; 0 for a state."""

    def shape_at(self, tokens: int) -> tuple[int, ...]:
        """The shape after this many tokens of a row."""
        if not self.window:
            return self.shape
        batch, heads, _, width = self.shape
        return batch, heads, min(tokens, self.window), width

    def bytes(self, tokens: int) -> int:
        return math.prod(self.shape_at(tokens)) * self.item


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The arrays of a stage's caches, in order, and all else that their bytes depend on.

    `leaves` are of the caches that can be cut, `held` of the others. `by_layer` has the bytes of each layer,
    and those behind the last; it is empty where caches are not those of one layer each. `places` are those of
    the caches in a row's.
    """

    leaves: tuple[Leaf, ...]
    held: tuple[Held, ...]
    described: str
    computed_by: str
    places: tuple[int, ...]
    by_layer: tuple[LayerBytes, ...] = ()

    @property
    def digest(self) -> bytes:
        """A hash of all that the bytes depend on: part of the key of the blocks."""
        return hashlib.sha256(self.described.encode()).digest()

    @property
    def origin(self) -> bytes:
        """A hash of what computes the caches, whatever the layers."""
        return hashlib.sha256(self.computed_by.encode()).digest()

    @property
    def table(self) -> StageTable | None:
        """The table of the stage's files; None where they cannot be cut by layers."""
        return StageTable(self.digest, self.by_layer[:-1], self.by_layer[-1]) if self.by_layer else None

    def bytes(self, tokens: int) -> int:
        """Bytes of a block of this many tokens."""
        return sum(leaf.bytes(tokens) for leaf in self.leaves)

    def snapshot_bytes(self, tokens: int) -> int:
        """Bytes of a snapshot after this many tokens of a row."""
        return sum(each.bytes(tokens) for each in self.held)

    @property
    def snapshots(self) -> bool:
        """Whether there is anything in one: windows and states of other stages' layers have no bytes here."""
        return bool(self.snapshot_bytes(1))

    def content(self, arrays: Sequence[np.ndarray[Any, Any]], first: int, end: int) -> memoryview:
        """The tokens [first, end) of arrays of bytes, [heads, tokens, width in bytes] each."""
        content, at = np.empty(self.bytes(end - first), np.uint8).data, 0
        for leaf, array in zip(self.leaves, arrays, strict=True):
            shape = (leaf.heads, end - first, leaf.width * leaf.item)
            size = leaf.bytes(end - first)
            np.copyto(np.frombuffer(content, np.uint8, size, at).reshape(shape), array[:, first:end])
            at += size
        return content

    def of_row(self, row: Cache) -> Cache:
        """The caches of a row's that have this layout, in its order."""
        return [row[place] for place in self.places]

    def views(self, cache: Cache, first: int, end: int) -> list[mx.array]:
        """The bytes of the tokens [first, end) of one row's cache, of all arrays that have any; to be
        evaluated. Compute thread."""
        parts = (array[..., first:end, :] for array in _leaves(cache))
        return [mx.contiguous(part).view(mx.uint8) for part in parts if part.size]

    def snapshot(self, cache: Cache, tokens: int) -> list[mx.array] | None:
        """As `views`, of the caches that cannot be cut, after `tokens` tokens of the row. Compute thread.

        None where the row has another number of tokens, or arrays of another shape.
        """
        arrays: list[mx.array] = []
        for part, kind in kinds(cache):
            if kind.cuts:
                continue
            if getattr(part, "offset", tokens) != tokens:
                return None
            arrays += _arrays(kind.snapshot(part))
        found = [(array.shape, _name(array)) for array in arrays]
        if found != [(each.shape_at(tokens), each.dtype) for each in self.held]:
            return None
        return [mx.contiguous(array).view(mx.uint8) for array in arrays if array.size]

    def snapshot_content(self, views: Sequence[mx.array], tokens: int) -> memoryview:
        """The bytes of a `snapshot`. Waits for the device; any thread."""
        content, at = np.empty(self.snapshot_bytes(tokens), np.uint8), 0
        for view in views:
            np.copyto(content[at : at + view.size], np.array(view, copy=False).reshape(-1))
            at += view.size
        return content.data

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

    def snapshot_arrays(self, content: memoryview, tokens: int) -> list[mx.array]:
        """As `arrays`, of a snapshot."""
        found, at = [], 0
        for each in self.held:
            *shape, last = each.shape_at(tokens)
            size = each.bytes(tokens)
            words = np.frombuffer(content, np.uint8, size, at)
            found.append(mx.array(words.reshape(*shape, last * each.item)))
            at += size
        return found

    def fill(
        self, cache: Cache, blocks: Sequence[list[mx.array]], snapshot: Sequence[mx.array], tokens: int
    ) -> None:
        """Puts blocks, one behind the other, and a snapshot into an empty cache of one row. Lazy; compute
        thread."""
        leaves = iter([self._joined(index, blocks, tokens) for index in range(len(self.leaves))])
        held = iter([_typed(one, each.dtype) for one, each in zip(snapshot, self.held, strict=True)])
        for part, kind in kinds(cache):
            arrays = islice(leaves if kind.cuts else held, kind.stored(part))
            kind.restore(part, Snapshot(list(arrays), tokens))

    def extend(self, cache: Cache, wanted: Sequence[bool], content: memoryview, start: int, end: int) -> None:
        """Puts the tokens [start, end) behind the first `start` of one row's cache, of those entries that are
        `wanted`, and makes the others what they are at `end`. `content` is a block, then a snapshot. Lazy;
        compute thread."""
        size = self.bytes(end - start)
        block, held = self.arrays(content[:size], end - start), self.snapshot_arrays(content[size:], end)
        leaves = iter([_typed(one, each.dtype) for one, each in zip(block, self.leaves, strict=True)])
        states = iter([_typed(one, each.dtype) for one, each in zip(held, self.held, strict=True)])
        for entry, wants in zip(cache, wanted, strict=True):
            for part, kind in kinds([entry]):
                arrays = list(islice(leaves if kind.cuts else states, kind.stored(part)))
                if wants and kind.cuts:
                    kind.append(part, arrays, start)
                elif wants:
                    kind.restore(part, Snapshot(arrays, end))

    def _joined(self, index: int, blocks: Sequence[list[mx.array]], tokens: int) -> mx.array:
        leaf = self.leaves[index]
        if not leaf.bytes(1):
            return mx.zeros((1, leaf.heads, tokens, leaf.width), getattr(mx, leaf.dtype))
        return mx.concatenate([block[index] for block in blocks], axis=2).view(getattr(mx, leaf.dtype))


def provenance(path: Path, adapter: Path | None = None) -> str:
    """What computes caches with the weights of a model's folder: the versions of MLX and of the classes of
    models, and the weights, with an adapter's.

    Weights are known by their hashes where the folder has a note of them: parts that are fetched later change
    no hash. They are known by the times of their files elsewhere. The model's digest does not cover what is
    in them, which may be replaced by weights of the same shapes. Raises ModelError."""
    own, note, hashes = weight_files(path), note_of(path), ""
    if note is not None and note.state == FolderState.read(path):
        hashes = note.hub_files or (note.manifest.digest.hex() if note.hashed else "")
    if hashes:
        own = []
    if (found := adapter_of(path, adapter)) is not None:
        own = [*own, found / ADAPTER_CONFIG, tensors_of(found)]
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in own]
    return repr((versions(), hashes, files))


def layout_of(stage: Stage, computed_by: str, places: Sequence[int] | None = None) -> BlockLayout | None:
    """The layout of the caches of a stage that computes prompts, or of those in `places` of one that may
    not; None for caches that are not stored. For the compute thread. `computed_by` is its `provenance`.

    Those of a tensor ring are not: a rank cannot compute alone, and its caches are parts of every layer.
    """
    if isinstance(stage.spec, ShardSpec):
        return None
    own = tuple(stage.places_by_layer if places is None else places)
    first, end = stage.held
    layers = end - first if places is None and stage.caches_by_layer else 0

    def tried(tokens: int) -> Cache:
        whole = stage.tried(tokens)
        return [whole[place] for place in own]

    return layout_of_rows(tried, computed_by, stage.spec.model_type, own, layers)


def layout_of_rows(
    tried: Callable[[int], Cache], computed_by: str, model_type: str, places: tuple[int, ...], layers: int
) -> BlockLayout | None:
    """As `layout_of`. `tried` gives the caches after a number of a row's tokens. With `layers`, the number of
    them, bytes are counted for each layer."""
    if not all(kind.stored(part) for part, kind in kinds(tried(0))):
        return None
    cache = tried(1)
    leaves: list[Leaf] = []
    for array in _leaves(cache):
        if array.ndim != 4 or array.shape[0] != 1:
            return None
        leaves.append(Leaf(array.shape[1], array.shape[3], _name(array), array.dtype.size))
    held: list[Held] = []
    for part, kind in kinds(cache):
        if kind.cuts:
            continue
        arrays, window = _arrays(kind.snapshot(part)), kind.bound(part) or 0
        if len(arrays) < kind.stored(part) or any(
            array.ndim < 2 or (window and array.ndim != 4) for array in arrays
        ):
            return None
        held += [Held(tuple(array.shape), _name(array), array.dtype.size, window) for array in arrays]
    named = [
        (type(part).__name__, *(getattr(part, name, 0) for name in ("group_size", "bits")))
        for part, _ in kinds(cache)
    ]
    described = repr((computed_by, model_type, named, leaves, held))
    by_layer = _by_layer(cache, leaves, held, layers) if layers else ()
    layout = BlockLayout(tuple(leaves), tuple(held), described, computed_by, places, by_layer)
    if not layout.bytes(1) and not layout.snapshot_bytes(1):
        return None
    longer = tried(2)  # some states grow with the first tokens: LongCat's of its last ones
    return None if layout.snapshot(longer, 2) is None else layout


def _by_layer(
    cache: Cache, leaves: Sequence[Leaf], held: Sequence[Held], layers: int
) -> tuple[LayerBytes, ...]:
    """The bytes of each layer's cache, and of all that comes behind the last layer's."""
    cut, kept, found = iter(leaves), iter(held), list[LayerBytes]()
    for caches in ([one] for one in cache):
        of_them = kinds(caches)
        uncut = sum(len(_arrays(kind.snapshot(part))) for part, kind in of_them if not kind.cuts)
        found.append(
            LayerBytes(
                sum(leaf.bytes(1) for leaf in islice(cut, len(_leaves(caches)))),
                tuple((each.bytes(1), each.window) for each in islice(kept, uncut)),
            )
        )
    behind = found[layers:]
    rest = LayerBytes(sum(one.token for one in behind), tuple(each for one in behind for each in one.held))
    return (*found[:layers], rest)


def _name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _typed(words: mx.array, dtype: str) -> mx.array:
    """An array of bytes as what it is an array of."""
    if words.size:
        return words.view(getattr(mx, dtype))
    return mx.zeros(words.shape, getattr(mx, dtype))  # of width 0: there is nothing to see


def _leaves(cache: Cache) -> list[mx.array]:
    """The arrays of the caches that can be cut, in order."""
    return [array for part, kind in kinds(cache) if kind.cuts for array in _arrays(kind.snapshot(part))]


def _arrays(snapshot: Snapshot) -> list[mx.array]:
    return [array for array in snapshot.arrays if array is not None]
