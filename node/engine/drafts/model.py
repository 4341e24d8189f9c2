"""The draft model at the head: a small model of the same tokenizer that guesses what a row will say next.

It is a stage of one, with caches of its own for each of a few rows. It computes between the steps of the
head's stage: while these wait for tokens, and when a run of guesses is to be computed that is not complete
yet. The prompt of a row is computed in parts that fit into such a wait. Guesses begin when it is through.
Rows of one lane have theirs together (`model_rows.py`).

The caches of rows that are gone are kept, newest first, as far as they fit. A row that begins with the same
tokens goes on from there, so that an agent's conversation is not computed again with every turn.

Wrong guesses are cut off its caches. Windows and states cannot be cut. So a row with such caches is marked
every few tokens (`caches/undo.py`). It goes back to the mark before the wrong guess, and the tokens since
then are computed again in the pass that makes the next guess. Such rows are computed one by one.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import structlog

from sealring.mesh.ring.composition import Change, Eviction, ResolvedStep
from sealring.mesh.ring.limits import DRAFT_MARKS, DRAFT_ROWS
from sealring.mesh.ring.prefix_marks import thinned
from sealring.node.engine import params
from sealring.node.engine.caches import Cache
from sealring.node.engine.caches.undo import Mark, cut_to, go_back, mark
from sealring.node.engine.drafts.guesses import CAUGHT_UP, Feed, Guesses
from sealring.node.engine.drafts.model_rows import DraftBatch, DraftModel, DraftRow
from sealring.node.engine.drafts.source import Proposed, Rows, Tokens
from sealring.node.engine.staging import Stage
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

_UNIT = 0.05
"""Seconds of a part of a prompt, where nobody knows how long the head will wait."""

_BEHIND, _RESTED = 12, 64
"""Tokens that a row may be behind until it is computed though the head is not idle, and until it is left to
idle times again. Policy: a pass of 12 tokens once in 12 steps is 1 or 2 % of them."""

_MOVED = 0.9
"""A row takes a kept cache over if it has this part of its tokens. Else it gets a copy of that part."""

_APART = 8
"""Tokens between two marks, and so the most that are computed again. On a Mac a pass of 8 tokens takes two
to three times as long as one of a single token."""

_ALONE, _BESIDE = (3, 2, 3), (1, 1, 1)
"""Marks of a row for which the model guesses, at most, alone and beside others: in its prompt, in its answer,
and behind that in guesses. With the caches of three rows more, those of four rows are DRAFT_MARKS at most."""


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
        self._model = DraftModel(stage, vocabulary)
        self._room = min(room, stage.positions)
        first = (one for one in times if one.rows == 1 and not one.context)
        self._chunks = [(one.tokens, one.microseconds / 1e6) for one in first]
        self._kept: list[_Kept] = []
        self._shared = _Shared([self])
        self.own: DraftRow | None = None
        """The row that it guesses for."""
        self._lane = [self]
        self._marks: dict[int, Mark] = {}
        self._resting = True
        self.seconds = self._model.seconds(1)
        """How long a guess takes."""
        self.seconds_together = self._model.seconds(DRAFT_ROWS)
        """How long a guess for each of DRAFT_ROWS rows takes."""

    @property
    def facts(self) -> control.DraftFacts:
        """What the gateway learns of it."""
        return control.DraftFacts(
            source=control.DRAFT_SOURCE_MODEL,
            microseconds=round(1e6 * self.seconds),
            rows=DRAFT_ROWS,
            rows_microseconds=round(1e6 * self.seconds_together),
        )

    def another(self) -> Drafter:
        """A drafter for a further row: same model, same room and same kept caches."""
        made = copy.copy(self)
        made.own = None
        made.reset()
        self._shared.desks.append(made)
        return made

    @property
    def row(self) -> int:
        """The number of the row that it guesses for; 0 for none."""
        own = self.own
        return 0 if own is None else own.number

    def follow(self, row: int, guesses: Guesses, parameters: Callable[[], bytes]) -> None:
        """Guesses for this row from now on. `parameters` gives its parameter record."""
        self._resting = self.failed
        if row == self.row or self.failed:
            return
        self.leave()
        drawn = dataclasses.replace(params.decode(parameters()), logprobs=None, scored=())
        own = DraftRow(row, guesses, drawn)
        own.cache, own.computed = self._start(guesses.scope, guesses.text[:-1])
        self.own = own
        guesses.begin(own.computed)

    @property
    def failed(self) -> bool:
        """Whether the model's own code has failed. It guesses nothing any more; answers go on without."""
        return self._shared.failed

    @property
    def tokens(self) -> int:
        """Tokens that the caches of its row have room for."""
        own = self.own
        return 0 if own is None else own.room

    @property
    def following(self) -> bool:
        """Whether it guesses for a row; any thread."""
        return self.row > 0 and not (self._resting or self.failed)

    @property
    def lane(self) -> list[Drafter]:
        """The rows that have their guesses together with this one's, itself among them."""
        return self._lane

    @lane.setter
    def lane(self, desks: list[Drafter]) -> None:
        own, rows = self.own, [desk.own for desk in desks]
        if own is not None and own.batch is not None and any(row not in rows for row in own.batch.rows):
            own.part()
        self._lane = desks

    def rest(self) -> None:
        """Guesses nothing until `follow` is called again."""
        self._resting = True

    def leave(self) -> None:
        """Keeps what was computed of the row, which is gone."""
        own = self.own
        if own is not None and own.guesses.scope and own.guesses.held:
            own.part()
            self._back(own, min(own.guesses.held, own.guesses.known))
            if not self._model.cuts:
                self._marks = self._thinned(own, own.begun, 2, 1) | {own.computed: mark(own.cache)}
            if own.computed:
                text = own.guesses.text[: own.computed]
                self._kept.insert(0, _Kept(own.guesses.scope, text, own.cache, self._marks))
        self._forget()
        self._make_room(self._taken)

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
        if self.own is not None:
            self.own.part()
        self.own, self._marks, self._lane = None, {}, [self]

    def work(self, spare: float = math.inf) -> bool:
        """Computes a guess, or a part of the row's prompt that takes at most `spare` seconds; False if there
        is nothing to do. Rows of its lane that want a guess have theirs with it."""
        own = self.own
        if own is None or not self.following:
            return False
        if (behind := own.behind) > CAUGHT_UP:
            return self._fill(own, min(behind - 1, self._fitting(min(spare, _UNIT))))
        return own.guesses.wanting and self.guess(lambda row: not row.guesses.ahead or row.guesses.wanting)

    def keep_up(self) -> None:
        """Guesses once before the row is too far behind: a head that is never idle would else not know how
        often guesses are right. If the row is behind already because nothing was guessed for a while, it
        computes those tokens."""
        own = self.own
        if own is None or not self.following:
            return
        if _BEHIND <= (behind := own.behind) <= CAUGHT_UP:
            self.guess(lambda row: row.behind >= _BEHIND)
        elif CAUGHT_UP < behind <= _RESTED:
            self._fill(own, behind - 1)

    def lacks(self, count: int) -> bool:
        """Whether there are fewer guesses than `count` behind the row's tokens, and it guesses for the
        row."""
        own = self.own
        return own is not None and self.following and own.lacks(count)

    def taken(self, row: int, first: int, count: int, alive: Callable[[], bool]) -> list[int]:
        """The row's guesses of `count` tokens from place `first` on, made now as far as they are missing.

        If the chain is not `alive` any more, and if the model does not follow the row, they are any tokens.
        """
        own = self.own
        while own is not None and row == own.number and alive():
            found = own.guesses.taken(first, count)
            if found is not None:
                own.guesses.send(first + count)
                return found
            if not self.guess():
                break
            own = self.own
        return [0] * count

    def _fitting(self, seconds: float) -> int:
        """Tokens of the longest chunk that takes no longer."""
        return max((tokens for tokens, took in self._chunks if took <= seconds), default=0)

    def _fill(self, own: DraftRow, tokens: int) -> bool:
        if not tokens or not self._reserve([own], own.computed + tokens):
            return False

        def compute() -> None:
            own.part()
            feed = self._feed(own, tokens)
            self._model.compute([feed.tokens], own.cache)
            own.computed = feed.end

        return self._try(compute)

    def guess(self, wanting: Callable[[DraftRow], bool] = lambda row: False) -> bool:
        """Guesses the next token behind all that is known or guessed; False if it cannot. Rows of its lane
        that are `wanting` have theirs in the same pass, if there is memory for that."""
        own = self.own
        if own is None or own.behind > CAUGHT_UP:
            return False
        beside = [
            desk.own for desk in self._lane if desk is not self and desk.own is not None and desk.following
        ]
        rows = [own, *(row for row in beside if row.behind <= CAUGHT_UP and wanting(row))]
        there = [mate for row in rows if row.batch is not None for mate in row.batch.rows]
        together = list(dict.fromkeys([*rows, *there]))
        lengths = [row.computed for row in together]
        more = self._model.batches and len(together) > 1 and min(lengths) > 0
        if more and self._reserve(together, len(together) * (max(lengths) + CAUGHT_UP)):
            return self._try(lambda: self._batch(together).guess(self._model, rows))
        if not self._reserve([own], own.computed + CAUGHT_UP):
            return False

        def compute() -> None:
            own.part()
            feed = self._feed(own, 2 * CAUGHT_UP)
            (token,) = self._model.guess([feed.tokens], own.cache, [own.drawn_as(feed.end)])
            own.guesses.guess(feed, token)
            own.computed = feed.end

        return self._try(compute)

    @staticmethod
    def _batch(rows: Sequence[DraftRow]) -> DraftBatch:
        """The batch of these rows, which has no others."""
        there = rows[0].batch
        return there if there is not None and len(there.rows) == len(rows) else DraftBatch(rows)

    def _feed(self, own: DraftRow, tokens: int) -> Feed:
        """Takes wrong guesses out of the row's caches. Returns at most `tokens` tokens that these lack,
        behind those that are to be computed again."""
        while True:  # until no guess is found wrong meanwhile
            held = own.guesses.held
            self._back(own, held)
            self._mark(own)
            feed = own.guesses.feed(tokens + max(0, held - own.computed), own.computed)
            if feed.start == own.computed:
                return feed

    def _back(self, own: DraftRow, tokens: int) -> None:
        """Takes the row's caches back to its first `tokens` tokens, or to the last mark before."""
        if own.computed <= tokens:
            return
        left = tokens if self._model.cuts else max(length for length in self._marks if length <= tokens)
        self._marks = {length: one for length, one in self._marks.items() if length <= left}
        go_back(own.cache, own.computed - left, self._marks.get(left, {}))
        own.computed = left

    def _mark(self, own: DraftRow) -> None:
        """Marks the row where it is, if it could not be taken back to here, and here is far enough from the
        last mark. The newest mark among its known tokens always stays."""
        if self._model.cuts or (self._marks and own.computed - max(self._marks) < _APART):
            return
        known = own.guesses.known
        of_prompt, of_answer, most = self._limits
        if own.computed > known and sum(length > known for length in self._marks) >= most:
            return
        self._marks[own.computed] = mark(own.cache)
        ahead = {length: one for length, one in self._marks.items() if length > known}
        self._marks = self._thinned(own, known, of_prompt, of_answer) | ahead

    def _thinned(self, own: DraftRow, known: int, of_prompt: int, of_answer: int) -> dict[int, Mark]:
        """Some of the marks among the `known` tokens."""
        prompt = [length for length in self._marks if length <= own.begun]
        answer = [length for length in self._marks if own.begun < length <= known]
        chosen = thinned(prompt, of_prompt) + sorted(answer)[-of_answer:]
        return {length: self._marks[length] for length in chosen}

    def _reserve(self, rows: Sequence[DraftRow], tokens: int) -> bool:
        """Whether the caches of these rows may have `tokens` tokens in all; drops what is kept for that."""
        taken = tokens + sum(one.tokens for one in self._shared.desks if one.own not in rows)
        if taken > self._room:
            return False
        self._make_room(taken)
        return True

    @property
    def _limits(self) -> tuple[int, int, int]:
        """Marks of this row, at most: in its prompt, in its answer, and behind that in guesses."""
        return _ALONE if self._rows == 1 else _BESIDE

    @property
    def _rows(self) -> int:
        """Rows for which the model guesses, at least one."""
        return max(1, sum(one.own is not None for one in self._shared.desks))

    def _make_room(self, taken: int) -> None:
        """Drops the oldest kept rows until there is room for `taken` tokens of the rows that it guesses for,
        and for their marks."""
        marks = self._rows * sum(self._limits) + self._rows - 1
        while self._kept and (
            sum(len(one.tokens) for one in self._kept) + taken > self._room
            or sum(len(one.marks) for one in self._kept) + marks > DRAFT_MARKS
        ):
            self._kept.pop()

    @property
    def _taken(self) -> int:
        """Tokens that the caches of all rows have room for."""
        return sum(one.tokens for one in self._shared.desks)

    def _start(self, scope: bytes, tokens: Tokens) -> tuple[Cache, int]:
        """Caches that begin with the longest kept beginning of these tokens; the length of that."""
        found, length = None, 0
        for one in self._kept if scope else ():
            same = one.common(tokens) if one.scope == scope else 0
            if same > length:
                found, length = one, same
        if found is None:
            cache = self._model.stage.make_cache()
            self._marks = {} if self._model.cuts else {0: mark(cache)}
            return cache, 0
        marked = found.marks.get(length, {})
        if length >= _MOVED * len(found.tokens):
            self._kept.remove(found)
            cache = found.cache
            go_back(cache, len(found.tokens) - length, marked)
        else:
            self._make_room(self._taken + length)
            cache = cut_to(found.cache, length, marked)
        self._marks = {at: one for at, one in found.marks.items() if at <= length}
        return cache, length

    def _try(self, compute: Callable[[], None]) -> bool:
        try:
            compute()
        except Exception as error:  # a model's own code may raise anything; answers need no guesses
            model_type = self._model.stage.spec.model_type
            log.error("draft_model_failed", model_type=model_type, exc_info=error)
            self._shared.failed = True
            for one in self._shared.desks:
                one.own = None  # with its caches, which are of no use any more
                one.clear()
            return False
        return True


class ModelAtHead:
    """A draft model that guesses for several rows, each at a `Drafter` of its own: the `Worker` of a head."""

    def __init__(self, first: Drafter, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` wakes the compute loop, which may have something to guess now; any thread calls it."""
        self.first = first
        self._desks = [first]
        self._wake = wake

    def before(self, step: ResolvedStep, rows: Sequence[int], opened: Rows) -> None:
        """Rows whose next guesses nobody wants have none."""
        if step.rows and not (step.asks or step.drafts):
            for desk in self._at(rows):
                desk.rest()
            return
        modelled = step.source == control.DRAFT_SOURCE_MODEL
        for row in rows:
            guesses = opened.source(row, control.DRAFT_SOURCE_MODEL)
            if isinstance(guesses, Guesses):
                guesses.step(step.drafts * modelled)
                self.follow(row, guesses, partial(opened.parameters, row))
        self.in_one_lane(rows)
        if step.rows and not step.drafts:
            for desk in self._at(rows):
                desk.keep_up()

    def complete(self, step: ResolvedStep) -> None:
        self.guess(step.rows, step.drafts)

    def propose(self, row: int, alive: Callable[[], bool]) -> Proposed:
        desk = self._of(row)
        if desk is None or desk.own is None:
            return Proposed((), lambda at, count: [0] * count)
        begun = desk.own.guesses.known
        return Proposed((), lambda at, count: self.taken(row, begun + at, count, alive))

    def follow(self, row: int, guesses: Guesses, parameters: Callable[[], bytes]) -> None:
        """As `Drafter.follow`. Of more than DRAFT_ROWS rows nobody guesses for the last."""
        desk = self._of(row) or self._of(0)
        if desk is None and len(self._desks) < DRAFT_ROWS:
            desk = self._desks[0].another()
            self._desks.append(desk)
        if desk is None:
            desk = next((one for one in self._desks if not one.following), None)
        if desk is not None:
            desk.follow(row, guesses, parameters)

    def in_one_lane(self, rows: Sequence[int]) -> None:
        """Has these rows have their guesses together from now on: one step computes them."""
        found = self._at(rows)
        for desk in found:
            desk.lane = found

    def work(self, spare: float) -> bool:
        """As `Drafter.work`, for the row that has waited longest and those of its lane."""
        for place, desk in enumerate(self._desks):
            if desk.work(spare):
                self._desks.append(self._desks.pop(place))
                return True
        return False

    def wake(self) -> None:
        if any(desk.following for desk in self._desks):
            self._wake()

    def guess(self, rows: Sequence[int], count: int) -> None:
        """Makes the guesses that are missing to `count` behind the tokens of each of these rows, of all rows
        together."""
        desks = self._at(rows)
        for _ in range(count):
            lacking = next((desk for desk in desks if desk.lacks(count)), None)
            if lacking is None or not lacking.guess(lambda row: row.lacks(count)):
                return

    def taken(self, row: int, first: int, count: int, alive: Callable[[], bool]) -> list[int]:
        """As `Drafter.taken`."""
        return (self._of(row) or self._desks[0]).taken(row, first, count, alive)

    def change(self, change: Change) -> None:
        if isinstance(change, Eviction):
            for desk in self._desks:
                desk.gone(change.row)

    def drop(self) -> None:
        """Keeps what was computed of all rows."""
        for desk in self._desks:
            desk.leave()

    def _of(self, row: int) -> Drafter | None:
        return next((desk for desk in self._desks if desk.row == row), None)

    def _at(self, rows: Sequence[int]) -> list[Drafter]:
        return [desk for desk in self._desks if desk.row in rows]


def _common(one: Tokens, other: Tokens) -> int:
    """The number of first tokens that are the same."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
