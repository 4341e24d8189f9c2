"""What may be done with the caches of one class of mlx-lm's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from sealring.mesh.errors import Internal


class Several:
    """The caches of several rows in one, with which mlx-lm's code computes them together.

    Each row has a place. What is here goes for batches of mlx-lm's own making.
    """

    filter: Any
    extend: Any
    extract: Any
    """A copy of one place's row."""

    @classmethod
    def merge(cls, rows: Sequence[Any]) -> Any:
        """A batch of rows that are not to be used on."""
        return super().merge(list(rows))  # type: ignore[misc]

    def recompose(self, keep: Sequence[int], rows: Sequence[Any]) -> None:
        """Keeps the rows in these places, in this order, and appends rows that are not to be used on."""
        self.filter(list(keep))
        if rows:
            self.extend(self.merge(rows))

    def look_at(self, place: int) -> Any:
        """One row, which must not be changed."""
        return self.extract(place)

    def holds(self, keep: Sequence[int], rows: Sequence[Any], spare: int) -> bool:
        """Whether `put` may put these rows into places that those of `keep` do not have. The batch may be
        larger by `spare` tokens than what is counted for its rows."""
        return False

    def put(self, places: Sequence[int], rows: Sequence[Any]) -> None:
        """Puts rows that are not to be used on into places of a batch that `holds` them."""
        raise NotImplementedError

    def take_back(self, tokens: Sequence[int]) -> None:
        """Takes the last of these numbers of tokens off each place. Raises Internal where that cannot be."""
        cannot_be_cut()


class Kind:
    """A class of caches, each of one row.

    As it stands it is any class that nobody has named. Nothing that such a cache says of itself is believed.
    It is never cut, its rows are computed in turn, they have no drafts, and they are not stored on disk.
    """

    cuts = False
    """Whether a row can be cut to fewer tokens, however long it is."""
    several: type[Several] | None = None
    """What rows are merged into to be computed together, if they can be."""

    def knows(self, cache: Any) -> bool:
        """Whether this cache is used as those are that the kind was written for."""
        return True

    def cut(self, cache: Any, tokens: int) -> None:
        """Leaves a row's first tokens, in arrays no longer than they need be. Raises Internal for fewer than
        there are, unless the kind `cuts`."""
        if getattr(cache, "offset", tokens) != tokens:
            cannot_be_cut()

    def trim(self, cache: Any, tokens: int) -> None:
        """Takes the last tokens off a row, in place. Raises Internal unless the kind `cuts`."""
        if tokens:
            cannot_be_cut()


UNKNOWN = Kind()


def cannot_be_cut() -> NoReturn:
    raise Internal("a cache was to be cut and cannot")
