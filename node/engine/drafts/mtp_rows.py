"""Rows that an MTP head follows, and what it has of those of one lane, in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from sealring.node.engine import caches
from sealring.node.engine.caches import Batch, Cache
from sealring.node.engine.drafts.tail import Followed, evaluate
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging.mtp_head import MtpHead


@dataclass(slots=True, eq=False)
class LaneRow(Followed):
    """A row that may be in a lane. There its own cache is []."""

    unsettled: int = 0  # tokens in the cache since the row was settled
    surplus: int = 0  # of them, that do not count and are to leave the cache
    lane: HeadLane | None = None

    @property
    def room(self) -> int:
        """Tokens that its cache has room for. In a lane all rows are as long as the longest."""
        return self.computed if self.lane is None else max(row.computed for row in self.lane.rows)

    def begin_again(self, cache: Cache) -> None:
        """Goes on with an empty cache, behind a gap."""
        self.part()
        self.cache, self.gaps, self.computed, self.unsettled, self.surplus = cache, True, 0, 0, 0

    def part(self) -> None:
        """Gives the row, and those that it is computed together with, caches of their own."""
        if self.lane is not None:
            self.lane.dissolve()

    def settle(self, accepted: int) -> None:
        self.surplus, self.unsettled = self.surplus + max(0, self.unsettled - accepted), 0


class HeadLane:
    """Rows that are computed together. A row that is alone has its own cache, without padding."""

    def __init__(self, rows: Sequence[LaneRow]) -> None:
        """Takes the rows out of other lanes."""
        for row in rows:
            row.part()
        self.rows = list(rows)
        self._cache: Batch = rows[0].cache if len(rows) == 1 else caches.merge([row.cache for row in rows])
        self.guessed: mx.array | None = None
        """By the last step, uint32 [rows, guesses]."""
        for row in rows:
            row.cache, row.lane = [], self

    def dissolve(self) -> None:
        for place, row in enumerate(self.rows):
            row.cache, row.lane = self.cache_of(row, place), None
            evaluate(row.cache)
        self.rows = []

    def cache_of(self, row: LaneRow, place: int | None = None) -> Cache:
        """A copy of a row's cache; the cache itself of a row that is alone."""
        self.settle()
        if len(self.rows) == 1:
            return self._cache
        return caches.extract(self._cache, self.rows.index(row) if place is None else place)

    def settle(self) -> None:
        """Takes tokens back that do not count."""
        self._take_back([row.surplus for row in self.rows])
        for row in self.rows:
            row.surplus = 0

    def _take_back(self, tokens: Sequence[int]) -> None:
        if not any(tokens):
            return
        if len(self.rows) == 1:
            caches.trim(self._cache, tokens[0])
        else:
            caches.take_back(self._cache, tokens)
        for row, count in zip(self.rows, tokens, strict=True):
            row.computed -= count

    def fill(self, head: MtpHead, hidden: mx.array, tokens: mx.array, *, unsettled: bool = False) -> None:
        """Computes tokens, uint32 [rows, tokens], behind hidden states [rows, tokens, width]. `unsettled`:
        some may not count."""
        head.fill(tokens, hidden, self._cache)
        self._took([tokens.shape[1]] * len(self.rows), unsettled=unsettled)
        evaluate(self._cache)

    def guess(
        self,
        head: MtpHead,
        hidden: mx.array,
        tokens: mx.array,
        counts: Sequence[int],
        guesses: int,
        sampler: Sampler,
        *,
        unsettled: bool,
    ) -> mx.array:
        """As `fill`, of the first tokens of each row, as many as `counts` says; then guesses tokens behind
        these, uint32 [rows, guesses]."""
        most = max(counts)
        logits, states = head(tokens[:, :most], hidden[:, :most], self._cache)
        self._took([most] * len(self.rows), unsettled=False)
        self._take_back([most - count for count in counts])
        rows, last = mx.arange(len(counts)), mx.array(list(counts)) - 1
        logits, states = logits[rows, last], states[rows, last][:, None]
        found = [sampler(logits).astype(mx.uint32)]
        for _ in range(guesses - 1):
            logits, states = head(found[-1][:, None], states, self._cache)
            found.append(sampler(logits[:, -1]).astype(mx.uint32))
        self._took([guesses - 1] * len(self.rows), unsettled=False)
        self._take_back([guesses - 1] * len(self.rows))
        for row, count in zip(self.rows, counts, strict=True):
            row.unsettled += count if unsettled else 0
        return mx.stack(found, axis=1)

    def _took(self, tokens: Sequence[int], *, unsettled: bool) -> None:
        for row, count in zip(self.rows, tokens, strict=True):
            row.computed += count
            row.unsettled += count if unsettled else 0
