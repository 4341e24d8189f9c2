"""The chunk of the next prefill step: its row and its length.

A chunk has the tokens of a budget (gateway.scheduler.budget), or more if nothing is then left of its prompt
and it takes hardly longer. None ends inside an image. Keys take turns, a chunk each. The steps of a key
alternate between its oldest prompt and its prompt with the fewest tokens left: short prompts do not wait
behind long ones, and long ones get at least half of the steps. Its first chunks go in the order in which its
rows came. A row waits while another row computes its beginning; a key of which all rows wait lends its turns.
A pause is nobody's turn but the shortest prompt's. A prompt that began by a plan has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from sealring.gateway.scheduler.budget import MOST
from sealring.gateway.scheduler.queue import Turns
from sealring.gateway.scheduler.request import Row
from sealring.mesh.ring.unbroken import around
from sealring.v1 import control_pb2 as control


class PrefillLine:
    """Rows with chunks to come, in the order in which they came."""

    def __init__(
        self,
        prepare: Callable[[Row], None],
        longest: int,
        seconds: Callable[[float], float],
        held: Callable[[int], int],
    ) -> None:
        """`prepare` finds where the next row to begin starts; `longest` are the most tokens of a chunk,
        `seconds` what a stage takes for one of some tokens, and `held` the tokens of a row that has begun."""
        self._prepare = prepare
        self._longest = longest
        self._seconds = seconds
        self._held = held
        self._rows: dict[int, Row] = {}
        self._planned: set[int] = set()  # rows that began by a plan
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        self._prepare(row)  # what it lacks by now: its prefix may be dropped before it begins
        self._rows[row.number] = row

    def prepare(self) -> None:
        """Finds anew where rows begin. Must come before the next step's drops: a row that has found a longer
        prefix leaves no memory to the one before."""
        for row in self._rows.values():
            if not row.begun:
                self._prepare(row)

    def discard(self, row: Row) -> None:
        self._rows.pop(row.number, None)
        self._planned.discard(row.number)

    @property
    def unstarted(self) -> list[Row]:
        return [row for row in self._rows.values() if not row.begun]

    @property
    def idle(self) -> bool:
        """Whether nobody waits for any of the prompts."""
        return all(row.request.idle for row in self._rows.values())

    @property
    def tokens(self) -> int:
        """Mean length of the prompts in line without their reused tokens; at least 1."""
        rows = self._rows.values()
        whole = [row.prompt_tokens - row.reused for row in rows]
        return max(1, sum(whole) // len(whole))

    @property
    def left(self) -> list[int]:
        """Tokens that each prompt lacks that may have a pause, rising."""
        return sorted(map(self._remaining, self._pausing()))

    def take(self, tokens: int, *, pausing: bool = False, planned: bool = False) -> tuple[Row, control.Chunk]:
        """The chunk of the next step, in a pause of the shortest prompt that may have one. A row that begins
        with a `planned` chunk has no pauses. A row that ends with it leaves the line."""
        short = min(self._pausing(), key=self._remaining, default=None) if pausing else None
        row = short or self._next()
        first = not row.begun
        if first and planned:
            self._planned.add(row.number)
        if first:
            self._prepare(row)
            row.request.progress.deadline = math.inf
        start = self._done(row)
        end = start + self._up_to_second_image(row, start, self._length(row, start, tokens))
        row.begun = True
        if end == row.prompt_tokens:
            self.discard(row)
        return row, control.Chunk(
            row=row.number,
            start=start,
            end=end,
            prompt_tokens=row.prompt_tokens,
            params_bytes=row.params_bytes if first else 0,
            prefix=row.prefix if first else 0,
            choices=len(row.group) if first and row.copies else 0,
        )

    def _done(self, row: Row) -> int:
        """Prompt tokens behind which the row's next chunk begins."""
        return self._held(row.number) if row.begun else row.reused

    def _remaining(self, row: Row) -> int:
        return row.prompt_tokens - self._done(row)

    def _pausing(self) -> list[Row]:
        return [row for row in self._ready(self._rows.values()) if row.number not in self._planned]

    def _next(self) -> Row:
        rows = self._turns.next(self._rows.values())
        oldest = self._turns.taken(rows[0].request.key) % 2 == 0
        if not (ready := self._ready(rows)):
            return rows[0].awaits or rows[0]
        if oldest:
            return ready[0]
        shortest = min(ready, key=self._remaining)
        return shortest if shortest.begun else next(row for row in ready if not row.begun)

    @staticmethod
    def _ready(rows: Iterable[Row]) -> list[Row]:
        """Those that await no other row's beginning."""
        return [row for row in rows if row.begun or row.awaits is None]

    def _length(self, row: Row, start: int, tokens: int) -> int:
        """Length of the row's next chunk, from `start` on; it ends at the prompt's end or the next cut,
        whichever comes first.

        The rest as a step of its own would cost nearly as much as a whole chunk, so it goes along where a
        round grows by no more than it may for a whole one. A chunk that would end inside an image ends behind
        it where it then takes hardly longer than the chunk, or the image alone; else it ends before it.
        """
        left = next((cut for cut in row.cuts if cut > start), row.prompt_tokens) - start
        if left <= tokens or self._goes_along(left, tokens):
            return left
        begin, end = (edge - start for edge in around(row.unbroken, start + tokens))
        return end if self._goes_along(end, max(tokens, end - begin)) else begin

    @staticmethod
    def _up_to_second_image(row: Row, start: int, tokens: int) -> int:
        """The chunk's length, so that it has one image at most: the head computes each with its chunk, and
        other rows wait for one image and no more."""
        begun = [begin for begin, _ in row.unbroken if start <= begin < start + tokens]
        return begun[1] - start if len(begun) > 1 else tokens

    def _goes_along(self, more: int, tokens: int) -> bool:
        return more <= self._longest and self._seconds(more) <= MOST * self._seconds(tokens)
