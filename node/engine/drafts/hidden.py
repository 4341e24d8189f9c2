"""Guesses at the tail, by a drafter that reads hidden states of the model (`drafter_models`).

Steps and chunks bring the hidden states of a row that is alone in its lane (`taps`). Each token goes in with
those that it was sampled from, as with an MTP head. Tokens of which they did not come are a gap, behind which
the drafter goes on: those of a prefix of which nothing is kept here, and those computed beside other rows.

Caches never go back: windows could not be cut. Tokens that may not count wait until a step settles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from sealring.mesh.ring.composition import Chunk
from sealring.node.engine.caches import Cache
from sealring.node.engine.drafts.drafter_models import DrafterModel
from sealring.node.engine.drafts.tail import Followed, TailDrafter, counted, evaluate
from sealring.node.engine.params import RowParameters
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage
from sealring.v1 import control_pb2 as control


@dataclass(slots=True, eq=False)
class _Alone(Followed):
    """The row that is followed."""

    number: int = 0
    waiting: list[tuple[mx.array, mx.array]] = field(default_factory=list)  # hidden states and tokens
    guessed: mx.array | None = None  # by the last step


class HiddenDrafter(TailDrafter):
    """One drafter, which follows one row."""

    def __init__(self, model: DrafterModel, stage: Stage, room: int, memory: int = 0) -> None:
        """As `TailDrafter`. The stage taps what the drafter reads."""
        super().__init__(model.facts.kind, stage, room, memory, model.make_cache())
        self._model = model
        self._row: _Alone | None = None
        cache, count = model.make_cache(), max(1, model.facts.block)
        hidden, token = mx.zeros((1, 1, model.width)), mx.zeros((1, 1), mx.uint32)
        sampler = Sampler([RowParameters()], [0])
        self.seconds = self._timed(lambda: model.guess(token, hidden, cache, count, sampler))
        """How long a pass takes, of a block or of one guess; 0 if the drafter has failed at that."""

    @property
    def facts(self) -> control.DraftFacts:
        return control.DraftFacts(
            source=control.DRAFT_SOURCE_HIDDEN,
            microseconds=round(1e6 * self.seconds),
            rows=1,
            ahead=True,
            block=self._model.facts.block,
            taps=True,
        )

    # Rows

    def begin(self, chunk: Chunk, prompt: tuple[int, ...]) -> None:
        if not self.failed and chunk.taps:
            self._begin(self._start(chunk.row), chunk, prompt)

    def _start(self, number: int) -> _Alone:
        self._row = _Alone(self._model.make_cache(), number=number)
        return self._row

    def _of(self, number: int) -> _Alone | None:
        return self._row if self._row is not None and self._row.number == number else None

    def _in_rows(self) -> int:
        return 0 if self._row is None else self._row.computed

    def watch(self, rows: Sequence[int], *, asked: bool = True) -> bool:
        """It follows the only row if the step brings hidden states."""
        if self.failed or len(rows) > 1 or not (self._stage.tapping or self._stage.prefill.tapping):
            if self._row is not None and self._row.number in rows:
                self._row.gaps = True
            return False
        if self._of(rows[0]) is None:
            self._start(rows[0]).gaps = True
        self._collect([])
        return True

    def _collect(self, hidden: list[mx.array] | None) -> None:
        super()._collect(hidden)
        self._stage.tapping = self._stage.prefill.tapping = hidden is not None

    def _following(self, row: Followed, start: int, count: int) -> tuple[int, ...]:
        """A drafter of blocks reads no tokens of a prompt."""
        return (0,) * count if self._model.facts.block else super()._following(row, start, count)

    def follow(
        self, rows: Sequence[int], hidden: mx.array, tokens: mx.array, *, unsettled: bool = False
    ) -> None:
        row = self._of(rows[0])
        if row is None:
            return
        row.guessed = None
        if unsettled:
            row.waiting.append((hidden, tokens[0]))
        else:
            self._compute(row, hidden, tokens[0])

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
        """Tokens behind those of `counts` do not go in."""
        row, count = self._of(rows[0]), counts[0]
        if row is not None:
            given = tokens[:, :count], hidden[:, :count], row.cache, guesses, sampler
            fits, row.guessed = not self.failed and self._fits(row.computed + count + guesses), None
            row.guessed = self._try(lambda: self._model.guess(*given)) if fits else None
        if row is None or row.guessed is None:
            if row is not None:
                row.gaps = True
            return mx.zeros((1, guesses), mx.uint32)
        row.computed += count
        return row.guessed[None]

    def right(self, rows: Sequence[int], sampled: Sequence[Sequence[int]]) -> list[int]:
        row = self._of(rows[0])
        guessed = [] if row is None or row.guessed is None else np.array(row.guessed).tolist()
        return [counted(sampled[0], guessed)]

    def _settle(self, number: int, accepted: int) -> None:
        if (row := self._of(number)) is not None and row.waiting:
            hidden = mx.concatenate([one for one, _ in row.waiting], axis=1)
            tokens, row.waiting = mx.concatenate([one for _, one in row.waiting]), []
            self._compute(row, hidden[:, :accepted], tokens[:accepted])

    def _forget(self, number: int) -> None:
        if self.follows(number):
            self._row = None

    def _whole(self, row: Followed, tokens: int) -> Cache | None:
        there = tokens <= row.computed if self._cuts else tokens == row.computed
        return row.cache if there else None

    def end_epoch(self) -> None:
        super().end_epoch()
        self._row = None

    # Computing

    def _compute(self, row: Followed, hidden: mx.array, tokens: mx.array) -> None:
        count, model, cache = tokens.shape[0], self._model, row.cache
        if self.failed or not self._fits(row.computed + count):
            row.gaps = True
        elif self._try(lambda: model.fill(tokens[None], hidden, cache)) is not None:
            row.computed += count
            evaluate(cache)
