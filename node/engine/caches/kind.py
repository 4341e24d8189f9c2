"""What may be done with the caches of one class of mlx-lm's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx

from sealring.mesh.errors import Internal


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a row's cache is at one length, by reference. Caches that are made of it share its arrays until
    they write."""

    arrays: Sequence[Any]
    """`mx.array`s, or None for a state that is not there yet."""
    rest: Any = None
    """What else there is: the tokens of a row, for caches that know them."""

    @property
    def detached(self) -> Snapshot:
        """A lazy copy, in arrays that share no memory with what they were cut from."""
        return Snapshot(contiguous(self.arrays), contiguous(self.rest))


def contiguous(value: Any) -> Any:
    """As `Snapshot.detached`, of whatever holds arrays."""
    if isinstance(value, dict):
        return {name: contiguous(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(contiguous, value))
    return mx.contiguous(value) if isinstance(value, mx.array) else value


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

    repeats = False
    """Whether a run of drafts can be computed again, of each place other first tokens, by the three methods
    below in turn. A model's code has to mask the states of places where fewer tokens count."""

    def note(self) -> Sequence[Any]:
        """What is kept of the places before a run."""
        return ()

    def before(self, note: Sequence[Any], tokens: int, kept: Sequence[int]) -> None:
        """Goes back to where a run of `tokens` tokens began, so that it can be computed again. Of each place
        the first `kept` tokens count."""
        self.take_back([tokens] * len(kept))

    def repeated(self, surplus: Sequence[int]) -> None:
        """A run was computed again, of which the last `surplus` tokens of each place do not count."""
        self.take_back(surplus)


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

    def bound(self, cache: Any) -> int | None:
        """The most tokens that it holds of a row; None without a bound."""
        return None

    def snapshot(self, cache: Any) -> Snapshot:
        """A row as it is now."""
        return Snapshot((), copy.deepcopy(vars(cache)))  # which copies no array, but the reference to it

    def restore(self, cache: Any, at: Snapshot) -> None:
        """Makes a row what it was. Entries that only grow are left of the row's own, which has them still."""
        vars(cache).update(copy.deepcopy(at.rest))

    def stored(self, cache: Any) -> int:
        """How many arrays a snapshot on disk has: they and the number of tokens are all that is in one. 0 for
        caches that are not stored."""
        return 0

    def append(self, cache: Any, arrays: Sequence[mx.array], start: int) -> None:
        """Puts what a snapshot on disk has of the tokens behind the first `start` into a row, in place if it
        has room. The kind `cuts`."""
        raise NotImplementedError

    def check(self, cache: Any, tokens: int) -> None:
        """Raises Internal if a row is known to have another number of tokens."""
        if getattr(cache, "offset", tokens) != tokens:
            cannot_be_cut()

    def cut(self, cache: Any, tokens: int) -> None:
        """Leaves a row's first tokens, in arrays no longer than they need be. Raises Internal for fewer than
        there are, unless the kind `cuts`."""
        self.check(cache, tokens)
        self.restore(cache, self.snapshot(cache))

    def trim(self, cache: Any, tokens: int) -> None:
        """Takes the last tokens off a row, in place. Raises Internal unless the kind `cuts`."""
        if tokens:
            cannot_be_cut()

    goes_back = False
    """Whether runs of drafts can be taken out of a row."""
    recomputes = True
    """Whether they are taken out whole, so that the accepted tokens of a run are computed again."""

    def note(self, cache: Any) -> Snapshot:
        """What is kept of a row that a run is about to change."""
        return self.snapshot(cache)

    def back(self, cache: Any, notes: Sequence[Snapshot], tokens: int) -> None:
        """Takes the last tokens out of a row. `notes` are of the runs that they came with, the oldest first;
        tokens of other runs, or of a part of one if it `recomputes`, are not taken."""
        self.restore(cache, notes[0])


UNKNOWN = Kind()


def cannot_be_cut() -> NoReturn:
    raise Internal("a cache was to be cut and cannot")
