"""Several requests on a ring in simulated time: the real scheduler and composition, modelled stages and a
draft model."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from draftedring import Machine
from requestkit import request_of

from sealring.gateway.scheduler import Action, AnnounceStep, OpenRow, Scheduler, StepCosts
from sealring.mesh.ring import MAX_DRAFTED, Composition, ResolvedStep, Settling
from sealring.v1 import control_pb2 as control

SECONDS = 0.04
"""A stage's step of one token: the scheduler adds hops of its own in seconds."""

_RATE = 0.05
"""Weight of the last guess in what the head knows of earlier ones."""


class SharedRing:
    """Rows whose drafts are each right with probability `right`: of a draft model if the machine has one,
    else looked up. The head does one thing at a time: its stage's steps in order, and before a step with
    drafts the guesses that it needs, for all rows of a lane at once. It ends with the first answer."""

    def __init__(self, machine: Machine, rows: int, tokens: int, right: float, drafts: int = 15) -> None:
        self._machine, self._tokens, self._right, self._drafts = machine, tokens, right, drafts
        self._chance = random.Random(1)
        self._now, self._count = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        facts = machine.facts
        head = facts.head or facts.costs
        self._composition = Composition(epoch=1, max_rows=rows, prefill_chunk=4096)
        self._waiting: deque[ResolvedStep] = deque()
        self._free = [0.0] * machine.stages
        self._known = 0.0  # the share of right guesses, as the head counts it
        self._said: dict[int, int] = {}
        self._owed: dict[int, int] = {}  # accepted tokens of open drafts
        self._under_way: dict[int, int] = {}
        self.arrived: dict[int, list[float]] = {}
        self._scheduler = Scheduler(queue_limit=rows)
        timed = replace(
            facts,
            max_rows=rows,
            costs=_in_seconds(facts.costs),
            head=_in_seconds(head),
            sources={
                source: replace(one, seconds=one.seconds * SECONDS, together=one.together * SECONDS)
                for source, one in facts.sources.items()
            },
            draft_runs=64,
        )
        self._do(self._scheduler.attach(timed))
        for number in range(rows):
            request = request_of(f"r{number}", tokens)
            self._do(self._scheduler.submit(request, self._now))
        while max(self._said.values()) < tokens:
            self._now, _, event = heapq.heappop(self._events)
            event()

    @property
    def rate(self) -> float:
        """Tokens in the time of a stage's step of one token, from the last row's first token on."""
        begin = max(each[0] for each in self.arrived.values())
        said = sum(sum(begin < at for at in each) for each in self.arrived.values())
        return said * SECONDS / (self._now - begin)

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._count), event))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, OpenRow):
                self._said[action.row], self.arrived[action.row] = 0, []
                opened = control.RowOpened(
                    row=action.row,
                    prompt_tokens=1,
                    params_bytes=64,
                    max_tokens=self._tokens,
                    drafts=self._drafts,
                )
                self._do(self._scheduler.row_opened(opened))
            elif isinstance(action, AnnounceStep):
                step = self._composition.apply(action.step)
                self._later(self._machine.message * SECONDS, lambda step=step: self._announced(step))  # type: ignore[misc]

    def _announced(self, step: ResolvedStep) -> None:
        self._waiting.append(step)
        self._feed()

    def _feed(self) -> None:
        """The head begins with the next step once its input is there."""
        while self._waiting and not any(self._under_way.get(row) for row in self._waiting[0].rows):
            step = self._waiting.popleft()
            for change in step.changes:
                if isinstance(change, Settling):
                    assert self._owed.pop(change.row) == change.accepted
            if not step.sampled:
                continue
            assert len(step.sampled) <= MAX_DRAFTED
            machine, tokens = self._machine, len(step.sampled)
            for row in set(step.sampled):
                self._under_way[row] = self._under_way.get(row, 0) + 1
            guesses = (
                machine.guesses(len(step.rows)) * step.drafts * (step.source == control.DRAFT_SOURCE_MODEL)
            )
            at = self._now
            for stage in range(machine.stages):
                took = machine.takes(tokens) * machine.share(stage)
                if stage == 0:
                    took += guesses + machine.late * (step.drafts > 0)
                at = self._free[stage] = max(at, self._free[stage]) + took * SECONDS
            self._later(at - self._now, lambda step=step: self._came(step))  # type: ignore[misc]

    def _came(self, step: ResolvedStep) -> None:
        done = control.StepDone(step=step.number)
        for row in dict.fromkeys(step.sampled):
            self._under_way[row] -= 1
            count = 1
            for _ in range(step.drafts):
                right = self._chance.random() < self._right
                self._known += _RATE * (right - self._known)
                if not right:
                    break
                count += 1
            if step.drafts:
                self._owed[row] = count
            else:
                self._known += _RATE * ((self._chance.random() < self._right) - self._known)
            for _ in range(count):
                if self._said[row] < self._tokens:
                    self._said[row] += 1
                    self.arrived[row].append(self._now)
                    done.outputs.add(row=row, text="x", tokens=self._said[row])
        if step.asks:
            known = round(100 * self._known)
            done.rates.add(source=self._machine.source, right=known)
        self._feed()
        self._later(
            self._machine.message * SECONDS, lambda: self._do(self._scheduler.step_done(done, self._now))
        )


def _in_seconds(costs: StepCosts) -> StepCosts:
    rows, tokens = (
        tuple((size, SECONDS * took) for size, took in times) for times in (costs.tokens, costs.tokens)
    )
    return StepCosts(rows, tokens)
