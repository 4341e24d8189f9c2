"""The requests that a ring's own scheduler orders: what it decides, said to members and to clients."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence

import structlog

from sealring.edge.inference.answer import Answer, AnswerWriter
from sealring.gateway.rings.epoch import Epoch, epoch_ended
from sealring.gateway.rings.idle import IdlePrefills
from sealring.gateway.rings.receipts import Receipts
from sealring.gateway.rings.requests import Answers
from sealring.gateway.rings.rows import Counters, Rows
from sealring.gateway.rings.shares import RingShares
from sealring.gateway.scheduler.actions import (
    Action,
    AnnounceStep,
    Begin,
    Deliver,
    DiscardRow,
    EndEpoch,
    Fail,
    Finish,
    OpenRow,
    Pause,
    Piece,
    RecallBlocks,
    SignRow,
)
from sealring.gateway.scheduler.facts import RingFacts
from sealring.gateway.scheduler.request import Request
from sealring.gateway.scheduler.scheduler import RingLoad, Scheduler
from sealring.mesh.clock import Clock
from sealring.mesh.prompt.tools import THINKING
from sealring.mesh.rpc import protocol12
from sealring.mesh.rpc.problem import from_problem
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

log = structlog.get_logger()


class OwnRequests:
    """`Requests` that this gateway schedules, over one epoch or more."""

    def __init__(
        self, answers: Answers, counters: Counters, clock: Clock, *, queue_limit: int, idle_prefill: bool
    ) -> None:
        self.scheduler = Scheduler(queue_limit=queue_limit)
        self.rows: Rows | None = None
        """Those of the epoch that this gateway schedules, if any."""

        self._answers = answers
        self._counters = counters
        self._clock = clock
        self._receipts = Receipts()
        self._shares = RingShares(clock)
        self._idle = IdlePrefills()
        self._idle_prefill = idle_prefill
        self._thinks = False  # the model, as the last head reported, and what was thought is prefilled again
        self._holding = False
        self._secret = os.urandom(32)
        self._todo: deque[Action] = deque()
        self._performing = False

    def load(self) -> RingLoad:
        load = self.scheduler.load()
        return RingLoad(0, 0, load.kv_usage) if self._idle.running else load

    def counts(self) -> tuple[int, int]:
        """The requests that were begun, and those that wait."""
        return (0, 0) if self._idle.running else self.scheduler.counts()

    def begin(self, epoch: Epoch) -> None:
        serving = epoch.serving
        self._receipts.begin_epoch(len(serving.members))
        self._thinks = self._idle_prefill and THINKING in epoch.abilities.capabilities
        self.rows = Rows(epoch, self._receipts, self._idle, self._counters, self._shares, self._secret)
        for attached in epoch.attached if serving.protocol == protocol12.PROTOCOL else ():
            protocol12.rows_ahead_in_12(attached)
        facts = RingFacts.of(
            epoch.attached,
            epoch=serving.epoch,
            max_rows=serving.max_rows,
            prefill_chunk=serving.prefill_chunk,
            speculate=serving.speculate,
            lockstep=serving.clear_links,
        )
        if facts.speculate and not facts.speculates:
            log.warning("ring_cannot_speculate", ring=serving.ring, stages=facts.stages)
        self.perform(self.scheduler.attach(facts))

    def submit(self, request: Request, answer: AnswerWriter) -> None:
        self.push_aside()
        self._answers[request.id] = answer
        if self._thinks:
            self._idle.begun(request)
        self.perform(self.scheduler.submit(request, self._clock()))

    def hold(self, holding: bool) -> None:
        """Begins no waiting request from now on, or begins them again."""
        self._holding = holding
        if holding:
            self.push_aside()
        self.perform(self.scheduler.hold(holding))

    def cancel(self, request_id: str) -> None:
        self._answers.pop(request_id, None)
        self._shares.end(request_id)
        self._receipts.drop(request_id)
        self.perform(self.scheduler.cancel(request_id))

    def push_aside(self) -> None:
        """Ends what is prefilled because the ring was idle. What is computed of it stays kept."""
        if self._idle.running in self._answers:
            self.cancel(self._idle.running)
        self._idle.running = ""

    def tick(self) -> None:
        """Fails requests whose own deadlines have passed, and has an idle ring prefill."""
        now, rows = self._clock(), self.rows
        self.perform(self.scheduler.expire(now))
        self._finish_all(self._receipts.late(now))
        self._idle.forget_but(self._answers)
        if rows is None or rows.epoch.streams.saves_power or self._holding or self._answers:
            return
        if (request := self._idle.take()) is not None:
            self._answers[request.id] = Answer()  # which nobody reads
            self.perform(self.scheduler.submit(request, now))

    def hear(self, response: control.ScheduleResponse) -> None:
        """Takes a member's message; what the head has computed is an answer to what it was owed."""
        rows = self.rows
        if rows is None:
            return
        match response.WhichOneof("message"):
            case "pong":
                self.perform(self.scheduler.steps_executed(response.pong.steps))
            case "recalled":
                self.perform(self.scheduler.recalled(response.recalled))
            case "receipt":
                self._take_receipt(response.receipt)
            case kind:
                rows.epoch.streams.answered()
                if kind == "done":
                    if rows.epoch.serving.protocol == protocol12.PROTOCOL:
                        protocol12.read_from_12(response.done)
                    self.perform(self.scheduler.step_done(response.done, self._clock()))
                elif kind == "opened":
                    rows.opened(response.opened.row)
                    self.perform(self.scheduler.row_opened(response.opened))
                elif kind == "refused":
                    row, error = response.refused.row, from_problem(response.refused.problem)
                    rows.unstarted.pop(row, None)
                    self.perform(self.scheduler.row_refused(row, error))
                if self.scheduler.expects_answer:
                    rows.epoch.streams.expect()

    def end(self, reason: str) -> None:
        """The scheduler queues its requests again, and has a `suspect` until its word is `settled`."""
        self.rows = None
        self._shares.end_all()
        if self.scheduler.used:
            self._counters.epochs_ended.inc()
        self.push_aside()
        self._idle.clear()
        self._finish_all(self._receipts.give_up("EPOCH_ENDED"))
        self.perform(self.scheduler.end_epoch(epoch_ended(reason)))

    def give_back(self, worked_on: Sequence[Request], waiting: Sequence[Request], reason: str) -> None:
        """As `Scheduler.give_back`; an answer that is whole ends without the receipts that were to come."""
        self.perform(self.scheduler.give_back(worked_on, waiting, epoch_ended(reason)))
        self._finish_all(self._receipts.give_up("EPOCH_ENDED"))

    def perform(self, actions: Iterable[Action]) -> None:
        """Does what the scheduler asks for, in its order; what is asked for meanwhile comes last."""
        self._todo.extend(actions)
        if self._performing:
            return
        self._performing = True
        try:
            while self._todo:
                action = self._todo.popleft()
                if isinstance(action, Begin | Deliver | Pause | Finish | Fail):
                    self._tell_client(action)
                elif self.rows is not None:  # members that are gone need no word
                    self._tell_members(self.rows, action)
        finally:
            self._performing = False
            self._todo.clear()

    def _tell_members(
        self,
        rows: Rows,
        action: AnnounceStep | RecallBlocks | OpenRow | SignRow | DiscardRow | EndEpoch,
    ) -> None:
        match action:
            case AnnounceStep(step):
                rows.announce(step)
            case RecallBlocks(number, chain, row):
                recall = control.Recall(number=number, chain=chain.packed(), row=row)
                rows.epoch.tell_all(control.ScheduleRequest(recall=recall))
            case OpenRow(row, request):
                if (refused := rows.refusal(request)) is not None:
                    self.perform(self.scheduler.row_refused(row, refused))
                else:
                    rows.open(action, self._answers[request.id])
            case SignRow(row, tokens):
                rows.sign(row, tokens)
            case DiscardRow(row):
                rows.discard(row)
            case EndEpoch(fault):
                rows.epoch.streams.fail(fault)

    def _tell_client(self, action: Begin | Deliver | Pause | Finish | Fail) -> None:
        match action:
            case Deliver(pieces):
                for piece in pieces:
                    self._deliver(piece)
            case Begin(request, prompt_tokens):
                self._begun(request, prompt_tokens)
            case Finish(request, finished):
                self._finish(request, finished)
            case Pause(request):
                self._shares.end(request.id)
                if (paused := self._answers.get(request.id)) is not None:
                    paused.paused()
            case Fail(request, error):
                self._shares.end(request.id)
                self._receipts.drop(request.id)
                if request.idle:
                    self._idle.running = ""
                if (failed := self._answers.pop(request.id, None)) is not None:
                    failed.fail(error)

    def _deliver(self, piece: Piece) -> None:
        request, delta, held = piece
        request_id = request.id
        answer = self._answers.get(request_id)
        if answer is None:  # it was given up
            return
        answer.delta(delta, held)
        self._idle.said(request_id, delta)
        if behind := self._answers.give_up_behind(request_id):
            self.cancel(behind)

    def _begun(self, request: Request, prompt_tokens: int) -> None:
        assert self.rows is not None
        serving = self.rows.epoch.serving
        self._answers[request.id].started(
            inference.Started(
                request_id=request.id,
                model=request.deployment,
                ring=serving.ring,
                prompt_tokens=prompt_tokens,
                min_trust=serving.min_trust,
                roster_version=serving.roster_version,
                epoch=serving.epoch,
                own=self.rows.epoch.abilities.own,
            )
        )

    def _finish(self, request: Request, finished: inference.Finished) -> None:
        self._shares.end(request.id)
        if request.idle:
            self._idle.running = ""
        else:
            self._idle.finished(request, finished)
        self._counters.drafted.inc(finished.drafted_tokens)
        self._counters.accepted.inc(finished.accepted_tokens)
        if request.routing_key and finished.cached_tokens:
            self._counters.routed_hits.inc()
        if request.receipt is not None:
            self._receipts.hold(request, finished, self._clock())
            self._finish_complete(request)
        else:
            self._finish_all([(request, finished)])

    def _take_receipt(self, part: control.RowReceipt) -> None:
        taken = self._receipts.take(part)
        if taken is None:
            return
        request, choice = taken
        if part.sealed and (answer := self._answers.get(request.id)) is not None:
            tokens = len(request.progress.choices[choice].tokens)
            answer.delta(inference.Delta(sealed=part.sealed, tokens=tokens, choice=choice))
        self._finish_complete(request)

    def _finish_complete(self, request: Request) -> None:
        """Ends the answer whose receipts are all there."""
        if (over := self._receipts.complete(request.id)) is not None:
            self._finish_all([over])

    def _finish_all(self, ends: Sequence[tuple[Request, inference.Finished]]) -> None:
        for request, finished in ends:
            if (answer := self._answers.pop(request.id, None)) is not None:
                answer.finished(finished)
