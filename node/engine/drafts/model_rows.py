"""Rows that a draft model guesses for, and the passes in which it computes them.

Rows of one lane have their guesses in one pass, which takes little longer than that of one row. Their caches
form a batch with a common end, so each pass computes the same number of tokens in every row. A row that lacks
fewer than another, or needs no guess, computes its last tokens again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from sealring.node.engine import caches
from sealring.node.engine.caches import Batch, Cache, parts_of
from sealring.node.engine.drafts.guesses import Feed, Guesses
from sealring.node.engine.drafts.source import Tokens
from sealring.node.engine.params import RowParameters
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.interception import leaves
from sealring.node.engine.staging.layout import TOKENS
from sealring.node.engine.transfer import Transfer, through_record, transfer

_TRIALS = 8
"""Guesses that are timed when the model is loaded."""


class Drawn(NamedTuple):
    """How a row's next token is drawn: its parameters, with what they count until then, and its position."""

    parameters: RowParameters
    position: int


class DraftModel:
    """The whole model as a stage. Used by the compute thread only."""

    def __init__(self, stage: Stage, vocabulary: int) -> None:
        """`stage` is warmed up. `vocabulary` is the number of tokens that the large model may sample."""
        self.stage = stage
        self._vocabulary = min(vocabulary, stage.spec.hands_on[0].tail[0])
        self._moves: Transfer = transfer()
        empty = stage.make_cache()
        self.cuts = caches.trimmable(empty)
        """Whether its caches can be cut to fewer tokens."""
        self.batches = caches.cuts_together(empty)
        """Whether it computes rows together whose caches can be cut."""

    def compute(self, tokens: Sequence[Tokens], cache: Batch) -> None:
        """Computes tokens, as many of each row of `cache`."""
        self.stage(self._input(tokens), cache)
        _evaluate(cache)
        self._moves.settle()

    def guess(self, tokens: Sequence[Tokens], cache: Batch, rows: Sequence[Drawn]) -> list[int]:
        """The guess behind each row's `tokens`, which are as many of each row of `cache`."""
        logits = self.stage.last_logits(self._input(tokens), cache)[:, : self._vocabulary]
        sampler = Sampler([row.parameters for row in rows], [row.position for row in rows])
        record = through_record(self._moves, [sampler(logits)], [TOKENS], len(rows), 1)
        return [int(token) for token in np.frombuffer(record, np.uint32)]

    def seconds(self, rows: int) -> float:
        """Median seconds of a guess for each of `rows` rows behind a short prompt."""
        if rows > 1 and not self.batches:
            return rows * self.seconds(1)
        made = [self.stage.make_cache() for _ in range(rows)]
        for row in made if rows > 1 else ():
            self.compute([np.zeros(1, np.uint32)], row)
        cache = made[0] if rows == 1 else caches.merge(made)
        took = []
        for place in range(_TRIALS):
            begun = time.perf_counter()
            self.guess([np.zeros(1, np.uint32)] * rows, cache, [Drawn(RowParameters(), place)] * rows)
            took.append(time.perf_counter() - begun)
        return median(took)

    def _input(self, tokens: Sequence[Tokens]) -> list[mx.array]:
        """Tokens as the model reads them; an id that it lacks, as padding has, would read other memory."""
        fed = np.stack(tokens)
        buffer = self._moves.receive_buffer(self.stage.spec.receives, *fed.shape)
        buffer.fill(memoryview(np.where(fed < self._vocabulary, fed, 0).astype(np.uint32).tobytes()))
        return buffer.arrays


@dataclass(slots=True, eq=False)
class DraftRow:
    """A row, its caches, and the number of tokens in them. In a batch its own caches are []."""

    number: int
    guesses: Guesses
    parameters: RowParameters
    cache: Cache = field(default_factory=list)
    computed: int = 0
    batch: DraftBatch | None = None
    begun: int = field(init=False)
    """Tokens of its prompt."""

    def __post_init__(self) -> None:
        self.begun = self.guesses.known

    @property
    def behind(self) -> int:
        """Tokens of the row that are not computed."""
        return self.guesses.known - self.guesses.held

    @property
    def room(self) -> int:
        """Tokens that its caches have room for. In a batch all rows are as long as the longest."""
        return max(one.computed for one in self.batch.rows) if self.batch is not None else self.computed

    def lacks(self, count: int) -> bool:
        """Whether there are fewer guesses than `count` behind its tokens."""
        return self.guesses.taken(self.guesses.known, count) is None

    def drawn_as(self, end: int) -> Drawn:
        """How the tail draws the row's token number `end`, with its random number and its penalties: what
        comes out is the likeliest to be sampled there."""
        row, position = self.parameters, self.parameters.position + end - self.begun
        if row.adjusts:
            said = tuple(self.guesses.taken(self.begun, end - self.begun) or ())
            tail = (*row.prompt_tail, *said)[-row.repetition_context_size :] if row.repeats else ()
            answered = (*row.answered, *said) if row.counts else ()
            row = dataclasses.replace(row, prompt_tail=tail, answered=answered)
        return Drawn(row, position)

    def part(self) -> None:
        """Gives the row caches of its own."""
        if self.batch is not None:
            self.batch.part(self)


class DraftBatch:
    """Rows whose caches are one batch."""

    def __init__(self, rows: Sequence[DraftRow]) -> None:
        """Takes the rows out of other batches."""
        for row in rows:
            row.part()
        self.rows = list(rows)
        self._cache = caches.merge([row.cache for row in rows])
        _evaluate(self._cache)
        for row in rows:
            row.cache, row.batch = [], self

    def part(self, row: DraftRow) -> None:
        """Gives a row caches of its own, and another one if that is left alone."""
        place = self.rows.index(row)
        left = [one for one in range(len(self.rows)) if one != place]
        for index in [place, *left] if len(left) == 1 else [place]:
            self.rows[index].cache, self.rows[index].batch = caches.extract(self._cache, index), None
            _evaluate(self.rows[index].cache)
        self.rows = [self.rows[index] for index in left] if len(left) > 1 else []
        self._cache = caches.recompose(self._cache, left, []) if self.rows else []
        _evaluate(self._cache)

    def guess(self, model: DraftModel, wanting: Collection[DraftRow]) -> None:
        """Guesses the next token of some rows."""
        missing = 1
        while missing:
            held = [row.computed for row in self.rows]
            feeds, missing = self._feeds(wanting)
            surplus = [before - feed.start for before, feed in zip(held, feeds, strict=True)]
            caches.take_back(self._cache, surplus)
            tokens, found = [feed.tokens for feed in feeds], [0] * len(feeds)
            if missing:
                model.compute(tokens, self._cache)
            else:
                drawn = [row.drawn_as(feed.end) for row, feed in zip(self.rows, feeds, strict=True)]
                found = model.guess(tokens, self._cache, drawn)
            for row, feed, token in zip(self.rows, feeds, found, strict=True):
                row.computed = feed.end
                if row in wanting and not missing:
                    row.guesses.guess(feed, token)

    def _feeds(self, wanting: Collection[DraftRow]) -> tuple[list[Feed], int]:
        """Tokens of each row, all rows as many, and the number that some of `wanting` still lack then. Rows
        that want no guess have their last computed ones."""
        while True:  # until no guess is found wrong meanwhile
            for row in self.rows:
                row.computed = min(row.computed, row.guesses.held)
            ends = [row.guesses.whole if row in wanting else row.computed for row in self.rows]
            lacking = max(end - row.computed for row, end in zip(self.rows, ends, strict=True))
            count = max(1, min(lacking, *ends))
            feeds = [
                row.guesses.feed(count, min(row.computed, end - count))
                for row, end in zip(self.rows, ends, strict=True)
            ]
            if all(len(feed.tokens) == count for feed in feeds):
                return feeds, max(0, lacking - count)


def _evaluate(cache: Batch) -> None:
    """Has a cache computed, which would else keep what it is made of."""
    parts = [part for entry in cache for part in parts_of(entry)]
    mx.eval([leaf for part in parts for leaf in leaves(list(vars(part).values()))])
