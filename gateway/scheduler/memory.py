"""KV memory of a ring: what is reserved for every row on every member before its first chunk.

A lane's rows share one batch cache per layer in which every row is as long as the longest (mlx-lm pads), so
a lane is charged its number of rows times the longest reservation among them. Reservations are rounded up to
the block size in which caches grow. Every member holds different layers, so each has its own figures; a row
is admitted only if it fits on all members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sealring.gateway.scheduler.facts import MemberMemory, RingFacts
from sealring.gateway.scheduler.request import Row

BLOCK = 256
"""Tokens by which an mlx-lm KV cache grows."""

_UNBOUNDED = 1 << 40


def rounded(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


class Ledger:
    """Reservations by lane. A ring with a single lane gets a spare one, for rows that would make every row of
    the first too long for the memory."""

    def __init__(self, ring: RingFacts) -> None:
        self.members = ring.members
        self._distinct = tuple(dict.fromkeys(ring.members))  # few: members of a long ring are mostly alike
        self._max_rows = ring.max_rows
        self._regular = ring.lanes
        self.lanes = max(2, ring.lanes)
        self._sizes: list[Counter[int]] = [Counter() for _ in range(self.lanes)]  # of each lane's rows
        self._held: dict[int, tuple[int, int]] = {}  # row -> its lane and size
        self.tokens = 0
        self.kept_tokens = 0
        self._kept = 0
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

    def place(self, tokens: int) -> int | None:
        """The lane with the fewest rows in which a new row fits; None when it must wait."""
        size = rounded(tokens)
        fitting = (lane for lane in range(self.lanes) if self.fits(self._growth(lane, size)))

        def preference(lane: int) -> tuple[bool, int, int]:
            return lane >= self._regular, self._sizes[lane].total(), self._growth(lane, size)

        return min(fitting, key=preference, default=None)

    def reserve(self, row: int, lane: int, tokens: int) -> None:
        size = rounded(tokens)
        self.tokens += self._growth(lane, size)
        self._sizes[lane][size] += 1
        self._held[row] = lane, size

    def reserve_all(self, rows: Sequence[Row], tokens: int) -> bool:
        """Places and reserves as much for each of several rows, or nothing when one does not fit."""
        if self.rows + len(rows) > self._max_rows:
            return False
        for done, row in enumerate(rows):
            lane = self.place(tokens)
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
        self.tokens -= self._growth(lane, size)
        return lane, size

    def grow(self, row: int, tokens: int) -> bool:
        """Reserves more for a row in its lane; False, and nothing changes, when it does not fit."""
        lane, size = self.release(row)
        fits = self.fits(self._growth(lane, rounded(tokens)))
        self.reserve(row, lane, tokens if fits else size)
        return fits

    def keep(self, tokens: int) -> None:
        """Counts a kept prefix. Rows take precedence over it."""
        self.kept_tokens += tokens
        self._kept += 1

    def give_up(self, tokens: int) -> None:
        self.kept_tokens -= tokens
        self._kept -= 1

    def has_room(self, tokens: int = 0) -> bool:
        """Whether rows, kept prefixes and one more prefix of `tokens` tokens (0: none) fit on every
        member."""
        return self._holds(self.tokens + self.kept_tokens + tokens, self.rows + self._kept + (tokens > 0))

    def fits(self, tokens: int) -> bool:
        """Whether one more row of `tokens` tokens fits beside the others if no prefix is kept."""
        return self._holds(self.tokens + tokens, self.rows + 1)

    def kept_bytes(self) -> list[int]:
        """Bytes of kept prefixes per member, in the order of ranks."""
        return [_bytes(member, self.kept_tokens, self._kept) for member in self.members]

    def _growth(self, lane: int, size: int) -> int:
        """Tokens by which a lane grows when a row of this size joins."""
        sizes = self._sizes[lane]
        rows, longest = sizes.total(), max(sizes, default=0)
        return (rows + 1) * max(size, longest) - rows * longest

    def _holds(self, tokens: int, rows: int) -> bool:
        return all(_bytes(member, tokens, rows) <= member.kv_budget for member in self._distinct)


def _bytes(member: MemberMemory, tokens: int, rows: int) -> int:
    return member.kv_bytes_per_token * tokens + member.kv_bytes_per_row * rows
