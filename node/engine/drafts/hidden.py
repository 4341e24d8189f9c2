"""Guesses at the tail, by a drafter that reads hidden states of the model (`drafter_models`).

Steps and chunks bring the hidden states of a row that is alone in its lane (`taps`). Each token goes in with
those that it was sampled from, as with an MTP head. Tokens of which they did not come are a gap, behind which
the drafter goes on: those of a prefix of which nothing is kept here, and those computed beside other rows.

Caches never go back: windows could not be cut. Tokens that may not count wait until a step settles them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
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
from sealring.node.engine.caches import Cache
from sealring.node.engine.drafts.drafter_models import DrafterModel
from sealring.node.engine.drafts.mtp import counted
from sealring.node.engine.drafts.mtp_rows import evaluate
from sealring.node.engine.params import RowParameters
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

_Made = TypeVar("_Made")

_TRIALS = 8
"""Passes that are timed when the drafter is loaded."""


@dataclass(slots=True, eq=False)
class _Followed:
    """What the drafter has of one row. All but `cache` are lazy or of a few tokens."""

    number: int
    cache: Cache
    prompt: tuple[int, ...] = ()
    computed: int = 0  # tokens in the cache
    gaps: bool = False  # whether tokens are missing in it
    rest: mx.array | None = None  # the hidden states behind the prompt's last token, [1, 1, width]
    waiting: list[tuple[mx.array, mx.array]] = field(default_factory=list)  # hidden states and tokens
    guessed: mx.array | None = None  # by the last step


class HiddenDrafter:
    """One drafter, which follows one row. Used by the compute thread only."""

    def __init__(self, model: DrafterModel, stage: Stage, room: int, memory: int = 0) -> None:
        """`stage` is the tail's, and taps what the drafter reads. There is memory for the caches of `room`
        tokens; `memory` is that in bytes, with the weights."""
        self.memory = memory
        self._model, self._stage, self._room = model, stage, room
        self._stages = {stage, stage.prefill}
        self._cuts = caches.trimmable(model.make_cache())
        self._row: _Followed | None = None
        self._kept: OrderedDict[Origin, Cache] = OrderedDict()
        self._prefixes: dict[int, Origin] = {}  # of this epoch
        self.failed = False
        """Whether the drafter's code has failed. It guesses nothing any more; answers go on without."""
        self.seconds = self._try(self._timed) or 0.0
        """How long a pass takes, of a block or of one guess; 0 if the drafter has failed at that."""

    @property
    def facts(self) -> control.DraftFacts:
        """What the gateway learns of it."""
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
        """A row begins with the first chunk of its prompt, whose hidden states come."""
        if self.failed or not chunk.taps:
            return
        row = self._start(chunk.row)
        row.prompt, origin = prompt, self._prefixes.get(chunk.prefix)
        row.gaps = chunk.prefix != 0
        if origin is None or origin not in self._kept or not self._holds(origin, chunk.start):
            return
        if self._fits(row, chunk.start, origin):
            row.cache = caches.first_tokens(self._kept[origin], chunk.start)
            row.computed, row.gaps = chunk.start, False

    def _start(self, number: int) -> _Followed:
        self._row = _Followed(number, self._model.make_cache())
        return self._row

    def _of(self, number: int) -> _Followed | None:
        return self._row if self._row is not None and self._row.number == number else None

    def follows(self, row: int) -> bool:
        """Whether it follows this row."""
        return self._of(row) is not None

    def watch(self, rows: Sequence[int], *, asked: bool = True) -> bool:
        """The stage is about to compute these rows. Whether it follows the only one; it begins to if the step
        brings hidden states."""
        if self.failed or len(rows) > 1 or not any(one.tapping for one in self._stages):
            if self._row is not None and self._row.number in rows:
                self._row.gaps = True
            return False
        if self._of(rows[0]) is None:
            self._start(rows[0]).gaps = True
        self._collect([])
        return True

    def seen(self, tokens: int) -> mx.array | None:
        """The hidden states [1, tokens, width] of the stage's calls since `watch`, of `tokens` tokens
        together."""
        found = self._stage.hidden
        self._collect(None)
        return mx.concatenate(found, axis=1)[:, :tokens] if found else None

    def _collect(self, hidden: list[mx.array] | None) -> None:
        for stage in self._stages:
            stage.hidden, stage.tapping = hidden, hidden is not None

    def fill(self, chunk: Chunk) -> None:
        """Computes a chunk of a followed row's prompt, which the stage was called on since `watch`. A drafter
        of blocks reads no tokens of it."""
        hidden, row, count = self.seen(chunk.tokens), self._of(chunk.row), chunk.tokens - chunk.last
        if hidden is None or row is None:
            return
        block = self._model.facts.block
        tokens = (0,) * count if block else row.prompt[chunk.start + 1 : chunk.start + 1 + count]
        row.gaps |= len(tokens) < count
        if count and len(tokens) == count:
            self._compute(row, hidden[:, :count], mx.array(tokens, mx.uint32))
        if chunk.last:
            row.rest, row.prompt = hidden[:, -1:], ()

    def first(self, number: int, token: mx.array) -> None:
        """Computes the first token of an answer, uint32 [1]."""
        row = self._of(number)
        if row is not None and row.rest is not None:
            self._compute(row, row.rest, token)
            row.rest = None

    def follow(
        self, rows: Sequence[int], hidden: mx.array, tokens: mx.array, *, unsettled: bool = False
    ) -> None:
        """Computes sampled tokens of the row that it follows, uint32 [1, tokens], behind hidden states [1,
        tokens, width], without a guess. `unsettled`: some may not count."""
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
        """As `follow`, of the first tokens, as many as `counts` says, which all count; then guesses as many
        tokens as `guesses` says behind these, uint32 [1, guesses], with the row's `sampler`. They are zeros
        where the drafter cannot compute."""
        row, count = self._of(rows[0]), counts[0]
        if row is not None:
            given = tokens[:, :count], hidden[:, :count], row.cache, guesses, sampler
            fits, row.guessed = not self.failed and self._fits(row, count + guesses), None
            row.guessed = self._try(lambda: self._model.guess(*given)) if fits else None
        if row is None or row.guessed is None:
            if row is not None:
                row.gaps = True
            return mx.zeros((1, guesses), mx.uint32)
        row.computed += count
        return row.guessed[None]

    def right(self, rows: Sequence[int], sampled: Sequence[Sequence[int]]) -> list[int]:
        """The number of tokens that count, of those sampled in a step that computed the row's last
        guesses."""
        row = self._of(rows[0])
        guessed = [] if row is None or row.guessed is None else np.array(row.guessed).tolist()
        return [counted(sampled[0], guessed)]

    def change(self, change: Change) -> None:
        """Follows what becomes of tokens that may not count, of rows and of kept prefixes."""
        if isinstance(change, Settling):
            if (row := self._of(change.row)) is not None and row.waiting:
                hidden = mx.concatenate([one for one, _ in row.waiting], axis=1)
                tokens, row.waiting = mx.concatenate([one for _, one in row.waiting]), []
                self._compute(row, hidden[:, : change.accepted], tokens[: change.accepted])
        elif isinstance(change, Eviction):
            if self.follows(change.row):
                self._row = None
        elif isinstance(change, Keeping):
            self._prefixes[change.prefix] = change.origin
            self._keep(change)
        elif isinstance(change, Adopting):
            self._prefixes[change.prefix] = change.origin
        elif isinstance(change, Dropping) and (origin := self._prefixes.pop(change.prefix, None)) is not None:
            self._kept.pop(origin, None)

    # Prefixes

    def _keep(self, keeping: Keeping) -> None:
        """Keeps what it holds of a prefix of the row, if that is all of it."""
        row, tokens = self._of(keeping.row), keeping.tokens
        if row is None or row.gaps or not tokens <= row.computed <= (self._room if self._cuts else tokens):
            return
        if self._fits(row, tokens):
            cache = caches.detached(caches.first_tokens(row.cache, tokens))
            evaluate(cache)
            self._kept[keeping.origin] = cache

    def _holds(self, origin: Origin, tokens: int) -> bool:
        return tokens <= origin.tokens if self._cuts else tokens == origin.tokens

    def turn_over(self, origins: Collection[Origin]) -> None:
        """Begins an epoch. Of earlier ones only prefixes of these origins may be adopted."""
        self.end_epoch()
        for origin in self._kept.keys() - set(origins):
            del self._kept[origin]

    def end_epoch(self) -> None:
        """All rows are gone."""
        self._row = None
        self._collect(None)
        self._prefixes.clear()

    def distrust(self) -> None:
        """Computing has failed: forgets everything."""
        self.end_epoch()
        self._kept.clear()

    # Computing

    def _compute(self, row: _Followed, hidden: mx.array, tokens: mx.array) -> None:
        count, model, cache = tokens.shape[0], self._model, row.cache
        if self.failed or not self._fits(row, count):
            row.gaps = True
        elif self._try(lambda: model.fill(tokens[None], hidden, cache)) is not None:
            row.computed += count
            evaluate(cache)

    def _fits(self, row: _Followed, tokens: int, but: Origin | None = None) -> bool:
        """Whether there is memory for more tokens of the row; gives up prefixes `but` one for that, the
        oldest first."""
        while sum(origin.tokens for origin in self._kept) + row.computed + tokens > self._room:
            others = [origin for origin in self._kept if origin != but]
            if not others:
                return False
            del self._kept[others[0]]
        return True

    def _try(self, compute: Callable[[], _Made]) -> _Made | None:
        try:
            return compute()
        except Exception as error:  # a module of another package may raise anything; answers need no guesses
            log.warning("drafter_failed", kind=self._model.facts.kind, exc_info=error)
            self.failed = True
            self.distrust()
            return None

    def _timed(self) -> float:
        """Median seconds of a pass."""
        cache, took, count = self._model.make_cache(), [], max(1, self._model.facts.block)
        hidden, token = mx.zeros((1, 1, self._model.width)), mx.zeros((1, 1), mx.uint32)
        for _ in range(_TRIALS):
            begun = time.perf_counter()
            mx.eval(self._model.guess(token, hidden, cache, count, Sampler([RowParameters()], [0])))
            took.append(time.perf_counter() - begun)
        return median(took)
