"""What drafters at the tail have in common: how they see rows, and which prefixes they keep.

All that a drafter holds has the memory of one row of the whole context: of rows, and of prefixes that are
kept of them. A row that begins with a prefix of which nothing is kept, such as one from disk, is guessed for
by what comes behind it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import mlx.core as mx
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
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

_Made = TypeVar("_Made")

_TRIALS = 8
"""Guesses that are timed when a drafter is loaded."""


@dataclass(slots=True, eq=False)
class Followed:
    """What a drafter has of one row. All but `cache` are lazy or of a few tokens."""

    cache: Cache
    prompt: tuple[int, ...] = ()
    computed: int = 0  # tokens in the cache
    gaps: bool = False  # whether tokens are missing in it
    rest: mx.array | None = None  # the hidden state behind the prompt's last token, [1, 1, width]


class TailDrafter(ABC):
    """One drafter. Used by the compute thread only."""

    failed = False
    """Whether the drafter's code has failed. It guesses nothing any more; answers go on without."""

    def __init__(self, kind: str, stage: Stage, room: int, memory: int, empty: Cache) -> None:
        """`stage` is the tail's. There is memory for caches of `room` tokens, which begin as `empty` ones;
        `memory` is that in bytes, with the weights."""
        self.memory = memory
        self._kind, self._stage, self._room = kind, stage, room
        self._cuts = caches.trimmable(empty)
        self._kept: OrderedDict[Origin, Cache] = OrderedDict()
        self._prefixes: dict[int, Origin] = {}  # of this epoch

    @property
    @abstractmethod
    def facts(self) -> control.DraftFacts:
        """What the gateway learns of it."""

    # Rows

    @abstractmethod
    def begin(self, chunk: Chunk, prompt: tuple[int, ...]) -> None:
        """A row begins with the first chunk of its prompt."""

    def _begin(self, row: Followed, chunk: Chunk, prompt: tuple[int, ...]) -> None:
        """Begins a row, with what is kept of its prefix."""
        row.prompt, row.gaps = prompt, chunk.prefix != 0
        origin, tokens = self._prefixes.get(chunk.prefix), chunk.start
        if origin is None or origin not in self._kept or tokens > origin.tokens:
            return
        self._kept.move_to_end(origin)
        if (self._cuts or tokens == origin.tokens) and self._fits(self._in_rows() + tokens, origin):
            row.cache = caches.first_tokens(self._kept[origin], tokens)
            row.computed, row.gaps = tokens, False

    @abstractmethod
    def _of(self, number: int) -> Followed | None:
        """What it has of a row; None if it does not follow it."""

    @abstractmethod
    def _in_rows(self) -> int:
        """Tokens in the caches of rows."""

    def follows(self, row: int) -> bool:
        """Whether it follows this row."""
        return self._of(row) is not None

    @abstractmethod
    def watch(self, rows: Sequence[int], *, asked: bool = True) -> bool:
        """The stage is about to compute these rows, with guesses or without; `asked` if some may be wanted
        soon. Whether it follows them."""

    def _collect(self, hidden: list[mx.array] | None) -> None:
        self._stage.hidden = self._stage.prefill.hidden = hidden

    def seen(self, tokens: int) -> mx.array | None:
        """The hidden states [rows, tokens, width] of the stage's calls since `watch`, of `tokens` tokens
        together."""
        found = self._stage.hidden
        self._collect(None)
        if not found:
            return None
        return (found[0] if len(found) == 1 else mx.concatenate(found, axis=1))[:, :tokens]

    def fill(self, chunk: Chunk) -> None:
        """Computes a chunk of a followed row's prompt, which the stage was called on since `watch`."""
        hidden, row, count = self.seen(chunk.tokens), self._of(chunk.row), chunk.tokens - chunk.last
        if hidden is None or row is None:
            return
        following = self._following(row, chunk.start + 1, count)
        row.gaps |= len(following) < count
        if chunk.last:
            row.rest, row.prompt = hidden[:, -1:], ()
        if following:
            self.follow([chunk.row], hidden[:, : len(following)], mx.array([following], mx.uint32))

    def _following(self, row: Followed, start: int, count: int) -> tuple[int, ...]:
        """Tokens of a prompt, as far as they are known."""
        return row.prompt[start : start + count]

    def first(self, number: int, token: mx.array) -> None:
        """Computes the first token of an answer, uint32 [1]."""
        row = self._of(number)
        if row is not None and row.rest is not None:
            rest, row.rest = row.rest, None
            self.follow([number], rest, token[None])

    @abstractmethod
    def follow(
        self, rows: Sequence[int], hidden: mx.array, tokens: mx.array, *, unsettled: bool = False
    ) -> None:
        """Computes sampled tokens of rows that it follows, uint32 [rows, tokens], behind hidden states [rows,
        tokens, width], without a guess. `unsettled`: some may not count."""

    @abstractmethod
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

        They are zeros where the drafter cannot compute.
        """

    @abstractmethod
    def right(self, rows: Sequence[int], sampled: Sequence[Sequence[int]]) -> list[int]:
        """The numbers of tokens that count, of those sampled in a step that computed the rows' last
        guesses."""

    def change(self, change: Change) -> None:
        """Takes tokens back that do not count, and follows what becomes of rows and of kept prefixes."""
        if isinstance(change, Settling):
            self._settle(change.row, change.accepted)
        elif isinstance(change, Eviction):
            self._forget(change.row)
        elif isinstance(change, Adopting):
            self._prefixes[change.prefix] = change.origin
        elif isinstance(change, Keeping):
            self._prefixes[change.prefix] = change.origin
            self._keep(change)
        elif isinstance(change, Dropping) and (origin := self._prefixes.pop(change.prefix, None)) is not None:
            self._kept.pop(origin, None)

    @abstractmethod
    def _settle(self, number: int, accepted: int) -> None:
        """The number of a row's unsettled tokens that count is `accepted`."""

    @abstractmethod
    def _forget(self, number: int) -> None:
        """A row is gone."""

    # Prefixes

    def _keep(self, keeping: Keeping) -> None:
        """Keeps what it holds of a prefix of the row, if that is all of it."""
        row, tokens = self._of(keeping.row), keeping.tokens
        own = None if row is None or row.gaps else self._whole(row, tokens)
        if own is not None and self._fits(self._in_rows() + tokens):
            cache = caches.detached(caches.first_tokens(own, tokens))
            evaluate(cache)
            self._kept[keeping.origin] = cache

    @abstractmethod
    def _whole(self, row: Followed, tokens: int) -> Cache | None:
        """The row's cache, if it has these first tokens and can be cut to them."""

    def _fits(self, tokens: int, but: Origin | None = None) -> bool:
        """Whether there is memory for as many tokens in rows; gives up prefixes `but` one for that, the
        oldest first."""
        while sum(origin.tokens for origin in self._kept) + tokens > self._room:
            others = [origin for origin in self._kept if origin != but]
            if not others:
                return False
            del self._kept[others[0]]
        return True

    def turn_over(self, origins: Collection[Origin]) -> None:
        """Begins an epoch. Of earlier ones only prefixes of these origins may be adopted."""
        self.end_epoch()
        for origin in self._kept.keys() - set(origins):
            del self._kept[origin]

    def end_epoch(self) -> None:
        """All rows are gone."""
        self._prefixes.clear()
        self._collect(None)

    def distrust(self) -> None:
        """Computing has failed: forgets everything."""
        self.end_epoch()
        self._kept.clear()

    # Computing

    def _try(self, compute: Callable[[], _Made]) -> _Made | None:
        try:
            return compute()
        except Exception as error:  # a model's own code may raise anything; answers need no guesses
            log.warning("drafter_failed", kind=self._kind, exc_info=error)
            self.failed = True
            self.distrust()
            return None

    def _timed(self, guess: Callable[[], mx.array]) -> float:
        """Median seconds of a guess; 0 if the drafter has failed at that."""
        took = []
        for _ in range(_TRIALS):
            begun = time.perf_counter()
            self._try(lambda: mx.eval(guess()))
            if self.failed:
                return 0.0
            took.append(time.perf_counter() - begun)
        return median(took)


def counted(sampled: Sequence[int], guessed: Sequence[int]) -> int:
    """How many of a row's sampled tokens count: those before which all guesses equal them, and one more."""
    count = 1
    while count < len(sampled) and list(guessed[count - 1 : count]) == [sampled[count - 1]]:
        count += 1
    return count


def evaluate(cache: Cache) -> None:
    """Has the device compute a cache, which would else keep what it is made of."""
    mx.async_eval([part.state for entry in cache for part in parts_of(entry)])  # type: ignore[no-untyped-call]
