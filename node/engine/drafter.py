"""The draft model at the head: a small model of the same tokenizer that guesses what a row will say next.

It is a stage of one, with caches of its own for each of a few rows. It computes one row at a time, between
the steps of the head's stage: while these wait for tokens, and when a run of guesses is to be computed that
is not complete yet. The prompt of a row is computed in parts that fit into such a wait. Guesses begin when it
is through.

The caches of rows that are gone are kept, newest first, as far as they fit. A row that begins with the same
tokens goes on from there, so that an agent's conversation is not computed again with every turn.

Wrong guesses are cut off its caches. Windows and states cannot be cut. So a row with such caches is marked
every few tokens (`staging/undo.py`). It goes back to the mark before the wrong guess, and the tokens since
then are computed again in the pass that makes the next guess.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import structlog

from sealring.mesh.ring.limits import DRAFT_MARKS
from sealring.mesh.ring.prefix_marks import thinned
from sealring.node.engine import params
from sealring.node.engine.drafts import CAUGHT_UP, Feed, Guesses
from sealring.node.engine.params import RowParameters
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage, caches
from sealring.node.engine.staging.caches import Cache
from sealring.node.engine.staging.layout import TOKENS
from sealring.node.engine.staging.undo import Mark, cut_to, go_back, mark
from sealring.node.engine.transfer import Transfer, through_record, transfer
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

_UNIT = 0.05
"""Seconds of a part of a prompt, where nobody knows how long the head will wait."""

ROWS = 4
"""Rows that a draft model guesses for at once. Policy: of more, a step of all takes as long as their guesses
would save."""

_BEHIND, _RESTED = 12, 64
"""Tokens that a row may be behind until it is computed though the head is not idle, and until it is left to
idle times again. Policy: a pass of 12 tokens once in 12 steps is 1 or 2 % of them."""

_TRIALS = 8
"""Guesses that are timed when the model is loaded."""

_MOVED = 0.9
"""A row takes a kept cache over if it has this part of its tokens. Else it gets a copy of that part."""

_APART = 8
"""Tokens between two marks, and so the most that are computed again. On a Mac a pass of 8 tokens takes two
to three times as long as one of a single token."""

_ALONE, _BESIDE = (3, 2, 3), (1, 1, 1)
"""Marks of a row for which the model guesses, at most, alone and beside others: in its prompt, in its answer,
and behind that in guesses. With the caches of three rows more, those of four rows are DRAFT_MARKS at most."""

Tokens = npt.NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class _Kept:
    """The caches of the first tokens of a row that is gone."""

    scope: bytes
    tokens: Tokens
    cache: Cache
    marks: Mapping[int, Mark]
    """By length; none where caches can be cut."""

    def common(self, tokens: Tokens) -> int:
        """The number of these tokens that the cache can be cut to."""
        same = _common(self.tokens, tokens)
        return max((length for length in self.marks if length <= same), default=0) if self.marks else same


@dataclass(slots=True, eq=False)
class _Shared:
    """State that all rows of one draft model share."""

    desks: list[Drafter]
    failed: bool = False


class Drafter:
    """One draft model, and a row that it guesses for. Used by the compute thread only."""

    def __init__(
        self, stage: Stage, vocabulary: int, room: int, times: Sequence[control.StepTime], memory: int = 0
    ) -> None:
        """`stage` is the whole model, warmed up. `vocabulary` is the number of tokens that the large model
        may sample, and `room` the number of tokens for whose caches there is memory. `times` are those of
        `warm_up.timed`, and `memory` the bytes of weights and caches together.
        """
        self.memory = memory
        self._stage = stage
        self._vocabulary = min(vocabulary, stage.spec.hands_on[0].tail[0])
        self._room = min(room, stage.positions)
        first = (one for one in times if one.rows == 1 and not one.context)
        self._chunks = [(one.tokens, one.microseconds / 1e6) for one in first]
        self._moves: Transfer = transfer()
        self._kept: list[_Kept] = []
        self._shared = _Shared([self])
        self.row = 0
        """The row that it guesses for; 0 for none."""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the compute loop, which may have something to guess now; any thread."""
        self._guesses: Guesses | None = None
        self._parameters = RowParameters()
        self._begun = 0  # tokens of the row's prompt
        self._cache: Cache = []
        self._computed = 0  # tokens in the cache
        self._cuts = caches.trimmable(stage.make_cache())
        self._marks: dict[int, Mark] = {}
        self._resting = True
        self.seconds = self._timed()
        """How long a guess takes."""

    def another(self) -> Drafter:
        """A drafter for a further row: same model, same room and same kept caches."""
        made = copy.copy(self)
        made.reset()
        self._shared.desks.append(made)
        return made

    def follow(self, row: int, guesses: Guesses, parameters: Callable[[], bytes]) -> None:
        """Guesses for this row from now on. `parameters` gives its parameter record."""
        self._resting = self.failed
        if row == self.row or self.failed:
            return
        self.leave()
        self.row, self._guesses = row, guesses
        self._parameters = dataclasses.replace(params.decode(parameters()), logprobs=None, scored=())
        text = guesses.text
        self._begun = len(text)
        self._computed = self._start(guesses.scope, text[:-1])
        guesses.begin(self._computed)

    @property
    def failed(self) -> bool:
        """Whether the model's own code has failed. It guesses nothing any more; answers go on without."""
        return self._shared.failed

    @property
    def tokens(self) -> int:
        """Tokens in the caches of its row."""
        return self._computed

    @property
    def following(self) -> bool:
        """Whether it guesses for a row; any thread."""
        return self.row > 0 and not (self._resting or self.failed)

    def rest(self) -> None:
        """Guesses nothing until `follow` is called again."""
        self._resting = True

    def leave(self) -> None:
        """Keeps what was computed of the row, which is gone."""
        guesses = self._guesses
        if guesses is not None and guesses.scope and guesses.held:
            self._back(min(guesses.held, guesses.known))
            if not self._cuts:
                self._marks = self._thinned(self._begun, 2, 1) | {self._computed: mark(self._cache)}
            if self._computed:
                kept = _Kept(guesses.scope, guesses.text[: self._computed], self._cache, self._marks)
                self._kept.insert(0, kept)
        self._forget()
        self._make_room(0)

    def gone(self, row: int) -> None:
        """Notes that a row was evicted."""
        if row == self.row:
            self.leave()

    def reset(self) -> None:
        """Forgets its row."""
        self._forget()
        self._resting = True

    def clear(self) -> None:
        """Forgets its row and all that is kept."""
        self.reset()
        self._kept.clear()

    def _forget(self) -> None:
        self.row, self._guesses, self._cache, self._computed, self._marks = 0, None, [], 0, {}

    def work(self, spare: float = math.inf) -> bool:
        """Computes a guess, or a part of the row's prompt that takes at most `spare` seconds; False if there
        is nothing to do."""
        guesses = self._guesses
        if guesses is None or not self.following:
            return False
        behind = guesses.known - guesses.held
        if behind > CAUGHT_UP:
            return self._fill(guesses, min(behind - 1, self._fitting(min(spare, _UNIT))))
        return guesses.wanting and self._guess(guesses)

    def keep_up(self) -> None:
        """Guesses once before the row is too far behind: a head that is never idle would else not know how
        often guesses are right. If the row is behind already because nothing was guessed for a while, it
        computes those tokens."""
        guesses = self._guesses
        if guesses is None or not self.following:
            return
        behind = guesses.known - guesses.held
        if _BEHIND <= behind <= CAUGHT_UP:
            self._guess(guesses)
        elif CAUGHT_UP < behind <= _RESTED:
            self._fill(guesses, behind - 1)

    def taken(self, row: int, first: int, count: int, alive: Callable[[], bool]) -> list[int]:
        """The row's guesses of `count` tokens from place `first` on, made now as far as they are missing.

        If the chain is not `alive` any more, and if the model does not follow the row, they are any tokens.
        """
        while row == self.row and self._guesses is not None and alive():
            found = self._guesses.taken(first, count)
            if found is not None:
                self._guesses.send(first + count)
                return found
            if not self._guess(self._guesses):
                break
        return [0] * count

    def _fitting(self, seconds: float) -> int:
        """Tokens of the longest chunk that takes no longer."""
        return max((tokens for tokens, took in self._chunks if took <= seconds), default=0)

    def _fill(self, guesses: Guesses, tokens: int) -> bool:
        if not tokens or not self._reserve(guesses, tokens):
            return False

        def compute() -> None:
            feed = guesses.feed(tokens)
            missing = self._missing(guesses, feed)
            buffer = self._moves.receive_buffer(self._stage.spec.receives, 1, len(missing))
            buffer.fill(memoryview(self._fed(missing)))
            self._stage(buffer.arrays, self._cache)
            self._computed = feed.end
            mx.eval([part.state for entry in self._cache for part in caches.parts_of(entry)])
            self._moves.settle()

        return self._try(compute)

    def _guess(self, guesses: Guesses) -> bool:
        """Guesses the next token behind all that is known or guessed."""
        if guesses.known - guesses.held > CAUGHT_UP or not self._reserve(guesses, CAUGHT_UP):
            return False

        def compute() -> None:
            feed = guesses.feed(2 * CAUGHT_UP)
            guesses.guess(feed, self._next(self._missing(guesses, feed), feed.end))
            self._computed = feed.end

        return self._try(compute)

    def _next(self, tokens: Tokens, end: int) -> int:
        """The guess of the token number `end` of the row; `tokens` are those before that are not computed."""
        buffer = self._moves.receive_buffer(self._stage.spec.receives, 1, len(tokens))
        buffer.fill(memoryview(self._fed(tokens)))
        logits = self._stage.last_logits(buffer.arrays, self._cache)[:, : self._vocabulary]
        token = self._sampler(end)(logits)
        return int(np.frombuffer(through_record(self._moves, [token], [TOKENS], 1, 1), np.uint32)[0])

    def _sampler(self, end: int) -> Sampler:
        """The tail's sampler of the same token, with its random number and its penalties: what comes out is
        the likeliest to be sampled there."""
        row, position = self._parameters, self._parameters.position + end - self._begun
        if row.adjusts and self._guesses is not None:
            said = tuple(self._guesses.taken(self._begun, end - self._begun) or ())
            tail = (*row.prompt_tail, *said)[-row.repetition_context_size :] if row.repeats else ()
            answered = (*row.answered, *said) if row.counts else ()
            row = dataclasses.replace(row, prompt_tail=tail, answered=answered)
        return Sampler([row], [position])

    def _fed(self, tokens: Tokens) -> bytes:
        """Tokens as the model reads them; an id that it lacks, as padding has, would read other memory."""
        return np.where(tokens < self._vocabulary, tokens, 0).astype(np.uint32).tobytes()

    def _missing(self, guesses: Guesses, feed: Feed) -> Tokens:
        """The tokens up to the end of `feed` that the row's caches lack, once wrong guesses are out of
        them."""
        self._back(feed.start)
        again = guesses.taken(self._computed, feed.start - self._computed) or []
        self._mark(guesses.known)
        return np.concatenate([np.array(again, np.uint32), feed.tokens])

    def _back(self, tokens: int) -> None:
        """Takes the row's caches back to its first `tokens` tokens, or to the last mark before."""
        if self._computed <= tokens:
            return
        left = tokens if self._cuts else max(length for length in self._marks if length <= tokens)
        self._marks = {length: one for length, one in self._marks.items() if length <= left}
        go_back(self._cache, self._computed - left, self._marks.get(left, {}))
        self._computed = left

    def _mark(self, known: int) -> None:
        """Marks the row where it is, if it could not be taken back to here, and here is far enough from the
        last mark. The newest mark among the `known` tokens always stays."""
        if self._cuts or (self._marks and self._computed - max(self._marks) < _APART):
            return
        of_prompt, of_answer, most = self._limits
        if self._computed > known and sum(length > known for length in self._marks) >= most:
            return
        self._marks[self._computed] = mark(self._cache)
        ahead = {length: one for length, one in self._marks.items() if length > known}
        self._marks = self._thinned(known, of_prompt, of_answer) | ahead

    def _thinned(self, known: int, of_prompt: int, of_answer: int) -> dict[int, Mark]:
        """Some of the marks among the `known` tokens."""
        prompt = [length for length in self._marks if length <= self._begun]
        answer = [length for length in self._marks if self._begun < length <= known]
        chosen = thinned(prompt, of_prompt) + sorted(answer)[-of_answer:]
        return {length: self._marks[length] for length in chosen}

    def _reserve(self, guesses: Guesses, tokens: int) -> bool:
        """Whether the row may have more tokens in its caches; drops what is kept for that."""
        wanted = self._computed + tokens
        if self._beside + wanted > self._room:
            return False
        self._make_room(wanted)
        return True

    @property
    def _limits(self) -> tuple[int, int, int]:
        """Marks of this row, at most: in its prompt, in its answer, and behind that in guesses."""
        return _ALONE if self._rows == 1 else _BESIDE

    @property
    def _rows(self) -> int:
        """Rows for which the model guesses, at least one."""
        return max(1, sum(one.row > 0 for one in self._shared.desks))

    def _make_room(self, wanted: int) -> None:
        """Drops the oldest kept rows until `wanted` tokens of a row have room, and its marks."""
        marks = self._rows * sum(self._limits) + self._rows - 1
        while self._kept and (
            sum(len(one.tokens) for one in self._kept) + self._beside + wanted > self._room
            or sum(len(one.marks) for one in self._kept) + marks > DRAFT_MARKS
        ):
            self._kept.pop()

    @property
    def _beside(self) -> int:
        """Tokens in the caches of other rows."""
        return sum(one.tokens for one in self._shared.desks if one is not self)

    def _start(self, scope: bytes, tokens: Tokens) -> int:
        """Begins the row's caches with the longest kept beginning of these tokens; the length of that."""
        found, length = None, 0
        for one in self._kept if scope else ():
            same = one.common(tokens) if one.scope == scope else 0
            if same > length:
                found, length = one, same
        if found is None:
            self._cache = self._stage.make_cache()
            self._marks = {} if self._cuts else {0: mark(self._cache)}
            return 0
        marked = found.marks.get(length, {})
        if length >= _MOVED * len(found.tokens):
            self._kept.remove(found)
            self._cache = found.cache
            go_back(self._cache, len(found.tokens) - length, marked)
        else:
            self._make_room(length)
            self._cache = cut_to(found.cache, length, marked)
        self._marks = {at: one for at, one in found.marks.items() if at <= length}
        return length

    def _try(self, compute: Callable[[], None]) -> bool:
        try:
            compute()
        except Exception as error:  # a model's own code may raise anything; answers need no guesses
            log.error("draft_model_failed", model_type=self._stage.spec.model_type, exc_info=error)
            self._shared.failed = True
            self.clear()
            return False
        return True

    def _timed(self) -> float:
        """Median seconds of a guess behind a short prompt."""
        self._cache = self._stage.make_cache()
        took = []
        for place in range(_TRIALS):
            begun = time.perf_counter()
            self._next(np.zeros(1, np.uint32), place)
            took.append(time.perf_counter() - begun)
        self._cache = []
        return median(took)


class Desks:
    """A draft model that guesses for several rows, each at a `Drafter` of its own. Used by the compute thread
    only."""

    def __init__(self, first: Drafter) -> None:
        self._desks = [first]

    def follow(self, row: int, guesses: Guesses, parameters: Callable[[], bytes]) -> None:
        """As `Drafter.follow`. Of more than ROWS rows nobody guesses for the last."""
        desk = self._of(row) or self._of(0)
        if desk is None and len(self._desks) < ROWS:
            desk = self._desks[0].another()
            self._desks.append(desk)
        if desk is None:
            desk = next((one for one in self._desks if not one.following), None)
        if desk is not None:
            desk.follow(row, guesses, parameters)

    def rest(self, rows: Sequence[int]) -> None:
        """Guesses nothing for these rows until `follow` is called again."""
        for desk in self._desks:
            if desk.row in rows:
                desk.rest()

    @property
    def following(self) -> bool:
        """Whether it guesses for any row; any thread."""
        return any(desk.following for desk in self._desks)

    def work(self, spare: float) -> bool:
        """As `Drafter.work`, for the row that has waited longest."""
        for place, desk in enumerate(self._desks):
            if desk.work(spare):
                self._desks.append(self._desks.pop(place))
                return True
        return False

    def keep_up(self, row: int) -> None:
        """As `Drafter.keep_up`."""
        desk = self._of(row)
        if desk is not None:
            desk.keep_up()

    def taken(self, row: int, first: int, count: int, alive: Callable[[], bool]) -> list[int]:
        """As `Drafter.taken`."""
        return (self._of(row) or self._desks[0]).taken(row, first, count, alive)

    def gone(self, row: int) -> None:
        """Notes that a row was evicted."""
        for desk in self._desks:
            desk.gone(row)

    def leave(self) -> None:
        """Keeps what was computed of all rows, which are gone."""
        for desk in self._desks:
            desk.leave()

    def _of(self, row: int) -> Drafter | None:
        return next((desk for desk in self._desks if desk.row == row), None)


def _common(one: Tokens, other: Tokens) -> int:
    """The number of first tokens that are the same."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
