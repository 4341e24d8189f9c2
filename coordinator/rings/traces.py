"""Collects traces of a ring's members on one clock.

Every member has a monotonic clock of its own. Its offset from the coordinator's clock follows from round
trips on the member's session, as in NTP (RFC 5905, section 8). The shortest of several counts: its offset is
wrong by half of the trip at most. It is measured before and after the time traced, so drift shows as error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from sealring.coordinator.nodes.questions import Offset, Questions
from sealring.coordinator.rings.views import RingViews
from sealring.mesh.errors import Conflict, DeadlineExceeded, InvalidInput, SealringError
from sealring.mesh.ring.limits import MAX_SPANS
from sealring.mesh.rpc.limits import Buckets
from sealring.mesh.rpc.problem import from_problem, to_problem
from sealring.mesh.rpc.running import RunningCalls
from sealring.v1 import admin_pb2, membership_pb2, trace_pb2

MAX_MILLISECONDS = 60_000
_MAX_PROCESSES = 2
_MAX_TIME = 1 << 62
_MAX_TOKENS = 1 << 32
_ROUND_TRIPS = 8
_ANSWER_SECONDS = 15.0
_CLOCK_SECONDS = 5.0
_PAUSE_SECONDS = 5.0
"""From the beginning of a member's trace to its next, for each second that is begun of the first."""


class Traces:
    """One trace at a time: each costs the members some milliseconds. An operator's ends that of a member."""

    def __init__(
        self,
        questions: Questions,
        rings: RingViews,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        clock_seconds: float = _CLOCK_SECONDS,
        answer_seconds: float = _ANSWER_SECONDS,
    ) -> None:
        """`clock` counts nanoseconds. A member has `clock_seconds` for the round trips by which its clock is
        measured, and `answer_seconds` for its trace."""
        self._questions = questions
        self._rings = rings
        self._clock = clock
        self._clock_seconds = clock_seconds
        self._answer_seconds = answer_seconds
        self._turn = asyncio.Lock()
        self._by_operator = False
        self._members = RunningCalls(_busy)
        self._pauses = Buckets(1 / _PAUSE_SECONDS, 1)

    async def trace(self, ring: str, milliseconds: int, member: str = "") -> admin_pb2.TraceRingResponse:
        """The trace of a ring's members over the next `milliseconds`; "" names the only ring.
        `member` is the id of the member whose program asks, or "" for an operator.

        Raises InvalidInput (BAD_DURATION, WHICH_RING), NotFound (NO_SUCH_RING), FailedPrecondition
        (RING_DOWN), Conflict (TRACE_BUSY), for a member ResourceExhausted (RATE_LIMITED). A member that does
        not answer has a problem in place of its trace.
        """
        if not 1 <= milliseconds <= MAX_MILLISECONDS:
            raise InvalidInput(
                f"{milliseconds} ms cannot be traced",
                hint=f"ask for 1 to {MAX_MILLISECONDS} ms",
                reason="BAD_DURATION",
                param="milliseconds",
            )
        running = self._rings.serving(ring)
        if self._by_operator or (member and self._turn.locked()):
            raise _busy()
        if member:
            self._pauses.check(member, -(-milliseconds // 1000))
            with self._members.one(member):
                async with self._turn:
                    return await self._trace(running.plan, running.machine.epoch, milliseconds)
        self._by_operator = True
        try:
            for one in self._members.callers:
                self._members.end(one)
            async with self._turn:
                return await self._trace(running.plan, running.machine.epoch, milliseconds)
        finally:
            self._by_operator = False

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

    async def _offset(self, member: str) -> Offset | SealringError:
        found: list[Offset] = []
        try:
            async with asyncio.timeout(self._clock_seconds):
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
            async with asyncio.timeout(self._answer_seconds):
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
        """The answer, and the time at which it arrived."""
        return await self._questions.ask_timed(member, question, membership_pb2.TraceAnswer, self._clock)


def check_trace(answer: membership_pb2.TraceAnswer) -> Iterable[trace_pb2.ProcessTrace]:
    """Bounds a member's trace. Raises InvalidInput (BAD_TRACE)."""
    known = trace_pb2.Activity.values()
    if len(answer.processes) > _MAX_PROCESSES:
        raise _bad_trace()
    for process in answer.processes:
        if len(process.spans) > MAX_SPANS or process.since >= _MAX_TIME:
            raise _bad_trace()
        if not max(process.accepted, process.modelled) <= process.drafted < _MAX_TOKENS:
            raise _bad_trace()
        if max(process.recalled, process.stored) >= _MAX_TOKENS:
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
        made.modelled += process.modelled
        made.recalled += process.recalled
        made.stored += process.stored
        for span in process.spans:
            moved = made.spans.add()
            moved.CopyFrom(span)
            moved.start = max(0, span.start + offset.value)


def _known(offset: Offset | SealringError) -> Offset:
    if isinstance(offset, SealringError):
        raise offset
    return offset


def _busy() -> Conflict:
    return Conflict("another trace is being taken", hint="try again in a moment", reason="TRACE_BUSY")


def _bad_trace() -> InvalidInput:
    return InvalidInput("the member's trace is out of bounds", reason="BAD_TRACE")
