"""KV memory of a ring: what is reserved for every row before its first chunk, and the lane that it gets.

A lane's rows share one batch cache per layer in which every row is as long as the longest (mlx-lm pads), so
a lane is charged its number of rows times the longest reservation among them. Reservations are rounded up to
the block size in which caches grow. Every member holds different layers, so each has its own figures; a row
is admitted only if it fits on all members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from sealring.gateway.scheduler.facts import MemberMemory, RingFacts
from sealring.gateway.scheduler.request import Row
from sealring.mesh.ring.composition import MAX_LANES

BLOCK = 256
"""Tokens by which an mlx-lm KV cache grows."""

_UNBOUNDED = 1 << 40


def rounded(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


class Kept(NamedTuple):
    """Numbers of kept prefixes, of their tokens, and of the marks of prefixes and rows."""

    prefixes: int = 0
    tokens: int = 0
    marks: int = 0


class Ledger:
    """Reservations by lane. The cost table says how large lanes ought to be (`RingFacts.lanes`), and a row
    that comes joins one that is smaller: rows that leave make up for the rest, and none is ever copied from
    lane to lane. A ring has room for two lanes whatever the table says, so that a long row does not make
    every other as long.
    """

    def __init__(self, ring: RingFacts) -> None:
        self.members = ring.members
        self._distinct = tuple(dict.fromkeys(ring.members))  # few: members of a long ring are mostly alike
        self._ring = ring
        self._sizes: dict[int, Counter[int]] = {}  # of each lane's rows
        self._held: dict[int, tuple[int, int]] = {}  # row -> its lane and size
        self.tokens = 0
        self.capacity = self._capacity()

    def _capacity(self) -> int:
        """Tokens of the longest row that fits when it is alone."""
        room = _UNBOUNDED
        for member in self.members:
            left = member.kv_budget - member.kv_bytes_per_row
            if left < 0:
                return 0
            if member.kv_bytes_per_token:
                room = min(room, left // member.kv_bytes_per_token // BLOCK * BLOCK)
        return room

    @property
    def rows(self) -> int:
        return len(self._held)

    def __contains__(self, row: int) -> bool:
        return row in self._held

    def usage(self) -> float:
        """The reserved part of the budget on the member that is fullest, 0 to 1."""
        used = [(_bytes(each, self.tokens, self.rows), each.kv_budget) for each in self._distinct]
        return max((part / budget for part, budget in used if budget), default=0.0)

    def choose_lane(self, tokens: int, coming: int = 1) -> int | None:
        """The lane in which a new row has the shortest rounds among those where it fits, and first of all
        those that ought to be larger; None when it must wait. A lane without rows has the next free number.

        `coming` rows like it are there now, itself among them: lanes ought to have the sizes that are best
        with as many of them as there is room for.
        """
        size = rounded(tokens)
        order = sorted(self._sizes, key=lambda lane: -self._sizes[lane].total())
        context = self._context(size)
        more = max(1, min(coming, self._room(size)))
        wanted = self._ring.lanes(min(self.rows + more, self._ring.max_rows), context)
        if len(order) < min(MAX_LANES, max(2, len(wanted))):
            order.append(next(lane for lane in count() if lane not in self._sizes))
        sizes = [self._sizes[lane].total() if lane in self._sizes else 0 for lane in order]
        rounds = self._ring.rounds_with_another(sizes, context)

        def preference(place: int) -> tuple[bool, float, int, int]:
            larger = place < len(wanted) and sizes[place] < wanted[place]
            return not larger, rounds[place], sizes[place], self._growth(order[place], size)

        fitting = [place for place, lane in enumerate(order) if self.fits(self._growth(lane, size))]
        best = min(fitting, key=preference, default=None)
        return None if best is None else order[best]

    def _context(self, size: int) -> int:
        """Tokens in the mean row's cache, half of what is reserved, as a power of two: few values, of which
        each has a table of lanes. 0 below a thousand, where caches cost little."""
        mean = (self.tokens + size) // (self.rows + 1) // 2
        return 0 if mean < 1024 else 1 << (mean.bit_length() - 1)

    def _room(self, size: int) -> int:
        """Rows of this size that the memory still holds."""
        return min(
            (each.kv_budget - _bytes(each, self.tokens, self.rows)) // max(1, _bytes(each, size, 1))
            for each in self._distinct
        )

    def reserve(self, row: int, lane: int, tokens: int) -> None:
        size = rounded(tokens)
        self.tokens += self._growth(lane, size)
        self._sizes.setdefault(lane, Counter())[size] += 1
        self._held[row] = lane, size

    def reserve_all(self, rows: Sequence[Row], tokens: int, coming: int = 1) -> bool:
        """Places and reserves as much for each of several rows, or nothing when one does not fit. `coming`
        requests are there now."""
        if self.rows + len(rows) > self._ring.max_rows:
            return False
        for done, row in enumerate(rows):
            lane = self.choose_lane(tokens, coming + len(rows) - done - 1)
            if lane is None:
                for other in rows[:done]:
                    self.release(other.number)
                return False
            self.reserve(row.number, lane, tokens)
        return True

    def lane_of(self, row: int) -> int:
        """The lane that a row was placed in."""
        return self._held[row][0]

    def release(self, row: int) -> tuple[int, int]:
        """Returns the lane that the row was placed in, and its tokens there."""
        lane, size = self._held.pop(row)
        sizes = self._sizes[lane]
        sizes[size] -= 1
        if not sizes[size]:
            del sizes[size]
        if not sizes:
            del self._sizes[lane]
        self.tokens -= self._growth(lane, size)
        return lane, size

    def grow(self, row: int, tokens: int) -> bool:
        """Reserves more for a row in its lane; False, and nothing changes, when it does not fit."""
        lane, size = self.release(row)
        fits = self.fits(self._growth(lane, rounded(tokens)))
        self.reserve(row, lane, tokens if fits else size)
        return fits

    def has_room(self, kept: Kept) -> bool:
        """Whether rows, and these prefixes, fit on every member."""
        return all(
            _bytes(member, self.tokens, self.rows) + _kept_bytes(member, kept) <= member.kv_budget
            for member in self._distinct
        )

    def fits(self, tokens: int, marks: int = 0) -> bool:
        """Whether one more row of `tokens` tokens, or a prefix of as many with `marks` marks, fits beside the
        rows if nothing else is kept."""
        tokens, rows = self.tokens + tokens, self.rows + (not marks)
        return all(
            _bytes(member, tokens, rows) + member.mark_bytes * marks <= member.kv_budget
            for member in self._distinct
        )

    def kept_bytes(self, kept: Kept) -> list[int]:
        """Bytes of these prefixes per member, in the order of ranks."""
        return [_kept_bytes(member, kept) for member in self.members]

    def _growth(self, lane: int, size: int) -> int:
        """Tokens by which a lane grows when a row of this size joins."""
        sizes = self._sizes.get(lane, Counter())
        rows, longest = sizes.total(), max(sizes, default=0)
        return (rows + 1) * max(size, longest) - rows * longest


def _bytes(member: MemberMemory, tokens: int, rows: int) -> int:
    return member.kv_bytes_per_token * tokens + member.kv_bytes_per_row * rows


def _kept_bytes(member: MemberMemory, kept: Kept) -> int:
    """Windows and states of a prefix are stored as its last mark, so they are counted there."""
    rows = 0 if member.mark_bytes else kept.prefixes
    return _bytes(member, kept.tokens, rows) + member.mark_bytes * kept.marks
