"""The prefixes of prompts and answers that a ring keeps for later rows, by name (mesh.ring.prefix_names).

Rows come first: prefixes are kept in memory that no row uses, and are dropped, least recently used first,
when rows need it. If caches can be cut (PREFIX_SUPPORT_ANY), a prompt is kept when it is prefilled and, with
its answer, when that ends; any number of its blocks can be reused. If they cannot (PREFIX_SUPPORT_EXACT), a
chunk ends at each length that is worth keeping. One is before the last tokens, for the next turn of the
conversation; one is the longest prefix that an earlier prompt had in common. Where members mark prefixes, a
longer one takes the place of those that it continues and can be reused up to where these ended, and a long
prompt has further lengths between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sealring.gateway.scheduler.memory import Ledger
from sealring.gateway.scheduler.request import Row
from sealring.mesh.ring.composition import Origin
from sealring.mesh.ring.prefix_marks import MOST, thinned
from sealring.mesh.ring.prefix_names import OPENING, Chain, Names, edges, split
from sealring.v1 import control_pb2 as control

MAX_KEPT = 256
MAX_SEEN = 1 << 16
"""Names of prompts that are remembered, to find what prompts have in common."""

LEAST_STORED, STORED_PART = 1024, 16
"""Windows and states are written whole, up to some hundred MB each time. They are if this many tokens more,
and this part of those before, are stored then: at most that is computed again after a restart."""


class PrefixCache:
    """The kept prefixes of one epoch. `changes` belong to the next step, in front of its other changes."""

    def __init__(
        self,
        ledger: Ledger,
        support: control.PrefixSupport.ValueType,
        earlier: Sequence[tuple[Origin, Names]] = (),
        mark_every: int = 0,
        *,
        stores: bool = False,
    ) -> None:
        """`earlier` and `mark_every` as in RingFacts. `stores`: members store prefixes on disk."""
        self._ledger = ledger
        self._any = support == control.PREFIX_SUPPORT_ANY
        self._exact = support == control.PREFIX_SUPPORT_EXACT
        self._mark_every = mark_every
        self._stores = stores
        self._kept: OrderedDict[int, Names] = OrderedDict()  # the last name is of all of its tokens
        self._named: dict[bytes, set[int]] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._due: list[tuple[Row, Names]] = []
        self._last = 0
        self._reserved = 0
        self._moves: list[control.Change] = []
        self._adopting = list(self._adopt(earlier)) if self._any or self._exact else []

    def longest(self, row: Row) -> tuple[int, int]:
        """Tokens of the longest kept prefix that a row could begin with, and its number; 0 without one."""
        for length, name in reversed(row.names):
            found = self._named.get(name)
            if found and length < row.prompt_tokens:
                return length, max(found)
        return 0, 0

    def prepare(self, row: Row) -> None:
        """Finds where a row that has not begun would begin, and where it would be cut."""
        row.cuts = ()
        row.prefilled, row.prefix = self.longest(row)
        usable = [pair for pair in row.names if pair[0] <= row.prompt_tokens - OPENING]
        if self._exact and usable:
            common = next((length for length, name in reversed(usable) if name in self._seen), 0)
            cuts = {usable[-1][0], *self._between(row.prefilled, usable)}
            cuts.update(self._to_store(row, common, usable[-1][0]))
            if common > row.prefilled + OPENING:  # fewer tokens are soon computed again
                cuts.add(common)
            row.cuts = tuple(sorted(cut for cut in cuts if cut > row.prefilled))

    def _between(self, start: int, usable: Sequence[tuple[int, bytes]]) -> Iterator[int]:
        """Lengths at which a long prompt is marked on the way."""
        every = max(self._mark_every, usable[-1][0] // MOST)
        for length, _ in usable if self._mark_every else ():
            if length >= start + every:
                yield length
                start = length

    def _to_store(self, row: Row, *lengths: int) -> Iterator[int]:
        """Lengths at which a prompt is cut so that members can store it: the last edges of blocks before
        these, if enough is stored then that was not before."""
        if not self._stores or row.request.sealed:
            return
        found = edges(max(lengths))
        for length in lengths:
            edge = max((one for one in found if one <= length), default=0)
            if edge >= row.stored + max(LEAST_STORED, row.stored // STORED_PART):
                yield edge

    def chunk(self, row: Row, start: int) -> None:
        """A chunk of the row is announced, from `start` to `row.prefilled`."""
        if start == row.reused:
            row.marks = ()
            if row.prefix:
                self._kept.move_to_end(row.prefix)
                if self._mark_every:
                    row.marks = tuple(pair for pair in self._kept[row.prefix] if pair[0] <= start)
            self._see(row.names)
        if row.prefilled in row.cuts:
            self._due.append((row, tuple(pair for pair in row.names if pair[0] == row.prefilled)))
        elif self._any and not row.remaining:
            self._due.append((row, row.names))

    def finished(self, row: Row, tokens: int, last: control.RowOutput) -> None:
        """Keeps a row that has ended with `tokens` tokens generated, without the last, which no step
        computed. `last` has the names of its answer.

        Raises InvalidInput (BAD_PREFIXES).
        """
        whole = row.prompt_tokens + tokens - 1
        more = split(last.prefixes, whole, row.prompt_tokens, last.ends)
        if self._any and more:
            self._due.append((row, row.names + more))

    def reserve(self, row: Row, tokens: int) -> bool:
        """Counts memory for a prefix that members read from disk, in place of others; False where rows, the
        one that waits for it among them, leave none. To be given back by `free`."""
        if not self._make_room(row, tokens):
            return False
        self._ledger.keep(tokens)
        self._reserved += tokens
        return True

    def free(self, tokens: int) -> None:
        """Gives back what `reserve` has counted."""
        self._ledger.give_up(tokens)
        self._reserved -= tokens

    @property
    def crowded(self) -> bool:
        """Whether rows have taken memory that was reserved."""
        return bool(self._reserved) and not self._ledger.fits(self._reserved)

    @property
    def moving(self) -> bool:
        """Whether drops or restores wait for the next step."""
        return bool(self._moves)

    def restore(self, row: Row, recall: int, chain: Chain) -> bool:
        """Keeps what all members have read of a row's prompt; False where rows have taken the memory."""
        names = tuple(pair for pair in row.names if pair[0] <= chain.tokens)
        if not names or names[-1][0] != chain.tokens or not self._make_room(row, chain.tokens):
            return False
        number = self._add(names if self._any else names[-1:])
        restore = control.Restore(prefix=number, recall=recall, tokens=chain.tokens, name=chain.names[-1])
        self._moves.append(control.Change(restore=restore))
        return True

    def _make_room(self, row: Row, tokens: int) -> bool:
        """Drops others for a prefix and the row that is to begin with it, if that is enough."""
        beside = tokens + len(row.group) * row.reserved
        if not self._ledger.fits(self._reserved + beside):
            return False
        while self._kept and (len(self._kept) >= MAX_KEPT or not self._ledger.has_room(beside)):
            self._moves.append(self._drop())
        return self._ledger.has_room(beside)

    def changes(self) -> list[control.Change]:
        """Adoptions, then what is restored, keeps and what is dropped for them."""
        changes, self._adopting = [*self._adopting, *self._moves], []
        self._moves.clear()
        while self._kept and not self._ledger.has_room():
            changes.append(self._drop())
        for row, names in self._due:
            changes += self._keep(row, names)
        self._due.clear()
        return changes

    def _adopt(self, earlier: Sequence[tuple[Origin, Names]]) -> Iterator[control.Change]:
        """Adopts prefixes of an earlier epoch while there is room, the newest first."""
        for origin, names in reversed(earlier):
            if len(self._kept) < MAX_KEPT and self._ledger.has_room(origin.tokens):
                number = self._add(names[-1:] if self._exact else names)
                self._kept.move_to_end(number, last=False)
                adopt = control.Adopt(prefix=number, epoch=origin.epoch, row=origin.row, tokens=origin.tokens)
                yield control.Change(adopt=adopt)

    def _keep(self, row: Row, names: Names) -> Iterator[control.Change]:
        """Keeps a prefix if there is room, in place of the prefixes that it continues."""
        if not names:
            return
        length, longest = names[-1]
        if found := self._named.get(longest):
            self._kept.move_to_end(max(found))
            return
        continued = names if self._any else row.marks
        if self._mark_every:
            names = _thinned(row.marks + names, MOST)
        while not self._ledger.fits(length, self._marks(names)):
            if self._any or len(names) == 1:
                return
            names = _thinned(names, len(names) - 1)
        row.marks = names if self._mark_every else ()
        for _, name in continued:
            for number in sorted(self._named.get(name, ())):
                if self._kept[number][-1][1] == name:
                    yield self._drop(number)
        while len(self._kept) >= MAX_KEPT or not self._ledger.has_room(length, self._marks(names)):
            yield self._drop()
        number = self._add(names)
        keep = control.Keep(prefix=number, row=row.number, tokens=length)
        keep.marks.extend(other for other, _ in row.marks[:-1])
        yield control.Change(keep=keep)

    def _add(self, names: Names) -> int:
        self._last += 1
        self._kept[self._last] = names
        for _, name in names:
            self._named.setdefault(name, set()).add(self._last)
        self._ledger.keep(names[-1][0], self._marks(names))
        return self._last

    def _marks(self, names: Names) -> int:
        """Marks besides a prefix's end."""
        return len(names) - 1 if self._exact else 0

    def _drop(self, number: int = 0) -> control.Change:
        """Drops one prefix, by default the least recently used."""
        number = number or next(iter(self._kept))
        names = self._kept.pop(number)
        for _, name in names:
            self._named[name].remove(number)
            if not self._named[name]:
                del self._named[name]
        self._ledger.give_up(names[-1][0], self._marks(names))
        return control.Change(drop=control.Drop(prefix=number))

    def _see(self, names: Names) -> None:
        if self._exact:
            for _, name in names:
                self._seen[name] = None
                self._seen.move_to_end(name)
            while len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)


def _thinned(names: Names, most: int) -> Names:
    left = set(thinned((length for length, _ in names), most))
    return tuple(pair for pair in names if pair[0] in left)
