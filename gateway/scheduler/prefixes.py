"""The prefixes of prompts and answers that a ring keeps for later rows, by name (mesh.ring.prefix_names).

Rows come first: prefixes are kept in memory that no row uses. If caches can be cut (PREFIX_SUPPORT_ANY), a
prompt is kept when it is prefilled and, with its answer, when that ends; any number of its tokens can be
reused. If they cannot (PREFIX_SUPPORT_EXACT), a chunk ends at each length that is worth keeping. One is
before the last tokens, for the next turn of the conversation; one is the longest prefix that an earlier
prompt had in common. There members mark it (mesh.ring.prefix_marks): they keep its windows and states. A row
that ends is kept where it is, behind its last token or before it. A longer prefix takes the place of those
that it continues, and can be reused at their marks. If there is no room for a copy, a prompt is only marked.

**One conversation is held once.** A row that continues a prefix has its tokens, too. While the row waits for
its first chunk, the prefix is in the memory that is reserved for the row. If there is no more, the row takes
it with its first chunk, and what it has computed is kept with the step that evicts it, in its own place.
A row in line waits for tokens that another row computes, and that row is kept where their prompts part.

**What goes** when rows need the room: first a prefix that a row or another prefix continues, then marks, then
a prefix that no later prompt has continued, then the least recently used. Last is what rows that wait would
begin with. Of marks, the last to go is that behind what the user has asked. A template that leaves out what
was thought goes on there. Conversations go before others' first prompts only while they hold more than half
of what is kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sealring.gateway.scheduler.board import Board
from sealring.gateway.scheduler.memory import Kept, Ledger, rounded
from sealring.gateway.scheduler.request import Row
from sealring.mesh.ring.kept_prefixes import Origin
from sealring.mesh.ring.prefix_marks import MOST, thinned
from sealring.mesh.ring.prefix_names import OPENING, STORED_BLOCK, Chain, Names, edges, split
from sealring.v1 import control_pb2 as control

MAX_KEPT = 256
MAX_SEEN = 1 << 16
"""Names of prompts that are remembered, to find what prompts have in common."""

LEAST_STORED, STORED_PART = 1024, 16
"""Windows and states are written whole, up to some hundred MB each time. They are if this many tokens more,
and this part of those before, are stored then: at most that is computed again after a restart."""

LEAST_IDLE = 256
"""Tokens that an idle ring prefills at least: fewer take no time that a user would notice."""

_IDLE_MARKS = 3
"""A row, and marks for the last tokens of its prompt and on the way."""


@dataclass(slots=True, eq=False)
class _Kept:
    """A prefix whose last name is of all of its tokens. Where caches cannot be cut, it can be reused at those
    of its names that the board has marks of.

    Its first `prompt` tokens were a prompt. A row continues the prefix if it shares these but for the last
    OPENING, or all up to the user's last question, where `question` is (0 tokens: unknown). `continues` is
    whether the row that made it continued another prefix. It is `spent` once what continues it is kept, or
    is in a row that runs.
    """

    names: Names
    prompt: int
    continues: bool = False
    spent: bool = False
    question: tuple[int, bytes] = (0, b"")

    @property
    def tokens(self) -> int:
        return self.names[-1][0]

    @property
    def begin(self) -> int:
        """The length from which on a row continues it."""
        return min(self.prompt - OPENING, self.question[0] or self.prompt)


class PrefixCache:
    """The kept prefixes of one epoch, as the board is to have them with the next step."""

    def __init__(
        self,
        ledger: Ledger,
        board: Board,
        support: control.PrefixSupport.ValueType,
        earlier: Sequence[tuple[Origin, Names]] = (),
        mark_every: int = 0,
        *,
        stores: bool = False,
        prompts_alone: bool = False,
    ) -> None:
        """`earlier`, `mark_every` and `prompts_alone` as in RingFacts. `stores`: members store prefixes on
        disk."""
        self._ledger = ledger
        self._board = board
        self._any = support == control.PREFIX_SUPPORT_ANY
        self._exact = support == control.PREFIX_SUPPORT_EXACT
        self._mark_every = mark_every
        self._stores = stores
        self._prompts_alone = prompts_alone
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # least recently used first
        self._expected: dict[int, dict[int, int]] = {}
        """Prefixes that rows will begin with: which rows, and the tokens that they share. Their reservations
        pay for the prefix, so it costs nothing itself."""

        self._named: dict[bytes, set[int]] = {}  # which of these have a name
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[int, Names] = {}  # rows whose answers are kept when they leave
        self._marked: dict[int, Row] = {}  # rows that have marks, in the order in which they got some
        self._coming: dict[bytes, Row] = {}  # names that rows which have begun will reach
        self._last = 0
        if self._any or self._exact:
            self._adopt(earlier)

    def longest(self, row: Row) -> tuple[int, int]:
        """Tokens of the longest kept prefix that a row could begin with, and its number; 0 without one."""
        for length, name in reversed(row.names):
            found = self._with(length, name)
            if found and length < row.prompt_tokens:
                return length, found[-1]
        return 0, 0

    def _with(self, length: int, name: bytes) -> list[int]:
        """The prefixes that can be reused at this length, rising."""
        found = sorted(self._named.get(name, ()))
        if self._any:
            return found
        return [number for number in found if length in self._board.kept.marks.of_prefix(number)]

    def _names(self, number: int) -> Names:
        """The names of the lengths at which a prefix can be reused."""
        names = self._kept[number].names
        if self._any:
            return names
        marks = self._board.kept.marks.of_prefix(number)
        return tuple(pair for pair in names if pair[0] in marks)

    def _marks_of(self, row: Row) -> Names:
        """The names of the lengths at which a row is marked, where caches cannot be cut."""
        marks = self._board.kept.marks.of_row(row.number) if self._exact else ()
        return tuple(pair for pair in row.names if pair[0] in marks) if marks else ()

    def secured(self, row: Row) -> int:
        """As `longest`, of a row that has its memory: 0 if what it would begin with is dropped before."""
        length, number = self.longest(row)
        stays = length and (self._kept[number].tokens <= row.reserved or self.has_room())
        return length if stays else 0

    @property
    def has_pending(self) -> bool:
        """Whether an answer is kept only once its row leaves."""
        return bool(self._pending)

    def waits_for(self, row: Row) -> bool:
        """Whether a row continues an answer or begins at a mark that is kept only once its row leaves."""
        pending = {name for names in self._pending.values() for _, name in names}
        closed = (one for one in self._marked.values() if one.closed)
        pending.update(name for one in closed for _, name in self._marks_of(one))
        for length, name in reversed(row.names) if pending else ():
            if self._with(length, name):
                return False
            if name in pending:
                return True
        return False

    def pays(self, row: Row) -> bool:
        """Whether an idle ring is to prefill this row: enough is not kept, and nothing is given up for it."""
        self.prepare(row)  # what it continues counts nothing then
        room = self.has_room(rounded(row.reserved), _IDLE_MARKS)
        self.forget(row)
        return room and row.prompt_tokens - row.reused >= LEAST_IDLE

    def prepare(self, row: Row) -> None:
        """Finds where a row that has not begun would begin, and where it would be cut."""
        self.forget(row)
        row.cuts = ()
        row.reused, row.prefix = self.longest(row)
        kept = self._kept.get(row.prefix)
        row.continues = kept is not None and row.reused >= kept.begin
        if kept is not None and kept.tokens <= row.reserved:
            self._expected.setdefault(row.prefix, {})[row.number] = row.reused
        usable = _lasting(row)
        row.awaits = self._awaited(row, usable)
        if self._exact and usable:
            common = next((length for length, name in reversed(usable) if name in self._seen), 0)
            cuts = {usable[-1][0], *self._between(row.reused, usable)}
            cuts.update(self._to_store(row, dict(usable), common, usable[-1][0]))
            if common > row.reused + OPENING:  # fewer tokens are soon computed again
                cuts.add(common)
            row.shared = (common,)
            row.cuts = tuple(sorted(cut for cut in cuts if cut > row.reused))

    def _awaited(self, row: Row, usable: Names) -> Row | None:
        """The row that computes more of this prompt than is kept. It is then kept up to there."""
        for length, name in reversed(usable):
            if length <= row.reused + OPENING:
                break
            other = self._coming.get(name)
            if other is not None and self._board.held(other.number) < length:
                other.shared = (*other.shared, length)
                other.cuts = tuple(sorted({*other.cuts, length}))
                row.request.progress.deadline = math.inf  # its beginning is computed
                return other
        return None

    def _arrived(self, row: Row) -> None:
        """The row computes nothing more of its prompt."""
        self._coming = {name: other for name, other in self._coming.items() if other is not row}

    def _between(self, start: int, usable: Names) -> Iterator[int]:
        """Lengths at which a long prompt is marked on the way."""
        every = max(self._mark_every, usable[-1][0] // MOST)
        for length, _ in usable:
            if length >= start + every:
                yield length
                start = length

    def _to_store(self, row: Row, usable: Container[int], *lengths: int) -> Iterator[int]:
        """Lengths at which a prompt is cut so that members can store it: the last usable edges of blocks
        before these, if enough is stored then that was not before."""
        if not self._stores or row.request.sealed:
            return
        found = [length for length in edges(max(lengths)) if length in usable]
        for length in lengths:
            edge = max((one for one in found if one <= length), default=0)
            if edge >= row.stored + max(LEAST_STORED, row.stored // STORED_PART):
                yield edge

    def forget(self, row: Row) -> None:
        """The row does not begin, or it begins otherwise."""
        rows = self._expected.get(row.prefix, {})
        if rows.pop(row.number, None) is not None and not rows:
            del self._expected[row.prefix]

    def cut(self, row: Row) -> None:
        """A chunk of the row is announced."""
        end = self._board.held(row.number)
        if end in row.cuts:
            names = tuple(pair for pair in row.names if pair[0] <= end)
            if end in (*row.shared, row.cuts[-1]):
                self._keep(row, names if self._any else names[-1:])
            else:
                self._mark(row, names[-1])
        elif self._any and end == row.prompt_tokens:
            self._keep(row, row.names)
        if end == row.prompt_tokens:
            self._arrived(row)

    def begin(self, row: Row) -> bool:
        """The row's first chunk is to be announced. Returns whether the row takes its prefix, which is then
        kept no longer."""
        self._see(_lasting(row))
        if self._any or self._exact:
            self._coming = {**dict.fromkeys((name for _, name in _lasting(row)), row), **self._coming}
        kept = self._kept.get(row.prefix)
        if row.request.by_user:
            row.question = next(reversed(_lasting(row)), row.question)
        elif kept is not None and kept.question[0] <= row.reused:
            row.question = kept.question
        if kept is None:
            return False
        expected = row.number in self._expected.get(row.prefix, ())
        self.forget(row)
        self._kept.move_to_end(row.prefix)
        kept.spent = row.continues
        if self._exact:  # it has marks there, of which it may have no names
            before = [pair for pair in self._names(row.prefix) if pair[0] <= row.reused]
            row.names = tuple(sorted({**dict(row.names), **dict(before)}.items()))
            self._marked[row.number] = row
        takes = expected and row.prefix not in self._expected and not self.has_room()
        if takes:
            self._remove(row.prefix)
        return takes

    def finished(self, row: Row, held: int, tokens: int, last: control.RowOutput) -> None:
        """Keeps a row that has ended with `tokens` tokens generated, and has `held` tokens of prompt and
        answer in its caches: the last one only if another step was under way. `last` has the names of its
        answer.

        Raises InvalidInput (BAD_PREFIXES).
        """
        more = split(last.prefixes, row.prompt_tokens + tokens, row.prompt_tokens, last.ends)
        if self._prompts_alone:
            return
        names = row.names + tuple(pair for pair in more if pair[0] <= held)
        if self._any and len(names) > len(row.names):
            self._keep(row, names)
        elif self._exact and more and names and names[-1][0] == held:
            row.names = names
            self._keep(row, names[-1:])

    def keeps_end(self, row: Row) -> bool:
        """Whether a row that has ended is to be kept, which goes on behind its end and cannot be cut
        there."""
        return self._exact and row.number in self._pending

    def left(self, row: Row) -> None:
        """The row is evicted next, and its memory is free: what it has computed is kept in its place."""
        self._arrived(row)
        names = self._pending.pop(row.number, ())
        self._marked.pop(row.number, None)  # its marks are not given up for what is kept of it
        if self._any and row.begun:
            held = self._board.held(row.number)
            self._keep(row, names or tuple(pair for pair in row.names if pair[0] <= held))
        elif self._exact:
            self._keep(row, names or self._marks_of(row)[-1:])
        self._marked.pop(row.number, None)

    def restore(self, row: Row, recall: int, chain: Chain) -> bool:
        """Keeps what all members have read of the prompt of a row that has its memory, in that memory."""
        names = tuple(pair for pair in row.names if pair[0] <= chain.tokens)
        if not names or names[-1][0] != chain.tokens:
            return False
        if len(self._kept) >= MAX_KEPT:
            if not (victim := self._victim()):
                return False
            self._drop(victim)
        number = self._add(_Kept(names if self._any else names[-1:], chain.tokens))
        restore = control.Restore(prefix=number, recall=recall, tokens=chain.tokens, name=chain.names[-1])
        self._board.plan(control.Change(restore=restore))
        self.prepare(row)  # it is in the row's memory from now on
        return True

    def has_room(self, tokens: int = 0, marks: int = 0) -> bool:
        """Whether rows, and all that is kept, fit on every member with one more prefix of `tokens` tokens (0:
        none) and `marks` new marks."""
        kept = self.counted
        if tokens or marks:
            marks = kept.marks + marks if self._exact else 0
            kept = Kept(kept.prefixes + (tokens > 0), kept.tokens + tokens, marks)
        return self._ledger.has_room(kept)

    @property
    def counted(self) -> Kept:
        """What is kept beside the rows' own memory: prefixes that no row expects, and where caches cannot be
        cut all marks but one. A row that begins before the end of a prefix that it takes has no mark there:
        until then, that mark is in the row's memory for windows and states. The mark where a row begins is
        there beside them."""
        prefixes, tokens = len(self._board.kept), self._board.kept.tokens
        marks = self._board.marks if self._exact else 0
        for number, rows in self._expected.items():
            end = self._kept[number].tokens
            prefixes, tokens = prefixes - 1, tokens - end
            marks -= self._exact and max(rows.values()) < end and end in self._board.kept.marks.alone(number)
        return Kept(prefixes, tokens, marks)

    def kept_bytes(self) -> list[int]:
        """Bytes of kept prefixes and marks per member, in the order of ranks."""
        return self._ledger.kept_bytes(self.counted)

    def make_room(self) -> bool:
        """Gives up what there is no room for beside rows; whether rows that wait would begin with some of
        it."""
        expected = False
        if not (self._kept or self._marked):
            return expected
        while not (room := self.has_room()) and self._give_up_least():
            pass
        while not room and self._kept:
            self._drop(next(iter(self._kept)))  # rows that wait expect it, and others have its memory
            room, expected = self.has_room(), True
        return expected

    def _adopt(self, earlier: Sequence[tuple[Origin, Names]]) -> None:
        """Adopts prefixes of an earlier epoch while there is room, the newest first."""
        for origin, names in reversed(earlier):
            marks = len(names) if self._exact else 0
            while marks > 1 and not self.has_room(origin.tokens, marks):
                marks //= 2
            if len(self._kept) < MAX_KEPT and self.has_room(origin.tokens, marks):
                names = _thinned(names, marks) if self._exact else names
                number = self._add(_Kept(names, origin.tokens))
                self._kept.move_to_end(number, last=False)
                adopt = control.Adopt(prefix=number, epoch=origin.epoch, row=origin.row, tokens=origin.tokens)
                if self._exact:
                    adopt.marks.extend(length for length, _ in names[:-1])
                self._board.plan(control.Change(adopt=adopt))

    def _keep(self, row: Row, names: Names) -> None:
        """Keeps a prefix if there is room.

        For a copy of a row that has its memory nothing is dropped but what is spent. If that is not enough,
        a prompt is only marked, and an answer is kept when the row leaves.
        """
        if not names:
            return
        length, runs = names[-1][0], row.number in self._ledger
        inside = runs and length <= row.prompt_tokens
        if found := self._with(*names[-1]):
            self._kept[found[-1]].spent = False
            self._kept.move_to_end(found[-1])
        elif not runs or self._would_hold(length, names):
            self._replace(row, names)
            return
        elif not inside:
            self._pending[row.number] = names
        if self._exact and inside:
            self._mark(row, names[-1])

    def _replace(self, row: Row, names: Names) -> None:
        """Keeps a prefix if there is room, in place of the prefixes that it continues."""
        length = names[-1][0]
        marks = self._marks_of(row)
        for number in self._continued_by(names if self._any else marks):
            self._drop(number)
        more = int(self._exact and names[-1] not in marks)
        if not self._ledger.fits(length, int(self._exact)) or not self._free(length, more):
            return
        if self._exact:
            marks = self._marks_of(row)
            names = _thinned({*marks, *names}, MOST, row.question)
        if (before := self._kept.get(row.prefix)) is not None and row.continues:
            before.spent = True
        prompt = row.prompt_tokens if self._exact else min(length, row.prompt_tokens)
        number = self._add(_Kept(names, prompt, row.continues, question=row.question))
        keep = control.Keep(prefix=number, row=row.number, tokens=length)
        if self._exact:
            keep.marks.extend(other for other, _ in names[:-1])
            if names[-1] not in marks:
                self._board.settle(row.number)  # it is kept whole, as it is at its end
                self._marked[row.number] = row
        self._board.plan(control.Change(keep=keep))

    def _mark(self, row: Row, pair: tuple[int, bytes]) -> None:
        """Marks a row where its last chunk ends, in place of what is worth less."""
        marks = self._marks_of(row)
        names = _thinned({*marks, pair}, MOST, row.question)
        if pair in marks or pair not in names:
            return
        self._unmark(row, names)
        while not self.has_room(marks=1):
            if not self._give_up_least(row):
                if self._stores and pair[0] % STORED_BLOCK == 0:  # for a moment, in which members copy it
                    self._board.plan(control.Change(mark=control.Mark(row=row.number, tokens=pair[0])))
                    self._board.plan(control.Change(unmark=control.Unmark(row=row.number, marks=[pair[0]])))
                return
        self._marked[row.number] = row
        self._board.plan(control.Change(mark=control.Mark(row=row.number, tokens=pair[0])))

    def _unmark(self, row: Row, left: Names) -> bool:
        """Gives up the marks of a row that are not to be left; whether there are any."""
        gone = [pair[0] for pair in self._marks_of(row) if pair not in left]
        if gone:
            self._board.plan(control.Change(unmark=control.Unmark(row=row.number, marks=gone)))
        return bool(gone)

    def _continued_by(self, names: Names) -> list[int]:
        """The prefixes that end where one with these names goes on."""
        found = (number for pair in names for number in self._with(*pair))
        ends = {name for _, name in names}
        return [each for each in dict.fromkeys(found) if self._kept[each].names[-1][1] in ends]

    def _would_hold(self, tokens: int, names: Names) -> bool:
        """Whether there is room beside all that is not spent."""
        gone = {number for number, kept in self._kept.items() if kept.spent}
        gone.update(self._continued_by(names))
        gone.difference_update(self._expected)
        freed = sum(self._kept[number].tokens for number in gone)
        full = len(self._kept) - len(gone) >= MAX_KEPT
        return not full and self.has_room(tokens - freed, 1)

    def _free(self, tokens: int, marks: int = 0) -> bool:
        """Gives up prefixes and marks for a prefix of this number of tokens, with `marks` new marks."""
        while len(self._kept) >= MAX_KEPT or not self.has_room(tokens, marks):
            if len(self._kept) >= MAX_KEPT and (number := self._victim()):
                self._drop(number)
            elif not self._give_up_least():
                return False
        return True

    def _give_up_least(self, marking: Row | None = None) -> bool:
        """Gives up what is worth least; False if nothing is left. Marks go before prefixes: few conversations
        begin anew in their middle, and each goes on. Those of rows are older than where a row goes on, but
        for the last. A row that is `marking` has a newer one soon."""
        if self._board.refused is not None:  # nothing that is planned changes the board any more
            return False
        rows = list(self._marked.values()) if marking is None else [marking, *self._marked.values()]
        if (number := self._victim()) and self._kept[number].spent:
            self._drop(number)
            return True
        if self._give_up_marks():
            return True
        if any(self._give_up_marks_of(row, 0 if row is marking else 1) for row in rows):
            return True
        if self._give_up_marks(questions=True):
            return True
        if number := self._victim():
            self._drop(number)
            return True
        return marking is None and any(self._give_up_marks_of(row, 0) for row in rows)

    def _give_up_marks_of(self, row: Row, least: int) -> bool:
        """Gives up half of a row's marks, so that `least` are left; False if it has no more."""
        marks = self._marks_of(row)
        left = max(least, len(marks) // 2)
        if row.question in marks[:-1]:
            left = max(left, least + 1)
        return self._unmark(row, _thinned(marks, left, row.question))

    def _give_up_marks(self, *, questions: bool = False) -> bool:
        """Gives up half of the marks of the prefix that is longest unused; False if no prefix has any. Its
        end stays, and where a row that waits begins. So does that behind what the user asked, but for
        `questions`."""
        for number, kept in self._kept.items() if self._exact else ():
            alone = set(self._board.kept.marks.alone(number))
            stays = {kept.tokens, *self._expected.get(number, {}).values()}
            names = self._names(number)
            if kept.question in names and not questions:
                stays.add(kept.question[0])
            if not alone - stays:
                continue
            left = _thinned(names, max(len(stays), (1 + len(names)) // 2), kept.question)
            gone = [length for length, _ in names if length not in {*stays, *dict(left)}]
            if not gone:
                continue
            self._board.plan(control.Change(unmark=control.Unmark(prefix=number, marks=gone)))
            return True
        return False

    def _victim(self) -> int:
        """The prefix that goes first; 0 where each is expected by a row."""
        candidates = [number for number in self._kept if number not in self._expected]
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
        return self._last

    def _drop(self, number: int) -> None:
        self._remove(number)
        self._board.plan(control.Change(drop=control.Drop(prefix=number)))

    def _remove(self, number: int) -> None:
        for _, name in self._kept.pop(number).names:
            self._named[name].discard(number)
            if not self._named[name]:
                del self._named[name]
        self._expected.pop(number, None)

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


def _thinned(names: Iterable[tuple[int, bytes]], most: int, question: tuple[int, bytes] = (0, b"")) -> Names:
    """At most `most` of these, as `prefix_marks.thinned`; `question` is among several, if it is one."""
    rising = sorted(names) if most else []
    left = {question[0]} if most > 1 and question in rising else set()
    if rising and rising[-1][0] in left:
        left.clear()
    left.update(thinned((length for length, _ in rising if length not in left), most - len(left)))
    return tuple(pair for pair in rising if pair[0] in left)
