"""Guesses at the tail, by the model's MTP head (`staging.mtp_head`).

The head computes each token of a row along with the hidden state that it was sampled from, and guesses the
next one. To guess further tokens it goes on with its own guesses and hidden states, which then leave its
caches again. Rows of a lane are computed together, whatever number of their tokens counts (`mtp_rows.py`).
The head follows rows from the prompt on while there are few, or from the step on in which guesses may be
wanted. What it has not computed in between, or has no memory for, is a gap, behind which it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from sealring.mesh.ring.composition import Chunk
from sealring.mesh.ring.limits import HEAD_ROWS
from sealring.node.engine import caches
from sealring.node.engine.caches import Cache
from sealring.node.engine.drafts.mtp_rows import HeadLane, LaneRow
from sealring.node.engine.drafts.tail import Followed, TailDrafter, counted
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.mtp_head import MtpHead
from sealring.v1 import control_pb2 as control

_FOLLOWED = 2 * HEAD_ROWS
"""Rows of which something is held: others may still be there while prompts of further ones are computed."""


class MtpDrafter(TailDrafter):
    """One MTP head."""

    def __init__(self, head: MtpHead, stage: Stage, room: int, memory: int = 0) -> None:
        """As `TailDrafter`."""
        empty = caches.for_one_row(head.make_cache(), stage.batches)
        super().__init__(stage.spec.model_type, stage, room, memory, empty)
        self._head = head
        self._rows: dict[int, LaneRow] = {}  # the oldest first
        self._open: set[int] = set()  # rows of the ring
        self._most = HEAD_ROWS if caches.cuts_together(empty) else 1
        self.seconds = self._timed(self._trial(1))
        """How long a guess takes; 0 if the head has failed at that."""
        self._together = self._timed(self._trial(HEAD_ROWS)) if self._most > 1 else 0.0

    def _trial(self, rows: int) -> Callable[[], mx.array]:
        """A guess for each of some rows, behind some others."""
        cache = self._head.make_cache()
        if rows > 1:
            cache = caches.merge([self._head.make_cache() for _ in range(rows)])
        hidden = mx.zeros((rows, 1, self._head.width), mx.float32)
        tokens = mx.zeros((rows, 1), mx.uint32)
        return lambda: mx.argmax(self._head(tokens, hidden, cache)[0], axis=-1)

    @property
    def facts(self) -> control.DraftFacts:
        return control.DraftFacts(
            source=control.DRAFT_SOURCE_MTP_HEAD,
            microseconds=round(1e6 * self.seconds),
            rows=self._most,
            rows_microseconds=round(1e6 * self._together),
            ahead=True,
        )

    # Rows

    def begin(self, chunk: Chunk, prompt: tuple[int, ...]) -> None:
        """A row is followed while there are few rows."""
        self._open.add(chunk.row)
        if not self.failed and len(self._open) <= self._most:
            self._begin(self._start(chunk.row), chunk, prompt)

    def _start(self, number: int, beside: Collection[int] = ()) -> LaneRow:
        while len(self._rows) >= _FOLLOWED:
            self._forget(next(other for other in self._rows if other not in beside))
        row = self._rows[number] = LaneRow(self._head.make_cache())
        return row

    def _of(self, number: int) -> LaneRow | None:
        return self._rows.get(number)

    def _in_rows(self) -> int:
        return sum(row.room for row in self._rows.values())

    def watch(self, rows: Sequence[int], *, asked: bool = True) -> bool:
        """It begins to follow rows if it is `asked` to."""
        if self.failed or not asked or len(rows) > self._most:
            for number in self._rows.keys() & set(rows):
                self._rows[number].gaps = True
            return False
        for number in rows:
            if number not in self._rows:
                self._start(number, rows).gaps = True
        self._collect([])
        return True

    def seen(self, tokens: int) -> mx.array | None:
        """Behind the model's last norm."""
        found = super().seen(tokens)
        return None if found is None else self._head.normed(found)

    def follow(
        self, rows: Sequence[int], hidden: mx.array, tokens: mx.array, *, unsettled: bool = False
    ) -> None:
        lane = self._lane(rows, tokens.shape[1])
        if lane is None:
            return
        lane.guessed = None
        self._try(partial(lane.fill, self._head, hidden, tokens, unsettled=unsettled))

    def guess(
        self,
        rows: Sequence[int],
        hidden: mx.array,
        tokens: mx.array,
        counts: Sequence[int],
        guesses: int,
        sampler: Sampler,
        *,
        unsettled: bool = False,
    ) -> mx.array:
        lane = self._lane(rows, tokens.shape[1] + guesses)
        if lane is not None:
            made = partial(lane.guess, self._head, hidden, tokens, counts, guesses, sampler)
            lane.guessed = self._try(partial(made, unsettled=unsettled))
        if lane is None or lane.guessed is None:
            return mx.zeros((len(rows), guesses), mx.uint32)
        return lane.guessed

    def right(self, rows: Sequence[int], sampled: Sequence[Sequence[int]]) -> list[int]:
        row = self._of(rows[0])
        lane = None if row is None else row.lane
        guessed = None if lane is None or lane.guessed is None else np.array(lane.guessed).tolist()
        if guessed is None or len(guessed) != len(rows):
            return [1] * len(rows)
        return [counted(*each) for each in zip(sampled, guessed, strict=True)]

    def _settle(self, number: int, accepted: int) -> None:
        if (row := self._of(number)) is not None:
            row.settle(accepted)

    def _forget(self, number: int) -> None:
        self._open.discard(number)
        if (row := self._rows.pop(number, None)) is not None:
            row.part()

    def _whole(self, row: Followed, tokens: int) -> Cache | None:
        assert isinstance(row, LaneRow)
        if tokens > row.computed - row.surplus:
            return None
        return row.cache if row.lane is None else row.lane.cache_of(row)

    def end_epoch(self) -> None:
        super().end_epoch()
        self._rows.clear()
        self._open.clear()

    # Computing

    def _lane(self, rows: Sequence[int], tokens: int) -> HeadLane | None:
        """The caches of these rows, with memory for as many more tokens of each. Where that is not there, the
        rows begin again."""
        followed = [self._rows[number] for number in rows]
        if self.failed:
            return None
        if not self._fit(followed, tokens):
            for row in followed:
                row.begin_again(self._head.make_cache())
        lane = followed[0].lane
        if lane is None or lane.rows != followed:
            lane = HeadLane(followed)
        lane.settle()
        return lane

    def _fit(self, rows: Sequence[LaneRow], tokens: int) -> bool:
        """Whether there is memory for as many more tokens of each of these rows, each of which takes as many
        as the longest; gives up prefixes, and then other rows for that, the oldest first."""
        together = len(rows) * (max(row.computed for row in rows) + tokens)
        others = [number for number, row in self._rows.items() if row not in rows]
        while not self._fits(sum(self._rows[number].room for number in others) + together):
            if not others:
                return False
            self._forget(others.pop(0))
        return True
