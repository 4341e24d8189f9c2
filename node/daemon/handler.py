"""The handlers of the coordinator's messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from sealring.mesh.errors import NotFound, SealringError
from sealring.mesh.rpc.problem import to_problem
from sealring.node.daemon.diagnosis import Diagnosis
from sealring.node.daemon.measuring import Measuring
from sealring.node.daemon.model_keeper import ModelKeeper
from sealring.node.daemon.roster_intake import RosterIntake
from sealring.node.daemon.seats import Background, Seats
from sealring.node.daemon.status import NodeStatus
from sealring.node.identity.challenge import Prover
from sealring.node.wire.timelog import now
from sealring.v1 import membership_pb2

log = structlog.get_logger()

_MAX_REASON = 80


class CoordinatorHandler:
    """Listener of the session with the coordinator. Use it from one event loop."""

    def __init__(
        self,
        send: Callable[[membership_pb2.MemberMessage], None],
        on_removed: Callable[[], None],
        *,
        status: NodeStatus,
        intake: RosterIntake,
        seats: Seats,
        models: ModelKeeper,
        prover: Prover,
        diagnosis: Diagnosis,
        measuring: Measuring,
        background: Background,
    ) -> None:
        """`send` queues an answer; `on_removed` is called when the coordinator does not know this node."""
        self._send = send
        self._on_removed = on_removed
        self._status = status
        self._intake = intake
        self._seats = seats
        self._models = models
        self._prover = prover
        self._diagnosis = diagnosis
        self._measuring = measuring
        self._background = background
        self._at_once: dict[str, Callable[[Any], None]] = {
            "trace": self._trace,
            "prepare": self._prepare,
            "commit": self._commit,
            "end": self._end,
            "goodbye": self._goodbye,
        }
        self._later: dict[str, Callable[[Any], Coroutine[Any, Any, None]]] = {
            "profile": self._profile,
            "challenge": self._prove,
            "diagnose": self._diagnose,
            "change_model": self._change_model,
            "measure": self._measure,
        }

    def hello(self) -> membership_pb2.Hello:
        return self._status.hello()

    def heartbeat(self) -> membership_pb2.Heartbeat:
        return self._status.heartbeat()

    def thrown_out(self) -> None:
        self._on_removed()

    async def from_coordinator(self, message: membership_pb2.CoordinatorMessage) -> None:
        """Raises what makes a roster unusable. Messages of unknown kinds are ignored."""
        kind = message.WhichOneof("message") or ""
        if kind == "roster":
            await self._intake.accept(message.roster.envelope)
        elif kind in self._at_once:
            self._at_once[kind](getattr(message, kind))
        elif kind in self._later:
            self._background.start(self._later[kind](getattr(message, kind)))

    def _goodbye(self, goodbye: membership_pb2.Goodbye) -> None:
        log.info("coordinator_goodbye", reason=goodbye.reason[:_MAX_REASON])

    # Questions

    async def _profile(self, request: membership_pb2.ProfileRequest) -> None:
        answer = membership_pb2.ProfileResult(id=request.id)
        with _problem_in(answer, "profile"):
            answer.profile.CopyFrom(await self._models.profile(request))
        # a plan may follow at once, and the first engine has only now said what its device is
        self._send(membership_pb2.MemberMessage(heartbeat=self.heartbeat()))
        self._send(membership_pb2.MemberMessage(profile=answer))

    async def _prove(self, challenge: membership_pb2.Challenge) -> None:
        answer = await self._prover.answer(challenge)
        if answer is not None:
            self._send(answer)

    async def _diagnose(self, question: membership_pb2.DiagnosisQuestion) -> None:
        answer = membership_pb2.DiagnosisAnswer(id=question.id, asked=time.time_ns())
        with _problem_in(answer, "report"):
            answer.report = await self._diagnosis.report()
        answer.answered = time.time_ns()
        self._send(membership_pb2.MemberMessage(diagnosis=answer))

    async def _measure(self, question: membership_pb2.MeasureQuestion) -> None:
        answer = membership_pb2.MeasureAnswer(id=question.id)
        with _problem_in(answer, "measurement"):
            answer.way.CopyFrom(await self._measuring.measure(question.member))
        self._send(membership_pb2.MemberMessage(measured=answer))

    async def _change_model(self, request: membership_pb2.ChangeModel) -> None:
        answer = membership_pb2.ModelChanged(id=request.id)
        with _problem_in(answer, "model change"):
            await self._models.change(request)
        self._send(membership_pb2.MemberMessage(model_changed=answer))

    def _trace(self, question: membership_pb2.TraceQuestion) -> None:
        """A question without a window asks for the clock alone and is answered at once."""
        answer = membership_pb2.TraceAnswer(id=question.id, asked=now())
        if question.window:
            self._background.start(self._collect_trace(question, answer))
        else:
            self._send_trace(answer)

    async def _collect_trace(
        self, question: membership_pb2.TraceQuestion, answer: membership_pb2.TraceAnswer
    ) -> None:
        try:
            epoch = self._seats.serving(question.ring, question.epoch)
            answer.processes.extend(await epoch.trace(max(0, answer.asked - question.window)))
        except SealringError as error:
            answer.problem.CopyFrom(to_problem(error))
        self._send_trace(answer)

    def _send_trace(self, answer: membership_pb2.TraceAnswer) -> None:
        answer.answered = now()
        self._send(membership_pb2.MemberMessage(trace=answer))

    # Epochs

    def _prepare(self, prepare: membership_pb2.PrepareEpoch) -> None:
        try:
            plan = self._intake.plan(prepare)
            self._seats.prepare(plan, prepare)
        except SealringError as error:
            self._refuse(prepare.ring, prepare.epoch, error)

    def _commit(self, commit: membership_pb2.CommitEpoch) -> None:
        epoch = self._seats.named(commit.ring, commit.epoch)
        if epoch is not None:
            epoch.commit(commit.group_addresses, commit.caches, commit.former)
        else:
            self._refuse(commit.ring, commit.epoch, NotFound("no such epoch", reason="NO_SUCH_EPOCH"))

    def _end(self, end: membership_pb2.EndEpoch) -> None:
        self._seats.end(end.ring, end.epoch, end.reason[:_MAX_REASON], unload=end.unload)

    def _refuse(self, ring: str, number: int, error: SealringError) -> None:
        log.warning("epoch_refused", ring=ring[:64], epoch=number, reason=error.reason)
        fault = membership_pb2.EpochFault(ring=ring, epoch=number, problem=to_problem(error))
        self._send(membership_pb2.MemberMessage(fault=fault))


@contextmanager
def _problem_in(answer: Any, what: str) -> Iterator[None]:
    """Puts an error of the block into the answer's `problem`; logs one outside the error tree."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, SealringError):
            log.error("answer_failed", what=what, exc_info=error)
        answer.problem.CopyFrom(to_problem(error))
