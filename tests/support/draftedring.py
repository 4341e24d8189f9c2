"""One request on a ring in simulated time: the real scheduler, composition and guesses, modelled stages."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from ringfacts import member_with, ring_of
from rowoutput import row_output

from bench.paced.ring import VirtualGateway
from sealring.gateway.scheduler import (
    NO_MODEL,
    Action,
    RingFacts,
    SourceFacts,
    StepCosts,
)
from sealring.mesh.ring import (
    DRAFT_ROWS,
    HEAD_ROWS,
    MAX_DRAFTS,
    MAX_UNSETTLED,
    Composition,
    ResolvedStep,
    Settling,
    Times,
    between,
)
from sealring.node.engine.drafts import Feed, GuessesAhead, Lookup, Proposed, Runs, Tally
from sealring.v1 import control_pb2 as control

_NO_TOKEN = 1 << 20


@dataclass(frozen=True)
class Machine:
    """Stages on a number of processors. A stage computes one token in 1 and eight in `eight`; other numbers
    lie on the line through both, or on the `stairs` given. A step with drafts, or whose input was there
    already, takes the head `late` longer: other graphs are made while their input is on its way. A draft
    model at the head guesses a token in `draft`, or with `mtp` an MTP head at the tail, or a drafter there as
    many as `block` says at once. The head's stage
    takes `head`, the others what is left of as many as there are `stages`. A message between gateway and head
    takes `message`."""

    processors: int
    eight: float
    late: float = 0.0
    stages: int = 3
    draft: float = 0.0
    mtp: bool = False
    block: int = 0
    head: float = 1.0
    stairs: Times = ()
    message: float = 0.05

    def takes(self, tokens: int) -> float:
        return between(self.stairs, tokens) if self.stairs else 1 + (self.eight - 1) * (tokens - 1) / 7

    def guesses(self, rows: int) -> float:
        """The time in which the source guesses a token for each of `rows` rows at once."""
        return self.draft * self.takes(rows)

    @property
    def ahead(self) -> bool:
        """Whether what guesses is at the tail."""
        return self.mtp or self.block > 0

    @property
    def source(self) -> control.DraftSource.ValueType:
        """What guesses besides the lookup, if anything does."""
        if self.ahead:
            return control.DRAFT_SOURCE_HIDDEN if self.block else control.DRAFT_SOURCE_MTP_HEAD
        return control.DRAFT_SOURCE_MODEL if self.draft else control.DRAFT_SOURCE_LOOKUP

    def share(self, stage: int) -> float:
        """A stage's time over that of one of equal stages."""
        return self.head if stage == 0 else (self.stages - self.head) / (self.stages - 1)

    @property
    def facts(self) -> RingFacts:
        one, other = (self._table(self.share(stage)) for stage in (0, 1))
        slowest = other if self.head <= 1 else one
        sources = dict(NO_MODEL)
        if self.draft:
            rows = 1 if self.block else HEAD_ROWS if self.mtp else DRAFT_ROWS
            given = self.draft, rows, self.guesses(rows), self.ahead, self.block, self.block > 0
            sources[self.source] = SourceFacts(*given)
        return ring_of(
            *[member_with()] * self.stages,
            rows=4,
            chunk=4096,
            prefixes=control.PREFIX_SUPPORT_ANY,
            speculate=True,
            costs=slowest,
            sources=sources,
            head=one,
            draft_runs=self.stages,
        )

    def _table(self, share: float) -> StepCosts:
        times = tuple((tokens, share * self.takes(tokens)) for tokens in (1, 2, 4, 8, 16, 32))
        return StepCosts(((1, share),), times)


GPUS = Machine(2, 1.1, late=0.4, stages=2, draft=0.41, message=0.45)
"""An 8B on two H200, in times of a stage's step of one token, 3.65 ms: a guess takes 1.5 ms
(docs/performance/shortfalls.md), a graph 1.3 to 2.2 (`started-built` in docs/performance/data/ring.json), a
message 1 to 2.5 (docs/decisions/0060-a-draft-model-at-the-head.md: a run waits 2 to 5 ms for the gateway)."""

SHARED_GPU = Machine(3, 1.1, late=0.5, stages=3, draft=1.0, message=0.8)
"""Its three stages on one H200, 3 ms each. Processes take turns there, and a guess takes twice as long."""


@dataclass(slots=True)
class _Job:
    step: ResolvedStep
    at: int  # tokens of the answer before those that it samples
    late: bool
    since: float = 0.0


class DraftedRing(VirtualGateway):
    """`slower(tokens)` is the factor of a stage's time for that many tokens. A head that `claims`
    says that its guesses are right with that probability; else it tells what it found. The draft model's
    guesses behind right ones are right with probability `right`.

    Stages take what is ready in its order, each on a processor until it is through. The head's draft model
    guesses when its stage has nothing to do, and for a run that waits for its drafts.
    """

    OPEN_SECONDS = 0.0

    def __init__(
        self,
        machine: Machine,
        slower: Callable[[int], float] = lambda tokens: 1.0,
        claims: float = 0.0,
        right: float = 0.0,
        seed: int = 1,
    ) -> None:
        self._machine, self._slower, self._claims = machine, slower, claims
        self._right, self._chance = right, random.Random(seed)
        self._composition = Composition(epoch=1, max_rows=4, prefill_chunk=4096)
        self._runs = Runs()
        self._model = Tally.of_all_rows()
        self._waiting: deque[tuple[ResolvedStep, float]] = deque()
        self._queues: list[deque[_Job]] = [deque() for _ in range(machine.stages)]
        self._busy: set[int] = set()
        super().__init__(machine.facts)

    def answer(self, prompt: Sequence[int], answer: Sequence[int], drafts: int = MAX_DRAFTS) -> float:
        """How long an answer takes from its first token to its last."""
        self._prompt, self._answer, self._drafts = prompt, answer, drafts
        self._lookup = Lookup(np.array(prompt, np.uint32))
        self._guesses = GuessesAhead(np.array(prompt, np.uint32), model=self._model)
        self._guesses.feed(len(prompt))
        self._said = self._at = self._under_way = 0
        self._arrived: list[float] = []
        self.ask("a", len(prompt), len(answer))
        self.run()
        assert self._said == len(answer)
        return self._arrived[-1] - self._arrived[0]

    def opened(self, row: int) -> control.RowOpened:
        self._row = row
        opened = super().opened(row)
        opened.drafts = self._drafts
        return opened

    def announce(self, step: control.Step) -> None:
        resolved = self._composition.apply(step)
        self._later(self._machine.message, lambda: self._announced(resolved))

    def _later(self, seconds: float, event: Callable[[], Iterable[Action] | None]) -> None:
        self.at(self.now + seconds, event)

    def _announced(self, step: ResolvedStep) -> None:
        self._waiting.append((step, self.now))
        self._feed()

    def _feed(self) -> None:
        """The head begins with steps whose input it has."""
        while self._waiting:
            step, since = self._waiting[0]
            settles = [change for change in step.changes if isinstance(change, Settling)]
            if step.rows and not step.continues and not settles and self._under_way:
                return  # for the last token
            if not self._drafted(step):
                return
            self._waiting.popleft()
            for change in settles:
                self._runs.settle(change)
            if not step.continues:
                self._at = self._said
            if step.continues:
                self._runs.go_on(step)
            elif step.drafts:
                self._begin(step)
            if step.rows or step.chunks:
                late = step.drafts > 0 or since >= max(self._arrived, default=0.0)
                self._queues[0].append(_Job(step, self._at, late, self.now))
                self._at += len(step.sampled)
                self._under_way += 1
                self._work()

    def _drafted(self, step: ResolvedStep) -> bool:
        """Whether the draft model has what a step needs of it; else it guesses for it next."""
        modelled = step.source != control.DRAFT_SOURCE_LOOKUP
        self._guesses.step(step.drafts * modelled)
        if not modelled or self._machine.ahead:
            return True
        if step.continues and self._runs.broken(self._row):
            return True
        if not step.continues:
            self._chained = self._guesses.known
        first = self._chained + self._runs.at(self._row) * step.continues
        if self._guesses.taken(first, step.drafts + step.continues) is not None:
            self._guesses.send(first + step.drafts + step.continues)
            return True
        self._guess()
        return False

    def _guessed_by_mtp(self, count: int, tokens: int) -> list[int]:
        """Guesses behind the next `tokens` tokens; behind a wrong one all are wrong."""
        found: list[int] = []
        while len(found) < count and self._chance.random() < self._right:
            found += self._answer[self._said + tokens + len(found) :][:1] or [_NO_TOKEN]
        return found + [_NO_TOKEN] * (count - len(found))

    def _begin(self, step: ResolvedStep) -> None:
        last = self._answer[self._said - 1]
        if self._machine.ahead:
            self._chained = self._guesses.known
        modelled = step.source != control.DRAFT_SOURCE_LOOKUP
        begun = self._chained if modelled else 0
        looked_up = [] if modelled else self._lookup.drafts(last, MAX_UNSETTLED)

        def more(at: int, count: int) -> list[int]:
            return self._guesses.taken(begun + at, count) or [_NO_TOKEN] * count

        self._runs.begin(step, self._row, last, Proposed(looked_up, more))

    def _guess(self) -> None:
        """The draft model begins with a guess, if the head has a processor for it."""
        if 0 in self._busy or len(self._busy) >= self._machine.processors:
            return
        self._busy.add(0)
        feed = self._guesses.feed(MAX_UNSETTLED)
        self._later(self._machine.draft, lambda: self._guessed(feed))

    def _guessed(self, feed: Feed) -> None:
        self._busy.discard(0)
        at = feed.end - len(self._prompt)
        right = self._chance.random() < self._right and at < len(self._answer)
        self._guesses.guess(feed, self._answer[at] if right else _NO_TOKEN)
        self._feed()
        self._work()

    def _work(self) -> None:
        ready = sorted((queue[0].since, stage) for stage, queue in enumerate(self._queues) if queue)
        for _, stage in ready:
            if stage not in self._busy and len(self._busy) < self._machine.processors:
                job = self._queues[stage].popleft()
                tokens = len(job.step.sampled)
                took = self._machine.takes(tokens) * self._slower(tokens)
                self._busy.add(stage)
                took *= self._machine.share(stage)
                if stage == 0:
                    took += self._machine.late * job.late
                if stage == self._machine.stages - 1:
                    each = min(job.step.guesses, 1) if self._machine.block else job.step.guesses
                    took += each * self._machine.draft
                self._later(took, lambda stage=stage, job=job: self._worked(stage, job))  # type: ignore[misc]
        if self._machine.draft and not self._machine.ahead and self._said and self._guesses.wanting:
            self._guess()

    def _worked(self, stage: int, job: _Job) -> None:
        self._busy.discard(stage)
        job.since = self.now
        if stage + 1 < len(self._queues):
            self._queues[stage + 1].append(job)
        else:
            self._came(job)
        if stage == 0:
            self._feed()
        self._work()

    def _came(self, job: _Job) -> None:
        self._under_way -= 1
        tokens = list(self._answer[job.at : job.at + len(job.step.sampled)])
        if job.step.drafts:
            tokens += [_NO_TOKEN] * (len(job.step.sampled) - len(tokens))
            tokens = [tokens[at] for at in self._runs.came(job.step, tokens)]
        if job.step.guesses:
            self._guesses.offer(len(tokens), self._guessed_by_mtp(job.step.guesses, len(tokens)))
        done = control.StepDone(step=job.step.number)
        done.refuted = bool(job.step.drafts) and self._runs.broken(self._row)
        for token in tokens:
            self._said += 1
            self._lookup.heard(token)
            self._guesses.heard(token)
            self._arrived.append(self.now)
            done.outputs.append(row_output(self._row, text="x", tokens=self._said))
        if job.step.asks:
            looked_up = self._claims or self._lookup.right()
            done.rates.add(source=control.DRAFT_SOURCE_LOOKUP, right=round(100 * looked_up))
            if self._machine.draft:
                done.rates.add(source=self._machine.source, right=round(100 * self._guesses.right()))
        self._feed()
        self._later(self._machine.message, lambda: self.scheduler.step_done(done, self.now))
