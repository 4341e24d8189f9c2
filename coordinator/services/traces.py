"""Collects what the members of a ring did in the last seconds, on one clock.

Every member has a monotonic clock of its own. How far it is from the coordinator's follows from round trips
on the member's session as in NTP (RFC 5905, section 8): of several the shortest counts, and it cannot be
wrong by more than half of that. Both ends of the time traced are measured, so that drift shows as error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sealring.coordinator.rings.rings import Rings
from sealring.coordinator.streams.questions import Questions
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.errors import Conflict, DeadlineExceeded, InvalidInput, SealringError
from sealring.mesh.rpc.problem import from_problem, to_problem
from sealring.mesh.rpc.traces import MAX_SPANS
from sealring.v1 import admin_pb2, membership_pb2, trace_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage

MAX_MILLISECONDS = 60_000
_MAX_PROCESSES = 2
_MAX_TIME = 1 << 62
_MAX_DRAFTS = 1 << 32
_ROUND_TRIPS = 8
_ANSWER_SECONDS = 15.0
_CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Offset:
    """What to add to a member's clock to get the coordinator's, and how wrong it may be, in nanoseconds."""

    value: int
    error: int

    @classmethod
    def of(cls, sent: int, asked: int, answered: int, received: int) -> Offset:
        """From one round trip: two times of the coordinator's clock around two of the member's."""
        away = max(0, (received - sent) - (answered - asked))
        return cls(((sent - asked) + (received - answered)) // 2, (away + 1) // 2)

    def between(self, later: Offset) -> Offset:
        """The middle of two; the error covers both, and the drift from one to the other."""
        drift = abs(later.value - self.value)
        return Offset((self.value + later.value) // 2, max(self.error, later.error) + (drift + 1) // 2)


class Traces:
    """One trace at a time: each costs the members some milliseconds."""

    def __init__(
        self, sessions: Sessions, rings: Rings, *, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._rings = rings
        self._clock = clock
        self._questions: Questions[tuple[membership_pb2.TraceAnswer, int]] = Questions(sessions)
        self._busy = False

    async def trace(self, ring: str, milliseconds: int) -> admin_pb2.TraceRingResponse:
        """Waits for so long and tells what a ring's members did meanwhile; "" is the only ring.

        Raises InvalidInput (BAD_DURATION, WHICH_RING), NotFound (NO_SUCH_RING), FailedPrecondition
        (RING_DOWN), Conflict (TRACE_BUSY). A member that does not answer has a problem in its place.
        """
        if not 1 <= milliseconds <= MAX_MILLISECONDS:
            raise InvalidInput(
                f"{milliseconds} ms cannot be traced",
                hint=f"ask for 1 to {MAX_MILLISECONDS} ms",
                reason="BAD_DURATION",
                param="milliseconds",
            )
        running = self._rings.serving(ring)
        if self._busy:
            raise Conflict("a trace is being taken", hint="try again in a moment", reason="TRACE_BUSY")
        self._busy = True
        try:
            return await self._trace(running.plan, running.machine.epoch, milliseconds)
        finally:
            self._busy = False

    async def _trace(
        self, plan: admin_pb2.RingPlan, epoch: int, milliseconds: int
    ) -> admin_pb2.TraceRingResponse:
        members = [stage.member for stage in plan.stages]
        before = await asyncio.gather(*map(self._offset, members))
        start = self._clock()
        await asyncio.sleep(milliseconds / 1000)
        duration = self._clock() - start
        after = await asyncio.gather(*map(self._offset, members))
        window = self._clock() - start
        question = membership_pb2.TraceQuestion(ring=plan.ring, epoch=epoch, window=window)
        made = await asyncio.gather(
            *(
                self._member(stage, question, *offsets)
                for stage, *offsets in zip(plan.stages, before, after, strict=True)
            )
        )
        return admin_pb2.TraceRingResponse(
            ring=plan.ring, epoch=epoch, start=start, duration=duration, members=made
        )

    def answered(self, session: NodeSession, answer: membership_pb2.TraceAnswer) -> None:
        """A node's answer has come just now."""
        self._questions.answered(session, answer.id, (answer, self._clock()))

    def gone(self, session: NodeSession) -> None:
        """A node's stream has ended."""
        self._questions.gone(session)

    async def _offset(self, member: str) -> Offset | SealringError:
        found: list[Offset] = []
        try:
            async with asyncio.timeout(_CLOCK_SECONDS):
                for _ in range(_ROUND_TRIPS):
                    sent = self._clock()
                    answer, received = await self._ask(member, membership_pb2.TraceQuestion())
                    if not 0 < answer.asked <= answer.answered < _MAX_TIME:
                        raise _bad_trace()
                    found.append(Offset.of(sent, answer.asked, answer.answered, received))
        except TimeoutError:
            return DeadlineExceeded("the member does not answer", reason="TRACE_TIMEOUT")
        except SealringError as error:
            return error
        return min(found, key=lambda one: one.error)

    async def _member(
        self,
        stage: admin_pb2.StagePlan,
        question: membership_pb2.TraceQuestion,
        before: Offset | SealringError,
        after: Offset | SealringError,
    ) -> admin_pb2.MemberTrace:
        made = admin_pb2.MemberTrace(member=stage.member, name=stage.member_name, rank=stage.rank)
        try:
            offset = _known(before).between(_known(after))
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer, _ = await self._ask(stage.member, question)
            if answer.HasField("problem"):
                made.problem.CopyFrom(to_problem(from_problem(answer.problem)))
                return made
            _fill(made, check_trace(answer), offset)
        except TimeoutError:
            late = DeadlineExceeded("the member does not answer", reason="TRACE_TIMEOUT")
            made.problem.CopyFrom(to_problem(late))
        except SealringError as error:
            made.problem.CopyFrom(to_problem(error))
        return made

    async def _ask(
        self, member: str, question: membership_pb2.TraceQuestion
    ) -> tuple[membership_pb2.TraceAnswer, int]:
        """The answer and when it came."""

        def numbered(number: int) -> CoordinatorMessage:
            message = CoordinatorMessage(trace=question)
            message.trace.id = number
            return message

        return await self._questions.ask(member, numbered)


def check_trace(answer: membership_pb2.TraceAnswer) -> Iterable[trace_pb2.ProcessTrace]:
    """Bounds everything that a member said. Raises InvalidInput (BAD_TRACE)."""
    known = trace_pb2.Activity.values()
    if len(answer.processes) > _MAX_PROCESSES:
        raise _bad_trace()
    for process in answer.processes:
        if len(process.spans) > MAX_SPANS or process.since >= _MAX_TIME:
            raise _bad_trace()
        if not process.accepted <= process.drafted < _MAX_DRAFTS:
            raise _bad_trace()
        for span in process.spans:
            if span.activity not in known or max(span.start, span.duration, span.record) >= _MAX_TIME:
                raise _bad_trace()
    return answer.processes


def _fill(made: admin_pb2.MemberTrace, processes: Iterable[trace_pb2.ProcessTrace], offset: Offset) -> None:
    made.clock_offset, made.clock_error = offset.value, offset.error
    for process in processes:
        made.since = max(made.since, process.since + offset.value, 0)
        made.drafted += process.drafted
        made.accepted += process.accepted
        for span in process.spans:
            moved = made.spans.add()
            moved.CopyFrom(span)
            moved.start = max(0, span.start + offset.value)


def _known(offset: Offset | SealringError) -> Offset:
    if isinstance(offset, SealringError):
        raise offset
    return offset


def _bad_trace() -> InvalidInput:
    return InvalidInput("the member's trace is out of bounds", reason="BAD_TRACE")
