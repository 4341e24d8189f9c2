"""Several requests on a ring in virtual time, with drafts that are looked up, or guesses of a draft model or
an MTP head."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

from draftedring import Machine
from rowoutput import row_output

from bench.paced.ring import Head, VirtualRing, Work
from sealring.gateway.scheduler import StepCosts
from sealring.mesh.ring import MAX_DRAFTED, Composition, ResolvedStep, Settling
from sealring.node.engine.drafts import Tally
from sealring.v1 import control_pb2 as control

SECONDS = 0.04
"""A stage's step of one token: the scheduler adds hops of its own in seconds."""


class GuessingHead(Head):
    """Its guesses are each right with probability `right`. Those of a source that guesses `ahead` come with
    the tokens of a step, if it asks for some."""

    def __init__(
        self, rows: int, right: float, source: control.DraftSource.ValueType, *, ahead: bool = False
    ) -> None:
        super().__init__()
        self._composition = Composition(epoch=1, max_rows=rows, prefill_chunk=4096)
        self._right, self._source, self._chance = right, source, random.Random(1)
        self._known = Tally.of_all_rows().next_row()
        self._untried = self._known.tried
        self._owed: dict[int, int] = {}  # accepted tokens of open drafts
        self._ahead = dict[int, int]() if ahead else None  # guesses behind a row's last tokens
        self._step: ResolvedStep
        self.most_open = 0
        """Rows with drafts that were not settled, at most."""
        self._asks: list[bool] = []

    @property
    def asked(self) -> float:
        """The share of decode steps that asked for rates."""
        return fmean(self._asks)

    def take(self, step: control.Step) -> None:
        super().take(step)
        self._step = self._composition.apply(step)
        for change in self._step.changes:
            if isinstance(change, Settling):
                assert self._owed.pop(change.row) == change.accepted
        assert len(self._step.sampled) <= MAX_DRAFTED
        if self._step.rows:
            self._asks.append(self._step.asks)
        self.most_open = max(self.most_open, len(self._composition.lanes.drafted))

    def done(self) -> tuple[control.StepDone, bool]:
        done, decoded = super().done()
        first = list(done.outputs)
        del done.outputs[:]
        for output in first:
            count, row = 1, output.row
            there = 1 if self._ahead is None else self._ahead.get(row, 0)
            if self._ahead is not None:
                assert self._step.drafts <= there
                self._ahead[row] = self._step.guesses
            while count <= self._step.drafts and self._guess():
                count += 1
            if self._step.drafts:
                self._owed[row] = count
            elif there:
                self._guess()
            for tokens in range(output.delta.tokens, output.delta.tokens + count):
                done.outputs.append(row_output(row, text=output.delta.text, tokens=tokens))
            self.generated[row] += count - 1
        if self._step.asks and self._known.tried > self._untried:
            done.rates.add(source=self._source, right=round(100 * self._known.rate))
        return done, decoded

    def _guess(self) -> bool:
        right = self._chance.random() < self._right
        self._known.add(right)
        return right


class SharedRing(VirtualRing):
    """Rows whose drafts are guessed by the machine's draft model or MTP head, or looked up if it has neither.
    The head of the ring does one thing at a time: its stage's steps in order, and before a step with drafts
    the guesses that it needs, for all rows of a lane at once. The tail does so with guesses of an MTP head,
    behind the step that they come with. The ring ends with the first answer."""

    OPEN_SECONDS = 0.0

    def __init__(
        self, machine: Machine, rows: int, tokens: int, right: float, drafts: int = 15, runs: int = 64
    ) -> None:
        """`runs`: rows that members can take drafts of back."""
        self._machine, self._drafts = machine, drafts
        self._rows, self._right = rows, right
        self.ANNOUNCE_SECONDS = machine.message * SECONDS
        facts = machine.facts
        timed = replace(
            facts,
            max_rows=rows,
            costs=_in_seconds(facts.costs),
            head=_in_seconds(facts.head or facts.costs),
            sources={
                source: replace(one, seconds=one.seconds * SECONDS, together=one.together * SECONDS)
                for source, one in facts.sources.items()
            },
            draft_runs=runs,
            together=True,
        )
        super().__init__(timed, machine.stages, hop=0.0)
        for number in range(rows):
            self.ask(f"r{number}", 1, tokens)
            self.run(until=lambda number=number: number < len(self._context))  # type: ignore[misc]
        self.run(until=lambda: bool(self.ended))

    @property
    def rate(self) -> float:
        """Tokens in the time of a stage's step of one token, from the last row's first token on."""
        begin = max(each[0] for each in self.arrivals.values())
        return self.tokens(begin, self.now) * SECONDS / (self.now - begin)

    def new_head(self) -> Head:
        return GuessingHead(self._rows, self._right, self._machine.source, ahead=self._machine.mtp)

    def opened(self, row: int) -> control.RowOpened:
        opened = super().opened(row)
        opened.drafts = self._drafts
        return opened

    def takes(self, stage: int, work: Work) -> float:
        machine, decode = self._machine, work.step.decode
        took = machine.takes(work.rows * (work.tokens + decode.drafts)) * machine.share(stage)
        if stage == 0 and decode.drafts:
            took += machine.late
            if decode.source == control.DRAFT_SOURCE_MODEL:
                took += machine.guesses(work.rows) * decode.drafts
        if stage == machine.stages - 1:
            took += machine.guesses(work.rows) * decode.guesses
        return took * SECONDS


def _in_seconds(costs: StepCosts) -> StepCosts:
    rows, tokens = (
        tuple((size, SECONDS * took) for size, took in times) for times in (costs.tokens, costs.tokens)
    )
    return StepCosts(rows, tokens)
