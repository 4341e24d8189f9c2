"""Guesses at the tail, by the model's MTP head (`staging.mtp_head`).

The head computes each token of a row along with the hidden state that it was sampled from, and guesses the
next one. To guess further tokens it goes on with its own guesses and hidden states, which then leave its
caches again. Rows of a lane are computed together, whatever number of their tokens counts (`mtp_rows.py`).
The head follows rows from the prompt on while there are few, or from the step on in which guesses may be
wanted. What it has not computed in between is a gap, behind which it goes on.

All that it holds has the memory of one row of the whole context: of rows, and of prefixes that are kept of
them. Rows for which that is too little go on behind a gap. A row that begins with a prefix of which nothing
is kept, such as one from disk, is guessed for by what comes behind it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from statistics import median
from typing import TypeVar

import mlx.core as mx
import numpy as np
import structlog

from sealring.mesh.ring.composition import (
    Adopting,
    Change,
    Chunk,
    Dropping,
    Eviction,
    Keeping,
    Settling,
)
from sealring.mesh.ring.kept_prefixes import Origin
from sealring.mesh.ring.limits import HEAD_ROWS
from sealring.node.engine import caches
from sealring.node.engine.caches import Cache
from sealring.node.engine.drafts.mtp_rows import Followed, HeadLane, evaluate
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.mtp_head import MtpHead
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

_Made = TypeVar("_Made")

_FOLLOWED = 2 * HEAD_ROWS
"""Rows of which something is held: others may still be there while prompts of further ones are computed."""

_TRIALS = 8
"""Guesses that are timed when the head is loaded."""


class TailDrafter:
    """One MTP head. Used by the compute thread only."""

    def __init__(self, head: MtpHead, stage: Stage, room: int, memory: int = 0) -> None:
        """`stage` is the tail's. There is memory for the caches of `room` tokens; `memory` is that in bytes,
        with the weights."""
        self.memory = memory
        self._head, self._stage, self._room = head, stage, room
        self._rows: dict[int, Followed] = {}  # the oldest first
        self._open: set[int] = set()  # rows of the ring
        self._kept: OrderedDict[Origin, Cache] = OrderedDict()
        self._lengths: dict[Origin, int] = {}
        self._prefixes: dict[int, Origin] = {}  # of this epoch
        empty = caches.for_one_row(head.make_cache(), stage.batches)
        self._most = HEAD_ROWS if caches.cuts_together(empty) else 1
        self.failed = False
        """Whether the model's own code has failed. It guesses nothing any more; answers go on without."""
        self.seconds = self._try(lambda: self._timed(1)) or 0.0
        """How long a guess takes; 0 if the head has failed at that."""
        self._together = (self._try(lambda: self._timed(HEAD_ROWS)) or 0.0) if self._most > 1 else 0.0

    @property
    def facts(self) -> control.DraftFacts:
        """What the gateway learns of it."""
        return control.DraftFacts(
            source=control.DRAFT_SOURCE_MTP_HEAD,
            microseconds=round(1e6 * self.seconds),
            rows=self._most,
            rows_microseconds=round(1e6 * self._together),
            ahead=True,
        )

    # Rows

    def begin(self, chunk: Chunk, prompt: tuple[int, ...]) -> None:
        """A row begins with the first chunk of its prompt. It is followed while there are few rows."""
        self._open.add(chunk.row)
        if self.failed or len(self._open) > self._most:
            return
        row = self._start(chunk.row)
        row.prompt = prompt
        if chunk.prefix:
            row.gaps = not self._begin_with(row, self._prefixes.get(chunk.prefix), chunk.start)

    def _start(self, number: int, beside: Collection[int] = ()) -> Followed:
        while len(self._rows) >= _FOLLOWED:
            self._forget(next(other for other in self._rows if other not in beside))
        row = self._rows[number] = Followed(self._head.make_cache())
        return row

    def _forget(self, number: int) -> None:
        row = self._rows.pop(number, None)
        if row is not None:
            row.part()

    def _begin_with(self, row: Followed, origin: Origin | None, tokens: int) -> bool:
        if origin is None or self._lengths.get(origin, 0) < tokens:
            return False
        self._kept.move_to_end(origin)
        if not self._fits([row], tokens) or origin not in self._kept:
            return False
        row.cache, row.computed = caches.first_tokens(self._kept[origin], tokens), tokens
        return True

    def follows(self, row: int) -> bool:
        """Whether it follows this row."""
        return row in self._rows

    def watch(self, rows: Sequence[int], *, asked: bool = True) -> bool:
        """The stage is about to compute these rows. Whether it follows them; it begins to if it is `asked`
        to."""
        if self.failed or not asked or len(rows) > self._most:
            for number in self._rows.keys() & set(rows):
                self._rows[number].gaps = True
            return False
        for number in rows:
            if number not in self._rows:
                self._start(number, rows).gaps = True
        self._stage.hidden = self._stage.prefill.hidden = []
        return True

    def seen(self, tokens: int) -> mx.array | None:
        """The hidden states [rows, tokens, width] of the stage's calls since `watch`, of `tokens` tokens
        together."""
        found = self._stage.hidden
        self._stage.hidden = self._stage.prefill.hidden = None
        if not found:
            return None
        joined = found[0] if len(found) == 1 else mx.concatenate(found, axis=1)
        return self._head.normed(joined[:, :tokens])

    def fill(self, chunk: Chunk) -> None:
        """Computes a chunk of a followed row's prompt, which the stage was called on since `watch`."""
        hidden, row = self.seen(chunk.tokens), self._rows.get(chunk.row)
        if hidden is None or row is None:
            return
        following = row.prompt[chunk.start + 1 : chunk.end + 1]
        if chunk.last:
            row.rest, row.prompt = hidden[:, -1:], ()
        if following:
            self.follow([chunk.row], hidden[:, : len(following)], mx.array([following], mx.uint32))

    def first(self, number: int, token: mx.array) -> None:
        """Computes the first token of an answer, uint32 [1]."""
        row = self._rows.get(number)
        if row is not None and row.rest is not None:
            rest, row.rest = row.rest, None
            self.follow([number], rest, token[None])

    def follow(
        self, rows: Sequence[int], hidden: mx.array, tokens: mx.array, *, unsettled: bool = False
    ) -> None:
        """Computes sampled tokens of rows that it follows, uint32 [rows, tokens], behind hidden states [rows,
        tokens, width], without a guess. `unsettled`: some may not count."""
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
        """As `follow`, of the first tokens of each row, as many as `counts` says; then guesses as many tokens
        as `guesses` says behind these, uint32 [rows, guesses], with the rows' `sampler`.

        They are zeros where the head cannot compute.
        """
        lane = self._lane(rows, tokens.shape[1] + guesses)
        if lane is not None:
            made = partial(lane.guess, self._head, hidden, tokens, counts, guesses, sampler)
            lane.guessed = self._try(partial(made, unsettled=unsettled))
        if lane is None or lane.guessed is None:
            return mx.zeros((len(rows), guesses), mx.uint32)
        return lane.guessed

    def right(self, rows: Sequence[int], sampled: Sequence[Sequence[int]]) -> list[int]:
        """The numbers of tokens that count, of those sampled in a step that computed the rows' last
        guesses."""
        row = self._rows.get(rows[0])
        lane = None if row is None else row.lane
        guessed = None if lane is None or lane.guessed is None else np.array(lane.guessed).tolist()
        if guessed is None or len(guessed) != len(rows):
            return [1] * len(rows)
        return [counted(*each) for each in zip(sampled, guessed, strict=True)]

    def change(self, change: Change) -> None:
        """Takes tokens back that do not count, and follows what becomes of rows and of kept prefixes."""
        if isinstance(change, Settling):
            if change.row in self._rows:
                self._rows[change.row].settle(change.accepted)
        elif isinstance(change, Eviction):
            self._open.discard(change.row)
            self._forget(change.row)
        elif isinstance(change, Keeping):
            self._prefixes[change.prefix] = change.origin
            self._keep(change)
        elif isinstance(change, Adopting):
            self._prefixes[change.prefix] = change.origin
        elif isinstance(change, Dropping) and (origin := self._prefixes.pop(change.prefix, None)) is not None:
            self._give_up(origin)

    # Prefixes

    def _keep(self, keeping: Keeping) -> None:
        """Keeps what it holds of a prefix of the row, if that is all of it."""
        row = self._rows.get(keeping.row)
        if row is None or row.gaps or keeping.tokens > row.computed - row.surplus:
            return
        while self._kept and self._held() + keeping.tokens > self._room:
            self._give_up(next(iter(self._kept)))
        if self._held() + keeping.tokens > self._room:
            return
        own = row.cache if row.lane is None else row.lane.cache_of(row)
        cache = caches.detached(caches.first_tokens(own, keeping.tokens))
        evaluate(cache)
        self._kept[keeping.origin], self._lengths[keeping.origin] = cache, keeping.tokens

    def _give_up(self, origin: Origin) -> None:
        self._kept.pop(origin, None)
        self._lengths.pop(origin, None)

    def turn_over(self, origins: Collection[Origin]) -> None:
        """Begins an epoch. Of earlier ones only prefixes of these origins may be adopted."""
        self.end_epoch()
        for origin in self._kept.keys() - set(origins):
            self._give_up(origin)

    def end_epoch(self) -> None:
        """All rows are gone."""
        self._rows.clear()
        self._open.clear()
        self._prefixes.clear()
        self._stage.hidden = self._stage.prefill.hidden = None

    def distrust(self) -> None:
        """Computing has failed: forgets everything."""
        self.end_epoch()
        self._kept.clear()
        self._lengths.clear()

    # Computing

    def _lane(self, rows: Sequence[int], tokens: int) -> HeadLane | None:
        """The caches of these rows, with memory for as many more tokens of each. Where that is not there, the
        rows begin again."""
        followed = [self._rows[number] for number in rows]
        if self.failed:
            return None
        if not self._fits(followed, tokens):
            for row in followed:
                row.begin_again(self._head.make_cache())
        lane = followed[0].lane
        if lane is None or lane.rows != followed:
            lane = HeadLane(followed)
        lane.settle()
        return lane

    def _fits(self, rows: Sequence[Followed], tokens: int) -> bool:
        """Whether there is memory for as many more tokens of each row, beside those of others; gives up
        prefixes, the oldest first, and then other rows for that."""
        while self._held(rows) + len(rows) * tokens > self._room:
            others = [number for number, other in self._rows.items() if other not in rows]
            if self._kept:
                self._give_up(next(iter(self._kept)))
            elif others:
                self._forget(others[0])
            else:
                return False
        return True

    def _held(self, together: Sequence[Followed] = ()) -> int:
        """Tokens in all caches. Of rows that are computed `together`, each takes as many as the longest."""
        apart = sum(row.room for row in self._rows.values() if row not in together)
        longest = max((row.computed for row in together), default=0)
        return sum(self._lengths.values()) + apart + len(together) * longest

    def _try(self, compute: Callable[[], _Made]) -> _Made | None:
        try:
            return compute()
        except Exception as error:  # a model's own code may raise anything; answers need no guesses
            log.warning("mtp_head_failed", model_type=self._stage.spec.model_type, exc_info=error)
            self.failed = True
            self.distrust()
            return None

    def _timed(self, rows: int) -> float:
        """Median seconds of a guess for each of some rows, behind some others."""
        cache, took = self._head.make_cache(), []
        if rows > 1:
            cache = caches.merge([self._head.make_cache() for _ in range(rows)])
        hidden = mx.zeros((rows, 1, self._head.width), mx.float32)
        tokens = mx.zeros((rows, 1), mx.uint32)
        for _ in range(_TRIALS):
            begun = time.perf_counter()
            mx.eval(mx.argmax(self._head(tokens, hidden, cache)[0], axis=-1))
            took.append(time.perf_counter() - begun)
        return median(took)


def counted(sampled: Sequence[int], guessed: Sequence[int]) -> int:
    """How many of a row's sampled tokens count: those before which all guesses equal them, and one more."""
    count = 1
    while count < len(sampled) and list(guessed[count - 1 : count]) == [sampled[count - 1]]:
        count += 1
    return count
