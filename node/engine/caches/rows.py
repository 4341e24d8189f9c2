"""The caches of one stage, for one row during prefill and for a lane's rows during decode.

A stage's cache is a list of mlx-lm cache objects, one for each of the model's caches that a present layer
uses (`staging.slots` gives the model the list that it expects). What is done with each of them is known by
its kind.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from .kind import Several, contiguous
from .known import kind_of, kinds
from .together import ListRows

Cache = list[Any]


class OneRow(list[Any]):
    """A `Cache` of a model that can be called with one row only."""


class RowByRow(list[Any]):
    """A `OneRow` for each of several rows. The model is called once per row (`Stage.__call__`)."""


Batch = list[Any]


def for_one_row(cache: Cache, batches: bool) -> Cache:
    """Marks the cache of a model that does not batch, or whose caches do not."""
    return cache if batches and all(kind.several for _, kind in kinds(cache)) else OneRow(cache)


def merge(rows: Sequence[Cache]) -> Batch:
    """One batch cache of the rows' caches, each of one sequence. The rows' caches are not to be used on."""
    if not rows:
        return []
    if isinstance(rows[0], OneRow):
        return RowByRow(rows)
    return [_merged(caches) for caches in zip(*rows, strict=True)]


def _merged(rows: Sequence[Any]) -> Several:
    if hasattr(rows[0], "caches"):
        return ListRows(*(_merged(parts) for parts in zip(*(row.caches for row in rows), strict=True)))
    several = kind_of(rows[0]).several
    assert several is not None
    batch: Several = several.merge(rows)
    return batch


def recompose(batch: Batch, keep: Sequence[int], rows: Sequence[Cache]) -> Batch:
    """Keeps the rows with these indices, in this order, and appends rows that are not to be used on.

    Changes the batch in place and returns it ([] for no rows).
    """
    if not keep:
        return merge(rows)
    if isinstance(batch, RowByRow):
        batch[:] = [*(batch[index] for index in keep), *rows]
        return batch
    for number, cache in enumerate(batch):
        cache.recompose(keep, [row[number] for row in rows])
    return batch


def holds(batch: Batch, keep: Sequence[int], rows: Sequence[Cache], spare: int) -> bool:
    """As `Several.holds`, of all caches of the rows."""
    return not isinstance(batch, RowByRow) and all(
        cache.holds(keep, [row[number] for row in rows], spare) for number, cache in enumerate(batch)
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
    return [cache.look_at(row) for cache in batch]


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
    for part, kind in kinds(cache):
        kind.trim(part, tokens)


def cuts_together(cache: Cache) -> bool:
    """Whether rows with caches like this empty one are computed together and `take_back` can cut them."""
    return not isinstance(cache, OneRow) and trimmable(cache)


def take_back(batch: Batch, tokens: Sequence[int]) -> None:
    """Takes the last of these numbers of tokens off each place of a batch, in place. Raises Internal unless
    each row's cache is `trimmable`."""
    if isinstance(batch, RowByRow):
        for row, count in zip(batch, tokens, strict=True):
            trim(row, count)
        return
    for cache in batch:
        cache.take_back(tokens)


def first_tokens(cache: Cache, tokens: int) -> Cache:
    """A lazy copy of the first tokens of one row's cache, with arrays no longer than they need be.

    A cache that is not `trimmable` must hold just as many. Raises Internal where it does not.
    """
    copies = copied(cache)
    for part, kind in kinds(copies):
        kind.cut(part, tokens)
    return copies


def copied(cache: Cache) -> Cache:
    """A copy of one row's cache, over the same arrays."""
    copies: Cache = copy.deepcopy(list(cache))
    return OneRow(copies) if isinstance(cache, OneRow) else copies


def detached(cache: Cache) -> Cache:
    """The cache, lazily, in arrays that share no memory with what they were cut from."""
    for part, _ in kinds(cache):
        vars(part).update(contiguous(vars(part)))
    return cache
