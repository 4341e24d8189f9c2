"""Caches that outlive their rows, for later rows that begin with the same tokens. Compute thread only.

A kept cache shares no array with the row that it was taken from: a row's arrays are as long as the row, and
what is kept has to cost no more than the gateway counts for it. Rows that start from it share its arrays
until their first chunk, which writes into arrays of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import (
    Adopting,
    Chunk,
    Keeping,
    Marking,
    Restoring,
    Unmarking,
)
from sealring.mesh.ring.kept_prefixes import Origin
from sealring.node.engine import caches, params
from sealring.node.engine.caches import Cache
from sealring.node.engine.caches.undo import Mark, cut_to, mark, marked
from sealring.v1 import control_pb2 as control

if TYPE_CHECKING:
    from sealring.node.engine.disk import Disk


def support(cache: Cache) -> control.PrefixSupport.ValueType:
    """The prefixes that a stage's caches allow; `cache` is an empty one for one row."""
    if caches.trimmable(cache):
        return control.PREFIX_SUPPORT_ANY
    return control.PREFIX_SUPPORT_EXACT


@dataclass(frozen=True, slots=True)
class Kept:
    """`marks` are by length, where caches cannot be cut: the whole length, and shorter ones."""

    origin: Origin
    cache: Cache
    marks: Mapping[int, Mark] = field(default_factory=dict)


class Prefixes:
    """The kept prefixes of a stage: those of the open epoch, and until its first step those of earlier ones.

    They stay right in the next epoch, because weights and layers are the same. When the gateway attaches, it
    finds out which prefixes all members have, and has these adopted.
    """

    def __init__(self, allowed: control.PrefixSupport.ValueType) -> None:
        self.cuts = allowed == control.PREFIX_SUPPORT_ANY
        """Whether caches can be cut to any length."""
        self.disk: Disk | None = None
        """The disk that stores the prefixes as well."""
        self._ring = ""
        self._kept: dict[int, Kept] = {}
        self._earlier: dict[Origin, Kept] = {}
        self._marks: dict[int, Mapping[int, Mark]] = {}  # of rows: of the prefix it began with, and its own

    def turn_over(self, ring: str) -> dict[Origin, tuple[int, ...]]:
        """Begins an epoch of this ring; the origins of the prefixes that are kept from earlier ones, in
        order, and the lengths of their marks besides their ends."""
        earlier = self._earlier | {kept.origin: kept for kept in self._kept.values()}
        self._earlier = earlier if ring == self._ring else {}
        self._ring = ring
        self._kept = {}
        return {
            origin: tuple(sorted(self._earlier[origin].marks.keys() - {origin.tokens}))
            for origin in sorted(self._earlier)
        }

    @property
    def earlier(self) -> tuple[int, int]:
        """Tokens and marks of the prefixes of earlier epochs, until the first step has adopted or dropped
        them."""
        marks = {id(mark) for kept in self._earlier.values() for mark in kept.marks.values()}
        return sum(origin.tokens for origin in self._earlier), len(marks)

    def adopt(self, adopting: Adopting) -> None:
        """Goes on with a prefix of an earlier epoch. Raises InvalidInput (BAD_STEP) unless it is kept with
        these marks."""
        kept = self._earlier.get(adopting.origin)
        if kept is None or (not self.cuts and not kept.marks.keys() >= set(adopting.marks)):
            raise InvalidInput(
                f"prefix {adopting.prefix} was not kept here",
                reason="BAD_STEP",
                hint="gateway and member disagree; the epoch must end",
            )
        whole = adopting.origin.tokens
        marks = {length: mark for length, mark in kept.marks.items() if length in (*adopting.marks, whole)}
        self._kept[adopting.prefix] = replace(kept, marks=marks)

    def settle(self) -> None:
        """Drops the prefixes that the first step has not adopted."""
        self._earlier.clear()

    def keep(self, keeping: Keeping, row: Cache) -> Cache:
        """Keeps the first tokens of a row's cache; returns the copy, which is lazy.

        Raises InvalidInput (BAD_STEP) for fewer tokens than the row holds if caches cannot be cut and the row
        has no mark there.
        """
        if self.cuts:
            cache = caches.detached(caches.first_tokens(row, keeping.tokens))
            self._kept[keeping.prefix] = Kept(keeping.origin, cache)
            return cache
        has = self._marks.get(keeping.row, {})
        if self.disk is not None and keeping.lane is None and keeping.tokens == keeping.held:
            self.disk.marked(keeping.row, keeping.tokens, row)
        if keeping.cut:
            cache = caches.detached(cut_to(row, keeping.tokens, has[keeping.tokens]))
            end = has[keeping.tokens]
        elif keeping.tokens == keeping.held:
            cache = caches.detached(caches.first_tokens(row, keeping.tokens))
            end = mark(cache)
        else:
            raise _not_allowed(keeping.prefix)
        marks = {length: has[length] for length in keeping.marks} | {keeping.tokens: end}
        if keeping.tokens == keeping.held:
            self._marks[keeping.row] = marks
        self._kept[keeping.prefix] = Kept(keeping.origin, cache, marks)
        return cache

    def mark(self, marking: Marking, row: Cache) -> Sequence[object]:
        """Marks a row where it is; returns the arrays of its windows and states, nested and lazy."""
        if self.cuts:
            return []
        if self.disk is not None:
            self.disk.marked(marking.row, marking.tokens, row)
        made = marked(row, marking.tokens)
        self._marks[marking.row] = {**self._marks.get(marking.row, {}), marking.tokens: made}
        return [(snapshot.arrays, snapshot.rest) for snapshot in made.values()]

    def unmark(self, unmarking: Unmarking) -> None:
        """Gives marks up."""
        if self.cuts:
            return
        if unmarking.prefix:
            kept = self._kept[unmarking.prefix]
            self._kept[unmarking.prefix] = replace(kept, marks=_without(kept.marks, unmarking.marks))
        else:
            self._marks[unmarking.row] = _without(self._marks[unmarking.row], unmarking.marks)

    def restore(self, change: Restoring, empty: Callable[[], Cache]) -> Cache:
        """Keeps what was read from disk; returns its cache, which is lazy. `empty` makes one for a row.

        Raises InvalidInput (BAD_STEP) where it was not.
        """
        if self.disk is None:
            raise _not_allowed(change.prefix)
        cache = self.disk.restored(change, empty())
        marks = {} if self.cuts else {change.tokens: mark(cache)}
        self._kept[change.prefix] = Kept(change.origin, cache, marks)
        return cache

    def began(self, row: int, record: bytes) -> None:
        """A row begins, whose parameter record names what may be stored of it. Raises InvalidInput."""
        if self.disk is not None and record:
            self.disk.began(row, params.chain_in(record))

    def computed(self, chunk: Chunk, row: Cache) -> None:
        """Stores what a chunk has computed of a row."""
        if self.disk is not None:
            self.disk.computed(chunk.row, chunk.end, row)

    def forget(self, row: int) -> None:
        """Forgets a row that is evicted."""
        self._marks.pop(row, None)
        if self.disk is not None:
            self.disk.forget(row)

    def start(self, chunk: Chunk) -> Cache:
        """The cache of a row that begins with a kept prefix. Raises InvalidInput (BAD_STEP), as `keep`."""
        kept = self._kept[chunk.prefix]
        if self.cuts:
            return caches.first_tokens(kept.cache, chunk.start)
        if chunk.start not in kept.marks:
            raise _not_allowed(chunk.prefix)
        marks = {length: mark for length, mark in kept.marks.items() if length <= chunk.start}
        self._marks[chunk.row] = marks
        return cut_to(kept.cache, chunk.start, marks[chunk.start])

    def drop(self, prefix: int) -> None:
        del self._kept[prefix]

    def end_epoch(self) -> None:
        """Forgets rows; what is kept stays."""
        self._marks.clear()
        if self.disk is not None:
            self.disk.end_epoch()

    def clear(self) -> None:
        self._kept.clear()
        self._earlier.clear()

    def distrust(self) -> None:
        """Computing has failed: forgets everything, and what was just stored."""
        self.clear()
        if self.disk is not None:
            self.disk.distrust()


def _without(marks: Mapping[int, Mark], gone: Sequence[int]) -> dict[int, Mark]:
    return {length: one for length, one in marks.items() if length not in gone}


def _not_allowed(prefix: int) -> InvalidInput:
    return InvalidInput(
        f"the caches of this stage cannot be cut to prefix {prefix}",
        reason="BAD_STEP",
        hint="the gateway must go by what the member said it allows",
    )
