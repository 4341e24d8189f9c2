"""The caches of one stage, for one row during prefill and for a lane's rows during decode.

A stage's cache is a list of mlx-lm cache objects, one for each of the model's caches that a present layer
uses (`Slots` gives the model the list that it expects). Rows join and leave a lane's cache with mlx-lm's
batch caches, as its `BatchGenerator` does (keys and values with those of `rows`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from sealring.mesh.errors import Internal
from sealring.node.engine.caches.known import kinds, parts_of

from .interception import leaves
from .latents import LatentRows
from .rows import RowsCache
from .rows import merge as merge_rows

Cache = list[Any]


class OneRow(list[Any]):
    """A `Cache` of a model that can be called with one row only."""


class RowByRow(list[Any]):
    """A `OneRow` for each of several rows. The model is called once per row (`Stage.__call__`)."""


Batch = list[Any]


def for_one_row(cache: Cache, batches: bool) -> Cache:
    """Marks the cache of a model that does not batch, or whose caches do not."""
    return cache if batches and all(kind.merges for _, kind in kinds(cache)) else OneRow(cache)


def merge(rows: Sequence[Cache]) -> Batch:
    """One batch cache of the rows' caches, each of one sequence. The rows' caches are not to be used on."""
    if not rows:
        return []
    if isinstance(rows[0], OneRow):
        return RowByRow(rows)
    return [merge_rows(caches) for caches in zip(*rows, strict=True)]


def recompose(batch: Batch, keep: Sequence[int], rows: Sequence[Cache]) -> Batch:
    """Keeps the rows with these indices, in this order, and appends rows that are not to be used on.

    Changes the batch in place and returns it ([] for no rows).
    """
    if not keep:
        return merge(rows)
    if isinstance(batch, RowByRow):
        batch[:] = [*(batch[index] for index in keep), *rows]
        return batch
    for place, cache in enumerate(batch):
        _recompose(cache, keep, [row[place] for row in rows])
    return batch


def _recompose(cache: Any, keep: Sequence[int], rows: Sequence[Any]) -> None:
    """One cache of several rows, each part of a list of caches by itself."""
    if hasattr(cache, "caches"):
        for number, part in enumerate(cache.caches):
            _recompose(part, keep, [row.caches[number] for row in rows])
    elif isinstance(cache, RowsCache | LatentRows):
        cache.recompose(keep, rows)
    else:
        cache.filter(list(keep))
        if rows:
            cache.extend(rows[0].merge(list(rows)))


def holds(batch: Batch, keep: Sequence[int], rows: Sequence[Cache], spare: int) -> bool:
    """Whether `put` may put these rows into places of a batch that those of `keep` do not have. The batch may
    be larger by `spare` tokens than what is counted for its rows."""
    return not isinstance(batch, RowByRow) and all(
        isinstance(cache, RowsCache) and cache.holds(keep, [row[number] for row in rows], spare)
        for number, cache in enumerate(batch)
    )


def put(batch: Batch, places: Sequence[int], rows: Sequence[Cache]) -> None:
    """Puts rows that are not to be used on into places of a batch that `holds` them."""
    for number, cache in enumerate(batch):
        cache.put(places, [row[number] for row in rows])


def look_at(batch: Batch, row: int) -> Cache:
    """One row as a cache of one sequence that must not be changed."""
    if isinstance(batch, RowByRow):
        own: Cache = batch[row]
        return own
    return [cache.look_at(row) if isinstance(cache, RowsCache) else cache.extract(row) for cache in batch]


def extract(batch: Batch, row: int) -> Cache:
    """A copy of one row as a cache of one sequence."""
    if isinstance(batch, RowByRow):
        return copy.deepcopy(batch[row])
    return [cache.extract(row) for cache in batch]


def trimmable(cache: Cache) -> bool:
    """Whether rows with caches like this empty one can be cut to fewer tokens, however long they are."""
    return all(kind.cuts for _, kind in kinds(cache))


def trim(cache: Cache, tokens: int) -> None:
    """Takes the last tokens off one row's cache, in place. Raises Internal unless it is `trimmable`."""
    for entry in cache:
        for part in parts_of(entry):
            if not hasattr(part, "trim") or part.trim(tokens) != tokens:
                raise Internal("a cache was to be cut and cannot")


def cuts_together(cache: Cache) -> bool:
    """Whether rows with caches like this empty one are computed together and `take_back` can cut them."""
    if isinstance(cache, OneRow) or not trimmable(cache):
        return False
    parts = [part for entry in merge([cache, copied(cache)]) for part in parts_of(entry)]
    return all(isinstance(part, RowsCache) for part in parts)


def take_back(batch: Batch, tokens: Sequence[int]) -> None:
    """Takes the last of these numbers of tokens off each place of a batch, in place. Raises Internal unless
    each row's cache is `trimmable`."""
    if isinstance(batch, RowByRow):
        for row, count in zip(batch, tokens, strict=True):
            trim(row, count)
        return
    for part in (part for entry in batch for part in parts_of(entry)):
        if not isinstance(part, RowsCache) or hasattr(part, "chunk_size"):
            raise Internal("a cache was to be cut and cannot")
        part.take_back(tokens)


def first_tokens(cache: Cache, tokens: int) -> Cache:
    """A lazy copy of the first tokens of one row's cache, with arrays no longer than they need be.

    A cache that is not `trimmable` must hold just as many. Raises Internal where it does not.
    """
    copies = copied(cache)
    for entry in copies:
        for part in parts_of(entry):
            cut(part, tokens)
    return copies


def copied(cache: Cache) -> Cache:
    """A copy of one row's cache, over the same arrays."""
    copies: Cache = copy.deepcopy(list(cache))
    return OneRow(copies) if isinstance(cache, OneRow) else copies


def cut(part: Any, tokens: int) -> None:
    """Leaves the first tokens in one cache of a row, as `first_tokens`."""
    if not hasattr(part, "offset"):
        return  # a state, which is as it was after the last token
    surplus = int(part.offset) - tokens
    if surplus and (surplus < 0 or not part.is_trimmable() or part.trim(surplus) != surplus):
        raise Internal("a cache was to be cut and cannot")
    if (window := getattr(part, "max_size", 0)) and part.keys is not None and part.keys.shape[2] > window:
        # behind a chunk it also holds what the chunk's first tokens looked back at
        part.keys, part.values = (array[..., -window:, :] for array in (part.keys, part.values))
        setattr(part, "_idx", window)  # noqa: B010
    if getattr(part, "start_position", 0) or getattr(part, "_idx", tokens) != tokens:
        return  # it does not begin with the row's first token
    if getattr(part, "keys", None) is not None:
        part.keys, part.values = tree_map(lambda array: array[..., :tokens, :], (part.keys, part.values))


def detached(cache: Cache) -> Cache:
    """The cache, lazily, in arrays that share no memory with what they were cut from."""
    for entry in cache:
        for part in parts_of(entry):
            vars(part).update({name: _contiguous(value) for name, value in vars(part).items()})
    return cache


def _contiguous(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_contiguous, value))
    return mx.contiguous(value) if isinstance(value, mx.array) else value


class Slots:
    """Places a stage's caches where the model expects them.

    A model's code makes masks and positions from caches at absolute indices, also from those of absent layers
    and of layers that leave theirs empty. Such a place gets a present cache of the same kind, because all
    caches of a row have the same offset when a step begins. Without one it gets a shadow: a cache that counts
    tokens with keys and values of width zero, or an empty one if its kind does not count.
    """

    def __init__(
        self, templates: Cache, owners: Sequence[Sequence[int]], idle: frozenset[int], lo: int, hi: int
    ) -> None:
        """`owners`: for each of the model's caches the layers that use it; none means only the head does.

        `idle` are those that no layer ever fills.
        """
        self._present = [
            index
            for index, layers in enumerate(owners)
            if index not in idle and (any(lo <= layer < hi for layer in layers) or (not layers and lo == 0))
        ]
        self._shadows: list[int] = []
        self._empty = {
            index: templates[index] for index, layers in enumerate(owners) if not layers and lo > 0
        }
        kinds = {_kind(templates[index]): place for place, index in reversed(list(enumerate(self._present)))}
        self._where: list[int | None] = []
        for index, template in enumerate(templates):
            kind = _kind(template)
            if index in self._present:
                self._where.append(self._present.index(index))
            elif index in self._empty or (kind not in kinds and not any(map(_counts, parts_of(template)))):
                self._empty[index] = template
                self._where.append(None)
            else:
                if kind not in kinds:
                    kinds[kind] = len(self._present) + len(self._shadows)
                    self._shadows.append(index)
                self._where.append(kinds[kind])

    def select(self, full: Cache) -> Cache:
        """The stage's own caches out of a full list of the model's."""
        return [full[index] for index in (*self._present, *self._shadows)]

    def is_present(self, place: int) -> bool:
        """Whether the cache at this place of the stage's own is one of keys and values, not a shadow."""
        return place < len(self._present)

    def spread(self, cache: Cache) -> Cache:
        """The list that the model's `__call__` expects."""
        return [
            copy.deepcopy(self._empty[index]) if where is None else cache[where]
            for index, where in enumerate(self._where)
        ]

    def count(self, cache: Cache, rows: int, tokens: int) -> None:
        """Lets the shadows count the tokens of a step that was just run."""
        nothing, state = mx.zeros((rows, 1, tokens, 0)), mx.zeros((rows, 1))
        for shadow in cache[len(self._present) :]:
            for part in parts_of(shadow):
                if _counts(part):
                    part.update_and_fetch(nothing, nothing)
                else:  # else it could not be merged with others
                    part.cache = [state for _ in part.cache]


def is_filled(cache: Any) -> bool:
    """Whether anything was ever put into a cache of one row."""
    held = (leaves(list(vars(part).values())) for part in parts_of(cache))
    return any(isinstance(leaf, mx.array) for found in held for leaf in found)


def _counts(part: Any) -> bool:
    """Whether it knows how many tokens it holds."""
    return hasattr(part, "offset")


def _kind(cache: Any) -> tuple[Any, ...]:
    parts = getattr(cache, "caches", ())
    return (type(cache), getattr(cache, "max_size", None), *(_kind(part) for part in parts))
