"""Guesses at the tail, by the model's MTP head (`staging.mtp_head`).

The head computes each token of a row along with the hidden state that it was sampled from, and guesses the
next one. To guess further tokens it goes on with its own guesses and hidden states, which then leave its
caches again. It follows rows that are alone: from the prompt on, or from the step on in which they are. While
several rows are computed together it computes none of them, and goes on behind a gap.

What it holds of a row is kept with a prefix of the row, in the memory of one row of the whole context. A row
that begins with a prefix of which nothing is kept, such as one from disk, is guessed for by what comes behind
it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
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
from sealring.node.engine import caches
from sealring.node.engine.caches import Cache, parts_of
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.mtp_head import MtpHead
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

_Made = TypeVar("_Made")

_ROWS = 2
"""Rows that are followed at once: one that may still be there, and one whose prompt is computed meanwhile."""

_TRIALS = 8
"""Guesses that are timed when the head is loaded."""


@dataclass(slots=True, eq=False)
class _Followed:
    """What the head has of one row."""

    cache: Cache
    prompt: tuple[int, ...] = ()
    computed: int = 0  # tokens in the cache
    gaps: bool = False  # whether tokens are missing in it
    unsettled: int = 0  # of them, since the row was settled
    rest: mx.array | None = None  # the hidden state behind the prompt's last token, [1, 1, width]
    guessed: mx.array | None = None  # by the last step


class TailDrafter:
    """One MTP head. Used by the compute thread only."""

    def __init__(self, head: MtpHead, stage: Stage, room: int, memory: int = 0) -> None:
        """`stage` is the tail's. There is memory for the caches of `room` tokens; `memory` is that in bytes,
        with the weights."""
        self.memory = memory
        self._head, self._stage, self._room = head, stage, room
        self._rows: dict[int, _Followed] = {}  # the oldest first
        self._together = False  # whether the last step was of several rows
        self._kept: OrderedDict[Origin, Cache] = OrderedDict()
        self._lengths: dict[Origin, int] = {}
        self._prefixes: dict[int, Origin] = {}  # of this epoch
        self.failed = False
        """Whether the model's own code has failed. It guesses nothing any more; answers go on without."""
        self.seconds = self._try(self._timed) or 0.0
        """How long a guess takes; 0 if the head has failed at that."""

    @property
    def facts(self) -> control.DraftFacts:
        """What the gateway learns of it."""
        return control.DraftFacts(
            source=control.DRAFT_SOURCE_MTP_HEAD,
            microseconds=round(1e6 * self.seconds),
            rows=1,
            ahead=True,
        )

    # Rows

    def begin(self, chunk: Chunk, prompt: tuple[int, ...]) -> None:
        """A row begins with the first chunk of its prompt. It is followed if it may soon be alone."""
        if self.failed or self._together:
            return
        row = self._start(chunk.row)
        row.prompt = prompt
        if chunk.prefix:
            row.gaps = not self._begin_with(row, self._prefixes.get(chunk.prefix), chunk.start)

    def _start(self, number: int) -> _Followed:
        while len(self._rows) >= _ROWS:
            del self._rows[next(iter(self._rows))]
        row = self._rows[number] = _Followed(self._head.make_cache())
        return row

    def _begin_with(self, row: _Followed, origin: Origin | None, tokens: int) -> bool:
        if origin is None or self._lengths.get(origin, 0) < tokens:
            return False
        self._kept.move_to_end(origin)
        if not self._fits(row, tokens) or origin not in self._kept:
            return False
        row.cache, row.computed = caches.first_tokens(self._kept[origin], tokens), tokens
        return True

    def follows(self, row: int) -> bool:
        """Whether it follows this row."""
        return row in self._rows

    def watch(self, rows: Sequence[int], *, asked: bool = True) -> bool:
        """The stage is about to compute these rows. Whether it follows the only one; it begins to if it is
        `asked` to."""
        self._together = len(rows) > 1
        if self.failed or self._together or not asked:
            for number in self._rows.keys() & set(rows):
                self._rows[number].gaps = True
            return False
        if rows[0] not in self._rows:
            self._start(rows[0]).gaps = True
        self._stage.hidden = []
        return True

    def seen(self, tokens: int) -> mx.array | None:
        """The hidden states [1, tokens, width] of the stage's calls since `watch`, of `tokens` tokens
        together."""
        found, self._stage.hidden = self._stage.hidden, None
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
            self._compute(row, hidden[:, : len(following)], mx.array([following], mx.uint32))

    def first(self, number: int, token: mx.array) -> None:
        """Computes the first token of an answer, uint32 [1]."""
        row = self._rows.get(number)
        if row is not None and row.rest is not None:
            self._compute(row, row.rest, token[None])
            row.rest = None

    def follow(self, number: int, hidden: mx.array, tokens: mx.array, *, unsettled: bool = False) -> None:
        """Computes sampled tokens, uint32 [tokens], without a guess. `unsettled`: some may not count."""
        row = self._rows[number]
        row.guessed = None
        self._compute(row, hidden, tokens[None])
        row.unsettled += tokens.shape[0] if unsettled else 0

    def guess(
        self,
        number: int,
        hidden: mx.array,
        tokens: mx.array,
        count: int,
        sampler: Sampler,
        *,
        unsettled: bool = False,
    ) -> mx.array:
        """As `follow`; then guesses `count` tokens behind these, uint32 [count], with the row's `sampler`.

        They are zeros where the head cannot compute.
        """
        row, sampled = self._rows[number], tokens.shape[0]
        row.guessed = None
        if not self.failed and self._fits(row, sampled + count):
            row.guessed = self._try(lambda: self._chain(row, hidden, tokens, count, sampler))
        if row.guessed is None:
            return mx.zeros((count,), mx.uint32)
        row.computed += sampled
        row.unsettled += sampled if unsettled else 0
        return row.guessed

    def right(self, number: int, sampled: Sequence[int]) -> int:
        """The number of tokens that count, of those sampled in a step that computed the row's last
        guesses."""
        row = self._rows.get(number)
        guessed = [] if row is None or row.guessed is None else np.array(row.guessed).tolist()
        count = 1
        while count < len(sampled) and guessed[count - 1 : count] == [sampled[count - 1]]:
            count += 1
        return count

    def change(self, change: Change) -> None:
        """Takes tokens back that do not count, and follows what becomes of rows and of kept prefixes."""
        if isinstance(change, Settling):
            self._settle(change)
        elif isinstance(change, Eviction):
            self._rows.pop(change.row, None)
        elif isinstance(change, Keeping):
            self._prefixes[change.prefix] = change.origin
            self._keep(change)
        elif isinstance(change, Adopting):
            self._prefixes[change.prefix] = change.origin
        elif isinstance(change, Dropping) and (origin := self._prefixes.pop(change.prefix, None)) is not None:
            self._give_up(origin)

    def _settle(self, change: Settling) -> None:
        row = self._rows.get(change.row)
        if row is not None:
            surplus, row.unsettled = max(0, row.unsettled - change.accepted), 0
            if surplus:
                caches.trim(row.cache, surplus)
                row.computed -= surplus

    # Prefixes

    def _keep(self, keeping: Keeping) -> None:
        """Keeps what it holds of a prefix of the row, if that is all of it."""
        row = self._rows.get(keeping.row)
        if row is None or row.gaps or keeping.tokens > row.computed or not self._fits(row, keeping.tokens):
            return
        cache = caches.detached(caches.first_tokens(row.cache, keeping.tokens))
        mx.async_eval(_states(cache))  # type: ignore[no-untyped-call]
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
        self._prefixes.clear()
        self._together, self._stage.hidden = False, None

    def distrust(self) -> None:
        """Computing has failed: forgets everything."""
        self.end_epoch()
        self._kept.clear()
        self._lengths.clear()

    # Computing

    def _compute(self, row: _Followed, hidden: mx.array, tokens: mx.array) -> None:
        count = tokens.shape[1]
        if self.failed or not self._fits(row, count):
            row.gaps = True
            return
        if self._try(lambda: self._head.fill(tokens, hidden, row.cache)) is not None:
            row.computed += count
            mx.async_eval(_states(row.cache))  # type: ignore[no-untyped-call]

    def _fits(self, row: _Followed, tokens: int) -> bool:
        """Whether there is memory for more tokens of the row, beside those of others; gives up prefixes, the
        oldest first, and then other rows for that."""
        while self._held() + tokens > self._room:
            others = [number for number, other in self._rows.items() if other is not row]
            if self._kept:
                self._give_up(next(iter(self._kept)))
            elif others:
                del self._rows[others[0]]
            else:
                return False
        return True

    def _held(self) -> int:
        """Tokens in all caches."""
        return sum(self._lengths.values()) + sum(row.computed for row in self._rows.values())

    def _chain(
        self, row: _Followed, hidden: mx.array, tokens: mx.array, count: int, sampler: Sampler
    ) -> mx.array:
        guesses: list[mx.array] = []
        given = tokens[None]
        for _ in range(count):
            logits, hidden = self._head(given, hidden, row.cache)
            guesses.append(sampler(logits[:, -1]).astype(mx.uint32))
            given, hidden = guesses[-1][None], hidden[:, -1:]
        caches.trim(row.cache, count - 1)
        return mx.concatenate(guesses)

    def _try(self, compute: Callable[[], _Made]) -> _Made | None:
        try:
            return compute()
        except Exception as error:  # a model's own code may raise anything; answers need no guesses
            log.warning("mtp_head_failed", model_type=self._stage.spec.model_type, exc_info=error)
            self.failed = True
            self.distrust()
            return None

    def _timed(self) -> float:
        """Median seconds of a guess behind some others."""
        cache, took = self._head.make_cache(), []
        hidden = mx.zeros((1, 1, self._head.width), mx.float32)
        token = mx.zeros((1, 1), mx.uint32)
        for _ in range(_TRIALS):
            begun = time.perf_counter()
            mx.eval(mx.argmax(self._head(token, hidden, cache)[0]))
            took.append(time.perf_counter() - begun)
        return median(took)


def _states(cache: Cache) -> list[object]:
    return [part.state for entry in cache for part in parts_of(entry)]
