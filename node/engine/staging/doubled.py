"""A member that computes prompts with other layers than answers.

Layers at a border between two members may be doubled: both members hold their weights. A prompt is computed
with them on the member before the border, an answer on the member behind it. So a ring of unlike machines has
one cut for each phase. After each chunk the caches of doubled layers go one hop on
(`node.engine.borders`), so that each member holds those of its layers in both phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from sealring.node.engine.caches import Batch, Cache, for_one_row

from .interception import leaves, own_arrays
from .mrope import Positions
from .stage import Stage


class Prefill(Stage):
    """The layers with which a member computes prompts; `decode` has those of its answers.

    A row's caches are this stage's own, and behind them those that the other stage alone has: of doubled
    layers, which are filled from records, and its shadows.
    """

    _decode: Stage | None = None

    def pair(self, decode: Stage) -> None:
        """Makes this the prefill stage of `decode`, once. From then on it computes rows alone."""
        own, other = self.cache_places, decode.cache_places
        self._decode, decode.prefill = decode, self
        self._own = len(super().make_cache())
        self._places = [own.index(place) if place in own else None for place in other]
        """The place of each of the other stage's caches among this stage's own, if it has one."""

    def make_cache(self) -> Cache:
        own = super().make_cache()
        if self._decode is None:
            return own
        made = self._decode.make_cache()
        return self._one_row([*own, *(made[index] for index in self._added)])

    @property
    def _added(self) -> list[int]:
        """Places of caches that the other stage alone has."""
        assert self._decode is not None
        count = len(self._decode.make_cache()) - len(self._places)
        missing = [index for index, place in enumerate(self._places) if place is None]
        return [*missing, *range(len(self._places), len(self._places) + count)]

    def __call__(
        self, inputs: list[mx.array], cache: Batch, positions: Positions | None = None
    ) -> list[mx.array]:
        if self._decode is None:
            return super().__call__(inputs, cache, positions)
        outputs = super().__call__(inputs, self._one_row(cache[: self._own]), positions)
        shadows = cache[self._own + self._places.count(None) :]
        self._decode.count_shadows(shadows, *inputs[0].shape[:2])
        return outputs

    @property
    def caches_by_layer(self) -> bool:
        assert self._decode is not None
        return super().caches_by_layer and self._decode.caches_by_layer

    @property
    def places_by_layer(self) -> list[int]:
        before = self._own + self._places.count(None)
        others = range(before, self._own + len(self._added))
        return [*range(self._own, before), *range(self._own), *others]

    @property
    def held(self) -> tuple[int, int]:
        assert self._decode is not None
        return self._decode.spec.lo, self.spec.hi

    def tried(self, tokens: int) -> Cache:
        assert self._decode is not None
        own, other = super().tried(tokens), self._decode.tried(tokens)
        return self._one_row([*own[: self._own], *(other[index] for index in self._added)])

    def row_place(self, cache: int) -> int | None:
        """The place in a row's caches of the model's cache `cache`, which the other stage has; None where
        this stage computes it itself."""
        assert self._decode is not None
        index = self._decode.cache_places.index(cache)
        return None if self._places[index] is not None else self._own + self._added.index(index)

    def parted(self, cache: Cache) -> tuple[Cache, Cache]:
        """A row's caches once its prompt is computed: those with which the other stage goes on, and the
        rest."""
        assert self._decode is not None
        added = dict(zip(self._added, cache[self._own :], strict=True))
        own = dict(enumerate(self._places))
        picked = [
            added[index] if (place := own.get(index)) is None else cache[place]
            for index in sorted(own.keys() | added.keys())
        ]
        rest = [cache[place] for place in range(self._own) if place not in self._places]
        return for_one_row(picked, self._decode.batches), rest

    def joined(self, decodes: Cache, rest: Cache) -> Cache:
        """The reverse of `parted`. Only `decodes` has tokens behind the prompt."""
        at, left = {place: index for index, place in enumerate(self._places)}, iter(rest)
        own = [decodes[at[place]] if place in at else next(left) for place in range(self._own)]
        return self._one_row([*own, *(decodes[index] for index in self._added)])

    def _one_row(self, cache: Sequence[Any]) -> Cache:
        return for_one_row(list(cache), self.batches)


def share(one: Stage, other: Stage) -> None:
    """Has two stages of one model hold the same arrays where both keep a parameter, before these are
    read."""
    kept = [{id(array) for array in stage.kept} for stage in (one, other)]
    replaced: dict[int, mx.array] = {}
    for mine, its in zip(one.model.modules(), other.model.modules(), strict=True):
        for (key, value), (_, old) in zip(own_arrays(mine), own_arrays(its), strict=True):
            pairs = list(zip(leaves(value), leaves(old), strict=True))
            if all(id(new) in kept[0] and id(was) in kept[1] for new, was in pairs):
                its[key] = value
                replaced.update((id(was), new) for new, was in pairs)
    other.kept = [replaced.get(id(array), array) for array in other.kept]
