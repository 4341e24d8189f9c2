"""KV memory of a ring: what is reserved for every row on every member before its first chunk.

A lane's rows share one batch cache per layer in which every row is as long as the longest (mlx-lm pads), so
a lane is charged its number of rows times the longest reservation among them. Reservations are rounded up to
the block size in which caches grow. Every member holds different layers, so each has its own figures; a row
is admitted only if it fits on all members.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from sealring.gateway.scheduler.actions import RingFacts
from sealring.gateway.scheduler.row import Row
from sealring.mesh.prompt.composition import MAX_LANES

BLOCK = 256
"""Tokens by which an mlx-lm KV cache grows."""

_UNBOUNDED = 1 << 40


def rounded(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


class Ledger:
    """Reservations by lane. As many as `RingFacts.lanes` are regular; as many again are for rows that would
    make every row of a regular lane too long, and are used for nothing else."""

    def __init__(self, ring: RingFacts) -> None:
        self._members = tuple(
            (member.kv_bytes_per_token, member.kv_bytes_per_row, member.kv_budget) for member in ring.members
        )
        self._distinct = tuple(dict.fromkeys(self._members))
        self.regular = ring.lanes
        self.lanes = min(2 * self.regular, MAX_LANES)
        self._sizes: list[list[int]] = [[] for _ in range(self.lanes)]
        self._alike = LanesAlike(range(self.regular))
        self._others_alike = LanesAlike(range(self.regular, self.lanes))
        self._held: dict[int, tuple[int, int]] = {}
        self._tokens = 0
        self.kept_tokens = 0
        self._kept = 0
        self.capacity = self._capacity()

    def _capacity(self) -> int:
        """Tokens of the longest row that fits when it is alone."""
        room = _UNBOUNDED
        for per_token, per_row, budget in self._members:
            if per_row > budget:
                return 0
            if per_token:
                room = min(room, (budget - per_row) // per_token // BLOCK * BLOCK)
        return room

    @property
    def rows(self) -> int:
        return len(self._held)

    def usage(self) -> float:
        """The reserved part of the budget on the member that is fullest, 0 to 1."""
        return max(
            (
                self._bytes(member, self._tokens, self.rows) / member[2]
                for member in self._distinct
                if member[2]
            ),
            default=0.0,
        )

    def place(self, tokens: int) -> int | None:
        """The lane for a new row: the one with the fewest rows where it fits, or None when it must wait."""
        size = rounded(tokens)
        regular = sorted((rows, _growth(rows, longest, size), longest) for rows, longest in self._alike)
        for rows, growth, longest in regular:
            if self._fits(growth):
                return self._alike.first(rows, longest)
        others = sorted((_growth(rows, longest, size), rows, longest) for rows, longest in self._others_alike)
        for growth, rows, longest in others:
            if self._fits(growth):
                return self._others_alike.first(rows, longest)
        return None

    def reserve(self, row: int, lane: int, tokens: int) -> None:
        size = rounded(tokens)
        self._tokens += self._growth(lane, size)
        insort(self._sizes[lane], size)
        self._note(lane)
        self._held[row] = (lane, size)

    def reserve_all(self, rows: Sequence[Row], tokens: int) -> bool:
        """Places and reserves as much for each of several rows, or nothing when one does not fit."""
        for done, row in enumerate(rows):
            lane = self.place(tokens)
            if lane is None:
                for other in rows[:done]:
                    self.release(other.number)
                return False
            self.reserve(row.number, lane, tokens)
        return True

    def lane_of(self, row: int) -> int:
        """The lane that a row with memory was placed in."""
        return self._held[row][0]

    def release(self, row: int) -> None:
        lane, size = self._held.pop(row)
        sizes = self._sizes[lane]
        before = self._cost(sizes)
        del sizes[bisect_left(sizes, size)]
        self._tokens += self._cost(sizes) - before
        self._note(lane)

    def _note(self, lane: int) -> None:
        sizes = self._sizes[lane]
        alike = self._alike if lane < self.regular else self._others_alike
        alike.put(lane, len(sizes), sizes[-1] if sizes else 0)

    def grow(self, row: int, tokens: int) -> bool:
        """Reserves more for a row in its lane; False, and nothing changes, when it does not fit."""
        lane, size = self._held[row]
        self.release(row)
        fits = self._fits(self._growth(lane, rounded(tokens)))
        self.reserve(row, lane, tokens if fits else size)
        return fits

    def move(self, row: int) -> int:
        """Puts a row that is in no lane where it fits best now; returns the lane."""
        lane, size = self._held[row]
        self.release(row)
        best = self.place(size)
        self.reserve(row, lane if best is None else best, size)
        return self._held[row][0]

    def keep(self, tokens: int) -> None:
        """Counts a kept prefix. Rows take precedence over it."""
        self.kept_tokens += tokens
        self._kept += 1

    def give_up(self, tokens: int) -> None:
        self.kept_tokens -= tokens
        self._kept -= 1

    def has_room(self, tokens: int = 0) -> bool:
        """Whether rows, kept prefixes and one more of so many tokens (0: none) fit on every member."""
        total = self._tokens + self.kept_tokens + tokens
        held = self.rows + self._kept + (tokens > 0)
        return all(self._bytes(member, total, held) <= member[2] for member in self._distinct)

    def has_room_beside_rows(self, tokens: int) -> bool:
        """Whether a prefix of so many tokens would fit if no other were kept."""
        return self._fits(tokens)

    def kept_bytes(self) -> list[int]:
        """Bytes of kept prefixes per member, in the order of ranks."""
        return [self._bytes(member, self.kept_tokens, self._kept) for member in self._members]

    def _growth(self, lane: int, size: int) -> int:
        sizes = self._sizes[lane]
        return _growth(len(sizes), sizes[-1] if sizes else 0, size)

    @staticmethod
    def _cost(sizes: list[int]) -> int:
        return len(sizes) * sizes[-1] if sizes else 0

    def _fits(self, tokens: int) -> bool:
        """Whether one row more, with so many tokens more, fits beside the others on every member."""
        total, held = self._tokens + tokens, self.rows + 1
        return all(self._bytes(member, total, held) <= member[2] for member in self._distinct)

    @staticmethod
    def _bytes(member: tuple[int, int, int], tokens: int, rows: int) -> int:
        return member[0] * tokens + member[1] * rows


def _growth(rows: int, longest: int, size: int) -> int:
    """Tokens by which a lane grows when a row of this size joins so many of which the longest has so many."""
    return (rows + 1) * max(size, longest) - rows * longest


class LanesAlike:
    """Lanes by their number of rows and longest row, so that a place is found without a look at each."""

    def __init__(self, lanes: range) -> None:
        self._lanes: dict[tuple[int, int], list[int]] = {(0, 0): list(lanes)} if lanes else {}
        self._kind = dict.fromkeys(lanes, (0, 0))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(rows, longest) of which there are lanes, each once."""
        return iter(self._lanes)

    def first(self, rows: int, longest: int) -> int:
        """The lowest lane of a kind."""
        return self._lanes[rows, longest][0]

    def put(self, lane: int, rows: int, longest: int) -> None:
        before = self._kind[lane]
        lanes = self._lanes[before]
        del lanes[bisect_left(lanes, lane)]
        if not lanes:
            del self._lanes[before]
        self._kind[lane] = (rows, longest)
        insort(self._lanes.setdefault((rows, longest), []), lane)
