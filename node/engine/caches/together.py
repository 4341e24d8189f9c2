"""Lists of caches, mlx-lm's `CacheList`: several rows of one, in a batch for each cache of the list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import CacheList

from .kind import Several


class ListRows(Several, CacheList):  # type: ignore[misc]
    """`caches` are the batches, each of its own kind."""

    caches: Sequence[Several]

    def recompose(self, keep: Sequence[int], rows: Sequence[Any]) -> None:
        for number, part in enumerate(self.caches):
            part.recompose(keep, [row.caches[number] for row in rows])

    def look_at(self, place: int) -> Any:
        return CacheList(*(part.look_at(place) for part in self.caches))

    def holds(self, keep: Sequence[int], rows: Sequence[Any], spare: int) -> bool:
        return all(
            part.holds(keep, [row.caches[number] for row in rows], spare)
            for number, part in enumerate(self.caches)
        )

    def put(self, places: Sequence[int], rows: Sequence[Any]) -> None:
        for number, part in enumerate(self.caches):
            part.put(places, [row.caches[number] for row in rows])

    def take_back(self, tokens: Sequence[int]) -> None:
        for part in self.caches:
            part.take_back(tokens)

    def note(self) -> Sequence[Any]:
        return [part.note() for part in self.caches]

    def before(self, note: Sequence[Any], tokens: int, kept: Sequence[int]) -> None:
        for part, own in zip(self.caches, note, strict=True):
            part.before(own, tokens, kept)

    def repeated(self, surplus: Sequence[int]) -> None:
        for part in self.caches:
            part.repeated(surplus)
