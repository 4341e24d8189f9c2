"""Which chunks go into the next prefill step.

A chunk is as long as a budget of tokens (gateway.scheduler.budget), or by up to REST of that longer if then
nothing is left of its prompt. Each is computed by itself, so chunks of several prompts share a step as long
as they take no longer together than one of that budget. Steps begin
in turn with the oldest prompt and with the one that has least left, so that short prompts do not wait behind
long ones, and long ones get at least half of the steps. A row's first chunk goes only after those of all rows
with lower numbers (mesh.prompt.composition demands it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sealring.gateway.scheduler.row import Row
from sealring.mesh.prompt.composition import MAX_CHUNKS
from sealring.v1 import control_pb2 as control

REST = 0.5
"""Part of a chunk that goes along with it where it is all that is left: as a step of its own it would cost
nearly as much as a whole chunk (docs/decisions/0033-no-lane-waits-for-a-last-token.md)."""


class PrefillLine:
    """Rows with chunks to come, by rising number. Those whose first chunk went are always in front."""

    def __init__(self, prepare: Callable[[Row], None], chunk: int) -> None:
        """`prepare` finds out where a row begins that may be the next to; `chunk` is the longest allowed."""
        self._prepare = prepare
        self._chunk = chunk
        self._rows: dict[int, Row] = {}
        self._oldest_turn = True

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        self._rows[row.number] = row

    def discard(self, row: Row) -> None:
        self._rows.pop(row.number, None)

    @property
    def unstarted(self) -> int:
        return sum(1 for row in self._rows.values() if not row.begun)

    def todo(self, waiting: int) -> tuple[int, float]:
        """Tokens of the prompts in line, in the mean and at least 1, and how many short prompts they count.

        One of several chunks counts for as little as a chunk does for it; so many that wait elsewhere count
        as much as those here.
        """
        whole = [
            row.prompt_tokens - (row.reused if row.begun else row.prefilled) for row in self._rows.values()
        ]
        short = sum(min(1.0, self._chunk / tokens) for tokens in whole)
        return max(1, sum(whole) // len(whole)), short * (1 + waiting / len(whole))

    def take(self, tokens: int, seconds: Callable[[int], float]) -> list[tuple[Row, control.Chunk]]:
        """The chunks of the next step, by rising row number. Rows that end with it leave the line.

        `seconds` is what a chunk of so many tokens takes.
        """
        picked = sorted(self._pick(tokens, seconds), key=lambda row: row.number)
        chunks = []
        for row in picked:
            chunks.append((row, self._cut(row, tokens)))
            if not row.remaining:
                del self._rows[row.number]
        self._oldest_turn = not self._oldest_turn
        return chunks

    def _pick(self, tokens: int, seconds: Callable[[int], float]) -> Iterator[Row]:
        first = self._prepared(self._first())
        yield first
        left = seconds(tokens) - seconds(self._length(first, tokens))
        picked = 1
        for row in self._rows.values():
            if row is first:
                continue
            takes = seconds(self._length(self._prepared(row), tokens))
            if takes > left or picked == MAX_CHUNKS:
                if not row.begun:
                    return
                continue
            left -= takes
            picked += 1
            yield row

    def _first(self) -> Row:
        rows = self._rows.values()
        oldest = next(iter(rows))
        if self._oldest_turn:
            return oldest
        shortest = min(rows, key=lambda row: row.remaining)
        if shortest.begun:
            return shortest
        return next(row for row in rows if not row.begun)

    def _prepared(self, row: Row) -> Row:
        if not row.begun:
            self._prepare(row)
        return row

    def _cut(self, row: Row, tokens: int) -> control.Chunk:
        first, start = not row.begun, row.prefilled
        if first:
            row.begun, row.reused = True, start
        row.prefilled += self._length(row, tokens)
        return control.Chunk(
            row=row.number,
            start=start,
            end=row.prefilled,
            prompt_tokens=row.prompt_tokens,
            params_bytes=row.params_bytes if first else 0,
            prefix=row.prefix if first else 0,
            choices=len(row.group) if first and row.copies else 0,
        )

    def _length(self, row: Row, tokens: int) -> int:
        """Of its next chunk, which ends at the end of the prompt or the row's next cut, if not before."""
        left = next((cut for cut in row.cuts if cut > row.prefilled), row.prompt_tokens) - row.prefilled
        return left if left <= min(tokens * (1 + REST), self._chunk) else min(tokens, left)
