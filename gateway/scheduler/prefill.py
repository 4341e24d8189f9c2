"""Which chunks go into the next prefill step.

Chunks end at multiples of the chunk length, so that where a prompt is cut depends on nothing but the prompt.
Chunks of several prompts share a step as long as they are together no longer than one chunk. Every other
step begins with the oldest prompt and the others with the one that has least to go, so short prompts do not
wait behind long ones and long ones get at least half of the steps. A row's first chunk goes only after those
of all rows with lower numbers (mesh.composition demands it).
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.scheduler.row import Row
from mesh.composition import MAX_CHUNKS
from sealring.v1 import control_pb2 as control


class PrefillLine:
    """Rows with chunks to come, by rising number. Those whose first chunk went are always in front."""

    def __init__(self, chunk: int) -> None:
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
        return sum(1 for row in self._rows.values() if not row.prefilled)

    def take(self) -> list[tuple[Row, control.Chunk]]:
        """The chunks of the next step, by rising row number. Rows that end with it leave the line."""
        picked = sorted(self._pick(), key=lambda row: row.number)
        chunks = []
        for row in picked:
            chunks.append((row, self._cut(row)))
            if not row.remaining:
                del self._rows[row.number]
        self._oldest_turn = not self._oldest_turn
        return chunks

    def _pick(self) -> Iterator[Row]:
        first = self._first()
        yield first
        budget = self._chunk - self._length(first)
        picked = 1
        for row in self._rows.values():
            if row is first:
                continue
            if self._length(row) > budget or picked == MAX_CHUNKS:
                if not row.prefilled:
                    return
                continue
            budget -= self._length(row)
            picked += 1
            yield row

    def _first(self) -> Row:
        rows = self._rows.values()
        oldest = next(iter(rows))
        if self._oldest_turn:
            return oldest
        shortest = min(rows, key=lambda row: row.remaining)
        if shortest.prefilled:
            return shortest
        return next(row for row in rows if not row.prefilled)

    def _length(self, row: Row) -> int:
        return min(self._chunk, row.remaining)

    def _cut(self, row: Row) -> control.Chunk:
        start = row.prefilled
        row.prefilled += self._length(row)
        return control.Chunk(
            row=row.number,
            start=start,
            end=row.prefilled,
            prompt_tokens=row.prompt_tokens,
            params_bytes=0 if start else row.params_bytes,
        )
