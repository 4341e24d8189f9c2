"""The places of a stage's caches in the list that the model expects."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from sealring.node.engine.caches import Cache, parts_of
from sealring.node.engine.caches.pools import Pools, PoolsRows


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
        self._owners = [() if index in idle else layers for index, layers in enumerate(owners)]
        heads = {index for index, layers in enumerate(owners) if not layers and lo == 0} - idle
        self.present = sorted(heads.union(self.used(lo, hi)))
        self.by_layer = [list(owners[index]) for index in self.present] == [[one] for one in range(lo, hi)]
        """Whether each layer has one cache, which no other uses."""
        self._shadows: list[int] = []
        self._empty = {
            index: templates[index] for index, layers in enumerate(owners) if not layers and lo > 0
        }
        kinds = {_kind(templates[index]): place for place, index in reversed(list(enumerate(self.present)))}
        self._where: list[int | None] = []
        for index, template in enumerate(templates):
            kind = _kind(template)
            if index in self.present:
                self._where.append(self.present.index(index))
            elif index in self._empty or (kind not in kinds and not any(map(_counts, parts_of(template)))):
                self._empty[index] = template
                self._where.append(None)
            else:
                if kind not in kinds:
                    kinds[kind] = len(self.present) + len(self._shadows)
                    self._shadows.append(index)
                self._where.append(kinds[kind])

    def select(self, full: Cache) -> Cache:
        """The stage's own caches out of a full list of the model's."""
        return [full[index] for index in (*self.present, *self._shadows)]

    def is_present(self, place: int) -> bool:
        """Whether the cache at this place of the stage's own is one of keys and values, not a shadow."""
        return place < len(self.present)

    def spread(self, cache: Cache) -> Cache:
        """The list that the model's `__call__` expects."""
        return [
            copy.deepcopy(self._empty[index]) if where is None else cache[where]
            for index, where in enumerate(self._where)
        ]

    def used(self, lo: int, hi: int) -> list[int]:
        """Indices of the caches that the layers [lo, hi) use."""
        return [
            index for index, layers in enumerate(self._owners) if any(lo <= layer < hi for layer in layers)
        ]

    def count(self, cache: Cache, rows: int, tokens: int) -> None:
        """Lets the shadows count the tokens of a step that was just run."""
        self.count_in(cache[len(self.present) :], rows, tokens)

    @staticmethod
    def count_in(shadows: Cache, rows: int, tokens: int) -> None:
        """As `count`, of the shadows alone."""
        nothing, state = mx.zeros((rows, 1, tokens, 0)), mx.zeros((rows, 1))
        for shadow in shadows:
            for part in parts_of(shadow):
                if hasattr(part, "cache"):  # else it could not be merged with others
                    part.cache = [state for _ in part.cache]
                elif _counts(part):
                    part.update_and_fetch(nothing, nothing)


def _counts(part: Any) -> bool:
    """Whether it knows how many tokens it holds."""
    return hasattr(part, "offset") and not isinstance(part, Pools | PoolsRows)


def _kind(cache: Any) -> tuple[Any, ...]:
    parts = getattr(cache, "caches", ())
    return (type(cache), getattr(cache, "max_size", None), *(_kind(part) for part in parts))
