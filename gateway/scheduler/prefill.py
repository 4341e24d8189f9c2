"""Which chunks go into the next prefill step.

A step has a budget of tokens (gateway.scheduler.budget); no chunk is longer, and a prompt of a few chunks is
cut into equal ones. Chunks of several prompts share a step as long as they fit its budget together. Steps
begin in turn with the oldest prompt and with the one that has least left, so that short prompts do not wait
behind long ones, and long ones get at least half of the steps. A row's first chunk goes only after those
of all rows with lower numbers (mesh.prompt.composition demands it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sealring.gateway.scheduler.row import Row
from sealring.mesh.prompt.composition import MAX_CHUNKS
from sealring.v1 import control_pb2 as control

_FEW = 4


@dataclass(frozen=True, slots=True)
class Todo:
    """What waits in line: `tokens` of so many `rows` (of all of the prompt where it is one), `crowd` as how
    many short prompts they count, and whether there is a `short` one, of no more than a chunk."""

    tokens: int
    rows: int
    crowd: float
    short: bool


class PrefillLine:
    """Rows with chunks to come, by rising number. Those whose first chunk went are always in front."""

    def __init__(self, prepare: Callable[[Row], None], chunk: int) -> None:
        """`prepare` finds out where a row begins that may be the next to; `chunk` is the longest allowed."""
        self._prepare = prepare
        self._chunk = chunk
        self._rows: dict[int, Row] = {}
        self._oldest_turn = True
        self._todo: Todo | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        self._rows[row.number] = row
        self._todo = None

    def discard(self, row: Row) -> None:
        self._rows.pop(row.number, None)
        self._todo = None

    @property
    def unstarted(self) -> int:
        return sum(1 for row in self._rows.values() if not row.begun)

    @property
    def todo(self) -> Todo:
        if self._todo is None:
            rows = list(self._rows.values())
            whole = [row.prompt_tokens - (row.reused if row.begun else row.prefilled) for row in rows]
            self._todo = Todo(
                tokens=whole[0] if len(rows) == 1 else sum(row.remaining for row in rows),
                rows=len(rows),
                crowd=sum(min(1.0, self._chunk / tokens) for tokens in whole),
                short=any(tokens <= self._chunk for tokens in whole),
            )
        return self._todo

    def crowd(self, waiting: int) -> float:
        """How many prompts wait here and, as `waiting`, elsewhere, besides the first; one of several chunks
        counts for as little as a chunk does for it, and those elsewhere as much as those here."""
        return max(0.0, self.todo.crowd * (1 + waiting / max(1, self.todo.rows)) - 1)

    def take(self, tokens: int) -> list[tuple[Row, control.Chunk]]:
        """The chunks of the next step, by rising row number. Rows that end with it leave the line."""
        self._todo = None
        picked = sorted(self._pick(tokens), key=lambda row: row.number)
        chunks = []
        for row in picked:
            chunks.append((row, self._cut(row, tokens)))
            if not row.remaining:
                del self._rows[row.number]
        self._oldest_turn = not self._oldest_turn
        return chunks

    def _pick(self, tokens: int) -> Iterator[Row]:
        first = self._prepared(self._first())
        yield first
        budget = tokens - _length(first, tokens)
        picked = 1
        for row in self._rows.values():
            if row is first:
                continue
            if _length(self._prepared(row), tokens) > budget or picked == MAX_CHUNKS:
                if not row.begun:
                    return
                continue
            budget -= _length(row, tokens)
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

    @staticmethod
    def _cut(row: Row, tokens: int) -> control.Chunk:
        first, start = not row.begun, row.prefilled
        if first:
            row.begun, row.reused = True, start
        row.prefilled += _length(row, tokens)
        return control.Chunk(
            row=row.number,
            start=start,
            end=row.prefilled,
            prompt_tokens=row.prompt_tokens,
            params_bytes=row.params_bytes if first else 0,
            prefix=row.prefix if first else 0,
            choices=len(row.group) if first and row.copies else 0,
        )


def _length(row: Row, tokens: int) -> int:
    """Up to the end of the prompt or the row's next cut, in equal parts if it takes a few."""
    cut = next((cut for cut in row.cuts if cut > row.prefilled), row.prompt_tokens)
    left = cut - row.prefilled
    parts = -(-left // tokens)
    return -(-left // parts) if parts <= _FEW else tokens
