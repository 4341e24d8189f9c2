"""The rows in each lane, in order: the tokens that they hold, and their drafts that are not settled."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from sealring.mesh.ring.bad_step import bad_step


class LaneRows:
    """State of one epoch. All methods that change it raise InvalidInput (BAD_STEP)."""

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}
        self._lane_of: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self.base: dict[int, int] = {}
        """Row -> its tokens less the steps of its lane."""
        self.drafted: dict[int, int] = {}
        """Row with open drafts -> its tokens since it was settled."""

    def __len__(self) -> int:
        return len(self._lane_of)

    def of(self, lane: int) -> tuple[int, ...]:
        """The rows of a lane in order; empty for an unknown lane."""
        return tuple(self._rows.get(lane, ()))

    def all(self) -> dict[int, tuple[int, ...]]:
        """The rows of each lane that has any."""
        return {lane: tuple(rows) for lane, rows in sorted(self._rows.items())}

    def place(self, row: int) -> tuple[int, int] | None:
        """The lane of a row, and its index there; None for a row in no lane."""
        lane = self._lane_of.get(row)
        return None if lane is None else (lane, self._rows[lane].index(row))

    def held(self, row: int) -> int:
        """Tokens in the caches of a row, also those that are not settled; 0 for a row in no lane."""
        lane = self._lane_of.get(row)
        return 0 if lane is None else self.base[row] + self._steps.get(lane, 0)

    def unsettled(self, row: int) -> int:
        """Tokens of a row with open drafts since it was settled; 0 for any other."""
        return self.drafted.get(row, 0)

    def steps(self, lane: int) -> int:
        """Decode steps of a lane, and one more for each draft of one row."""
        return self._steps.get(lane, 0)

    def tokens(self) -> int:
        """Tokens in caches: each row takes as much as the longest of its lane."""
        return sum(len(rows) * max(map(self.held, rows)) for rows in self._rows.values())

    def admit(self, row: int, lane: int, tokens: int) -> None:
        """Appends a row that holds these tokens to a lane."""
        self.check_settled(self._rows.get(lane, ()))
        self._rows.setdefault(lane, []).append(row)
        self._lane_of[row] = lane
        self.base[row] = tokens - self._steps.get(lane, 0)

    def leave(self, row: int) -> tuple[int, int]:
        """Takes a row out; its lane, and its former place there."""
        place = self.place(row)
        if place is None:
            raise bad_step(f"row {row} cannot be evicted: it is unknown")
        lane, index = place
        del self._lane_of[row], self.base[row]
        self.drafted.pop(row, None)
        self._rows[lane].pop(index)
        if not self._rows[lane]:
            del self._rows[lane]
        return place

    def decode(self, lane: int, drafts: int) -> tuple[int, ...]:
        """A step of a lane, with `drafts` of each row; the rows that get a token, once for each."""
        rows = self.of(lane)
        if not drafts or len(rows) > 1:
            self.check_settled(rows)
        self._steps[lane] = self._steps.get(lane, 0) + 1 + drafts
        if not drafts:
            return rows
        for row in rows:
            self.drafted[row] = self.drafted.get(row, 0) + 1 + drafts
        return tuple(row for row in rows for _ in range(1 + drafts))

    def settle(self, row: int, tokens: int) -> tuple[int, int, int]:
        """Ends a row's open drafts at this length: its lane, the tokens that count, and the tokens cut."""
        computed = self.drafted.pop(row, 0)
        if not computed:
            raise bad_step(f"row {row} has no drafts to settle")
        surplus = self.held(row) - tokens
        if not 0 <= surplus < computed:
            raise bad_step(f"row {row} cannot hold {tokens} tokens")
        self.base[row] -= surplus
        return self._lane_of[row], computed - surplus, surplus

    def check_settled(self, rows: Sequence[int]) -> None:
        """Raises for a row with open drafts."""
        for row in rows if self.drafted else ():
            if row in self.drafted:
                raise bad_step(f"row {row} has drafts that are not settled")

    def packed(self) -> bytes:
        """The places of all rows, for a digest."""
        lanes = [
            struct.pack(f">II{len(rows)}Q", lane, len(rows), *rows)
            for lane, rows in sorted(self._rows.items())
        ]
        return struct.pack(">I", len(lanes)) + b"".join(lanes)
