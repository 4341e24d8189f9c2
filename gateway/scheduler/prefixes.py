"""The prefixes of prompts and answers that a ring keeps for later rows, by name (mesh.ring.prefix_names).

Rows come first: prefixes are kept in memory that no row uses. If caches can be cut (PREFIX_SUPPORT_ANY), a
prompt is kept when it is prefilled and, with its answer, when that ends; any number of its tokens can be
reused. If they cannot (PREFIX_SUPPORT_EXACT), a chunk ends at each length that is worth keeping. One is
before the last tokens, for the next turn of the conversation; one is the longest prefix that an earlier
prompt had in common. Where members mark prefixes, a longer one takes the place of those that it continues and
can be reused up to where these ended, and a long prompt has further lengths between.

**One conversation is held once.** A row that continues a prefix has its tokens, too. While the row waits for
its first chunk, the prefix is in the memory that is reserved for the row. If there is no more, the row takes
it with its first chunk, and what it has computed is kept with the step that evicts it, in its own place.

**What goes** when rows need the room: first a prefix that a row or another prefix continues, then one that no
later prompt has continued, then the least recently used. Conversations go before others' first prompts only
while they hold more than half of what is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class _Kept:
    """A prefix whose last name is of all of its tokens.

    Its first `prompt` tokens were a prompt, and a row that begins with all of them but for OPENING continues
    it. `continues` is whether it was made by such a row. It is `spent` once what continues it is kept, or is
    in a row that runs. It counts nothing while rows `expect` it, which have memory for it.
    """

    names: Names
    prompt: int
    continues: bool = False
    spent: bool = False
    expect: set[int] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        return self.names[-1][0]


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
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # least recently used first
        self._named: dict[bytes, set[int]] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[int, Names] = {}  # rows whose answers are kept when they leave
        self._taken: dict[int, int] = {}  # marks of prefixes that rows have taken
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

    @property
    def waits(self) -> bool:
        """Whether an answer is kept only once its row leaves."""
        return bool(self._pending)

    def waits_for(self, row: Row) -> bool:
        """Whether a row continues an answer that is kept only once its row leaves."""
        pending = {name for names in self._pending.values() for _, name in names}
        known = (name for _, name in reversed(row.names) if name in pending or name in self._named)
        longest = next(known, None)
        return longest in pending and longest not in self._named

    def prepare(self, row: Row) -> None:
        """Finds where a row that has not begun would begin, and where it would be cut."""
        self.forget(row)
        row.cuts = ()
        row.prefilled, row.prefix = self.longest(row)
        kept = self._kept.get(row.prefix)
        row.continues = kept is not None and row.prefilled >= kept.prompt - OPENING
        if kept is not None and row.continues and kept.tokens <= row.reserved:
            self._expect(kept, row)
        usable = _lasting(row)
        if self._exact and usable:
            common = next((length for length, name in reversed(usable) if name in self._seen), 0)
            cuts = {usable[-1][0], *self._between(row.prefilled, usable)}
            cuts.update(self._to_store(row, common, usable[-1][0]))
            if common > row.prefilled + OPENING:  # fewer tokens are soon computed again
                cuts.add(common)
            row.cuts = tuple(sorted(cut for cut in cuts if cut > row.prefilled))

    def _between(self, start: int, usable: Names) -> Iterator[int]:
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

    def forget(self, row: Row) -> None:
        """The row does not begin, or it begins otherwise."""
        kept = self._kept.get(row.prefix)
        if kept is not None and row.number in kept.expect:
            self._unexpect(kept, row)

    def _expect(self, kept: _Kept, row: Row) -> None:
        if not kept.expect:
            self._ledger.give_up(kept.tokens, self._marks(kept.names))
        kept.expect.add(row.number)

    def _unexpect(self, kept: _Kept, row: Row) -> None:
        kept.expect.remove(row.number)
        if not kept.expect:
            self._ledger.keep(kept.tokens, self._marks(kept.names))

    def chunk(self, row: Row, start: int) -> bool:
        """A chunk of the row is announced, from `start` to `row.prefilled`. Returns whether the row takes its
        prefix, which is then kept no longer."""
        takes = start == row.reused and self._begin(row)
        if row.prefilled in row.cuts:
            self._keep(row, tuple(pair for pair in row.names if pair[0] == row.prefilled))
        elif self._any and not row.remaining:
            self._keep(row, row.names)
        return takes

    def _begin(self, row: Row) -> bool:
        self._see(_lasting(row))
        row.marks = ()
        kept = self._kept.get(row.prefix)
        if kept is None:
            return False
        expected = row.number in kept.expect
        self.forget(row)
        self._kept.move_to_end(row.prefix)
        kept.spent = self._any and row.continues
        if self._mark_every:
            row.marks = tuple(pair for pair in kept.names if pair[0] <= row.reused)
        takes = expected and not kept.expect and not self._ledger.has_room()
        if takes:
            self._remove(row.prefix)
            self._ledger.mark(len(row.marks))  # which the row has from now on
            self._taken[row.number] = len(row.marks)
        return takes

    def finished(self, row: Row, tokens: int, last: control.RowOutput) -> None:
        """Keeps a row that has ended with `tokens` tokens generated, without the last, which no step
        computed. `last` has the names of its answer.

        Raises InvalidInput (BAD_PREFIXES).
        """
        whole = row.prompt_tokens + tokens - 1
        more = split(last.prefixes, whole, row.prompt_tokens, last.ends)
        if self._any and more:
            self._keep(row, row.names + more)

    def left(self, row: Row) -> None:
        """The next step evicts the row, whose memory is free: what it has computed is kept in its place."""
        self._ledger.mark(-self._taken.pop(row.number, 0))
        names = self._pending.pop(row.number, ())
        if self._any and row.begun:
            self._keep(row, names or tuple(pair for pair in row.names if pair[0] <= row.prefilled))

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
        number = self._add(_Kept(names if self._any else names[-1:], chain.tokens))
        restore = control.Restore(prefix=number, recall=recall, tokens=chain.tokens, name=chain.names[-1])
        self._moves.append(control.Change(restore=restore))
        return True

    def _make_room(self, row: Row, tokens: int) -> bool:
        """Drops others for a prefix, or for the row that is to continue it, if that is enough."""
        needed = max(tokens, len(row.group) * row.reserved)
        if not self._ledger.fits(self._reserved + needed):
            return False
        return self._free(needed)

    def changes(self) -> list[control.Change]:
        """Adoptions, then what is restored, keeps and what is dropped for them."""
        while not self._ledger.has_room() and (number := self._worst()):
            self._drop(number)
        changes, self._adopting, self._moves = [*self._adopting, *self._moves], [], []
        return changes

    def _adopt(self, earlier: Sequence[tuple[Origin, Names]]) -> Iterator[control.Change]:
        """Adopts prefixes of an earlier epoch while there is room, the newest first."""
        for origin, names in reversed(earlier):
            if len(self._kept) < MAX_KEPT and self._ledger.has_room(origin.tokens):
                number = self._add(_Kept(names[-1:] if self._exact else names, origin.tokens))
                self._kept.move_to_end(number, last=False)
                adopt = control.Adopt(prefix=number, epoch=origin.epoch, row=origin.row, tokens=origin.tokens)
                yield control.Change(adopt=adopt)

    def _keep(self, row: Row, names: Names) -> None:
        """Keeps a prefix if there is room, in place of the prefixes that it continues.

        For a copy of a row that has its memory nothing is dropped but what is spent. If that is not enough,
        an answer is kept when the row leaves.
        """
        if not names:
            return
        length, longest = names[-1]
        if found := self._named.get(longest):
            self._kept[max(found)].spent = False
            self._kept.move_to_end(max(found))
            return
        continued = names if self._any else row.marks
        if self._mark_every:
            names = _thinned(row.marks + names, MOST)
        if self._any and row.number in self._ledger and not self._would_hold(length, names):
            if length > row.prompt_tokens:
                self._pending[row.number] = names
            return
        while not self._ledger.fits(length, self._marks(names)):
            if self._any or len(names) == 1:
                return
            names = _thinned(names, len(names) - 1)
        for number in self._continued_by(continued):
            self._drop(number)
        if not self._free(length, self._marks(names)):
            return
        row.marks = names if self._mark_every else ()
        if (before := self._kept.get(row.prefix)) is not None and row.continues:
            before.spent = True
        prompt = row.prompt_tokens if self._exact else min(length, row.prompt_tokens)
        number = self._add(_Kept(names, prompt, row.continues))
        keep = control.Keep(prefix=number, row=row.number, tokens=length)
        keep.marks.extend(other for other, _ in row.marks[:-1])
        self._moves.append(control.Change(keep=keep))

    def _continued_by(self, names: Names) -> list[int]:
        """The prefixes that end where one with these names goes on."""
        found = (number for _, name in names for number in sorted(self._named.get(name, ())))
        ends = {name for _, name in names}
        return [each for each in dict.fromkeys(found) if self._kept[each].names[-1][1] in ends]

    def _would_hold(self, tokens: int, names: Names) -> bool:
        """Whether there is room beside all that is not spent."""
        gone = {number for number, kept in self._kept.items() if kept.spent}.union(self._continued_by(names))
        gone = {number for number in gone if not self._kept[number].expect}
        freed = sum(self._kept[number].tokens for number in gone)
        full = len(self._kept) - len(gone) >= MAX_KEPT
        return not full and self._ledger.has_room(tokens - freed)

    def _free(self, tokens: int, marks: int = 0) -> bool:
        """Drops prefixes for one of this number of tokens, with `marks` marks besides its end."""
        while len(self._kept) >= MAX_KEPT or not self._ledger.has_room(tokens, marks):
            number = self._worst()
            if not number:
                return False
            self._drop(number)
        return True

    def _worst(self) -> int:
        """The prefix that goes first; 0 where each is expected by a row."""
        candidates = [number for number, kept in self._kept.items() if not kept.expect]
        spent = next((number for number in candidates if self._kept[number].spent), 0)
        if spent or not candidates:
            return spent
        conversations = sum(kept.tokens for kept in self._kept.values() if kept.continues)
        if 2 * conversations <= sum(kept.tokens for kept in self._kept.values()):
            candidates.sort(key=lambda number: self._kept[number].continues)
        return candidates[0]

    def _add(self, kept: _Kept) -> int:
        self._last += 1
        self._kept[self._last] = kept
        for _, name in kept.names:
            self._named.setdefault(name, set()).add(self._last)
        self._ledger.keep(kept.tokens, self._marks(kept.names))
        return self._last

    def _marks(self, names: Names) -> int:
        """Marks besides a prefix's end."""
        return len(names) - 1 if self._exact else 0

    def _drop(self, number: int) -> None:
        self._remove(number)
        self._moves.append(control.Change(drop=control.Drop(prefix=number)))

    def _remove(self, number: int) -> None:
        kept = self._kept.pop(number)
        for _, name in kept.names:
            self._named[name].remove(number)
            if not self._named[name]:
                del self._named[name]
        if not kept.expect:
            self._ledger.give_up(kept.tokens, self._marks(kept.names))

    def _see(self, names: Names) -> None:
        if self._exact:
            for _, name in names:
                self._seen[name] = None
                self._seen.move_to_end(name)
            while len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)


def _lasting(row: Row) -> Names:
    """The names of a row's prompt that the next turn has as well, whatever the template makes of its end."""
    return tuple(pair for pair in row.names if pair[0] <= row.prompt_tokens - OPENING)


def _thinned(names: Names, most: int) -> Names:
    left = set(thinned((length for length, _ in names), most))
    return tuple(pair for pair in names if pair[0] in left)
