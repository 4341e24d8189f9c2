"""Traces: clocks that differ, members that are away or make things up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import until

from sealring.coordinator.nodes.questions import Offset, Questions
from sealring.coordinator.rings.traces import Traces, check_trace
from sealring.mesh.errors import InvalidInput, SealringError
from sealring.mesh.ring import MAX_SPANS
from sealring.mesh.rpc import to_problem
from sealring.v1 import admin_pb2, membership_pb2, trace_pb2
from tests.coordinator.conftest import SERVING, Cluster, FakeNode, deploy, ring_state

BEHIND = 7_000_000_000


@given(
    ahead=st.integers(-(10**15), 10**15),
    there=st.integers(0, 10**9),
    back=st.integers(0, 10**9),
    between=st.integers(0, 10**9),
)
def test_an_offset_is_no_further_off_than_it_says(ahead: int, there: int, back: int, between: int) -> None:
    sent = 10**12
    asked = sent + there + ahead  # the member's clock is `ahead` of ours
    answered = asked + between
    received = sent + there + between + back
    found = Offset.of(sent, asked, answered, received)
    assert abs(found.value + ahead) <= found.error + 1
    assert found.error == (there + back + 1) // 2


def test_drift_counts_as_error() -> None:
    assert Offset(100, 10).between(Offset(140, 5)) == Offset(120, 30)


def span(**fields: Any) -> trace_pb2.Span:
    return trace_pb2.Span(**{"activity": trace_pb2.ACTIVITY_SEND, "step": 1, "start": 5, **fields})


@pytest.mark.parametrize(
    "processes",
    [
        [trace_pb2.ProcessTrace()] * 3,
        [trace_pb2.ProcessTrace(since=1 << 63)],
        [trace_pb2.ProcessTrace(spans=[span()] * (MAX_SPANS + 1))],
        [trace_pb2.ProcessTrace(spans=[span(activity=77)])],
        [trace_pb2.ProcessTrace(spans=[span(start=1 << 63)])],
        [trace_pb2.ProcessTrace(spans=[span(duration=1 << 62)])],
        [trace_pb2.ProcessTrace(spans=[span(record=1 << 62)])],
        [trace_pb2.ProcessTrace(drafted=1 << 32)],
        [trace_pb2.ProcessTrace(drafted=1, accepted=2)],
        [trace_pb2.ProcessTrace(drafted=1, modelled=2)],
        [trace_pb2.ProcessTrace(recalled=1 << 32)],
        [trace_pb2.ProcessTrace(stored=1 << 32)],
    ],
)
def test_what_is_out_of_bounds_is_refused(processes: list[trace_pb2.ProcessTrace]) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_trace(membership_pb2.TraceAnswer(processes=processes))
    assert caught.value.reason == "BAD_TRACE"


def test_what_is_within_bounds_is_taken() -> None:
    processes = [trace_pb2.ProcessTrace(spans=[span()] * MAX_SPANS, since=3)] * 2
    assert len(list(check_trace(membership_pb2.TraceAnswer(processes=processes)))) == 2


async def answer_traces(node: FakeNode, away: int, traces: list[trace_pb2.ProcessTrace]) -> None:
    """A member whose clock is `away` nanoseconds off, and that tells `traces`."""
    done: set[int] = set()
    while True:
        question = await node.wait_for("trace", lambda one: one.id not in done, seconds=60)
        done.add(question.id)
        now = time.perf_counter_ns() + away
        answer = membership_pb2.TraceAnswer(id=question.id, asked=now, answered=now)
        if question.window:
            answer.processes.extend(traces)
        await node.send(trace=answer)


def asked(node: FakeNode) -> int:
    return sum(message.HasField("trace") for message in node.messages)


async def serving(cluster: Cluster, count: int) -> None:
    for number in range(count):
        await cluster.node(f"node-{number}")
    await deploy(cluster, stages=count)
    await ring_state(cluster, SERVING)


async def test_members_are_put_on_one_clock(cluster: Cluster) -> None:
    await serving(cluster, 2)
    began = time.perf_counter_ns()
    tasks = []
    for node, away in zip(cluster.nodes, (0, -BEHIND), strict=True):
        told = [trace_pb2.ProcessTrace(spans=[span(start=began + away)], since=began + away - 5)]
        tasks.append(asyncio.create_task(answer_traces(node, away, told)))
    try:
        found = await cluster.call("TraceRing", admin_pb2.TraceRingRequest(milliseconds=30))
    finally:
        for task in tasks:
            task.cancel()
    assert (found.ring, found.epoch) == ("demo-0", 1)
    assert found.duration >= 30_000_000
    by_id = {member.member: member for member in found.members}
    assert [member.rank for member in found.members] == [0, 1]
    for node, away in zip(cluster.nodes, (0, -BEHIND), strict=True):
        member = by_id[node.id]
        assert not member.HasField("problem")
        assert abs(member.clock_offset + away) <= member.clock_error
        assert abs(member.spans[0].start - began) <= member.clock_error
        assert member.since <= member.spans[0].start


async def test_a_member_that_lies_or_leaves_costs_only_its_own_part(cluster: Cluster) -> None:
    await serving(cluster, 2)
    honest, liar = cluster.nodes
    bad = [trace_pb2.ProcessTrace(spans=[span(activity=99)])]
    tasks = [
        asyncio.create_task(answer_traces(honest, 0, [trace_pb2.ProcessTrace(spans=[span()])])),
        asyncio.create_task(answer_traces(liar, 0, bad)),
    ]
    try:
        found = await cluster.call("TraceRing", admin_pb2.TraceRingRequest(milliseconds=1))
        problems = {member.member: member.problem.reason for member in found.members}
        assert problems == {honest.id: "", liar.id: "BAD_TRACE"}
        tasks[1].cancel()
        seen = asked(liar)
        tracing = asyncio.create_task(
            cluster.call("TraceRing", admin_pb2.TraceRingRequest(ring="demo-0", milliseconds=1))
        )
        await until(lambda: asked(liar) > seen)
        with pytest.raises(SealringError) as caught:
            await cluster.call("TraceRing", admin_pb2.TraceRingRequest(milliseconds=1))
        assert caught.value.reason == "TRACE_BUSY"
        liar.cut()
        found = await tracing
        problems = {member.member: member.problem.reason for member in found.members}
        assert problems[honest.id] == ""
        assert problems[liar.id] in ("MEMBER_OFFLINE", "UNAVAILABLE")
    finally:
        for task in tasks:
            task.cancel()


class Scripted:
    """A session whose member answers each question with what `script` says, or not at all."""

    member, instance = "alpha", b"one"

    def __init__(self, script: list[membership_pb2.TraceAnswer | None]) -> None:
        self.script = script
        self.reply: Any = None

    def send(self, message: membership_pb2.CoordinatorMessage) -> None:
        answer = self.script.pop(0)
        if answer is not None:
            answer.id = message.trace.id
            asyncio.get_running_loop().call_soon(self.reply, self, answer)


async def member_trace(
    script: list[membership_pb2.TraceAnswer | None], **seconds: float
) -> admin_pb2.MemberTrace:
    """What becomes of one member of a ring, by a clock that stands still."""
    session = Scripted(script)
    stage = admin_pb2.StagePlan(member="alpha", member_name="a", rank=3)
    plan = admin_pb2.RingPlan(ring="demo-0", stages=[stage])
    running = SimpleNamespace(plan=plan, machine=SimpleNamespace(epoch=7))
    questions = Questions(SimpleNamespace(find=lambda member: session))  # type: ignore[arg-type]
    views: Any = SimpleNamespace(serving=lambda name: running)
    traces = Traces(questions, views, clock=lambda: 1000, **seconds)
    session.reply = questions.answered
    (made,) = (await traces.trace("", 1)).members
    assert (made.member, made.name, made.rank) == ("alpha", "a", 3)
    return made


def clocks(asked: int = 1, answered: int = 1) -> list[membership_pb2.TraceAnswer | None]:
    return [membership_pb2.TraceAnswer(asked=asked, answered=answered) for _ in range(8)]


async def test_a_trace_is_moved_to_our_clock() -> None:
    told = trace_pb2.ProcessTrace(spans=[span(start=5), span(start=2000)], since=4, drafted=7, accepted=3)
    told.modelled, told.recalled, told.stored = 5, 512, 256
    made = await member_trace(
        [*clocks(900, 900), *clocks(902, 902), membership_pb2.TraceAnswer(processes=[told])]
    )
    assert (made.clock_offset, made.clock_error) == (99, 1)
    assert (made.since, [one.start for one in made.spans]) == (103, [104, 2099])
    assert (made.drafted, made.accepted, made.modelled) == (7, 3, 5)
    assert (made.recalled, made.stored) == (512, 256)
    assert not made.HasField("problem")


@pytest.mark.parametrize(("asked", "answered"), [(0, 5), (6, 5), (1 << 62, 1 << 62), (5, 1 << 62)])
async def test_a_clock_that_cannot_be_is_refused(asked: int, answered: int) -> None:
    made = await member_trace([*clocks(asked, answered), *clocks(asked, answered)])
    assert made.problem.reason == "BAD_TRACE"


async def test_a_members_own_problem_is_told() -> None:
    problem = to_problem(InvalidInput("no", reason="NO_TRACE"))
    made = await member_trace([*clocks(), *clocks(), membership_pb2.TraceAnswer(problem=problem)])
    assert (made.problem.reason, len(made.spans), made.clock_error) == ("NO_TRACE", 0, 0)


async def test_a_member_that_does_not_answer_in_time_has_a_problem() -> None:
    late = await member_trace([*clocks(), *clocks(), None], answer_seconds=0)
    assert late.problem.reason == "TRACE_TIMEOUT"
    assert (await member_trace([None, None], clock_seconds=0)).problem.reason == "TRACE_TIMEOUT"


@pytest.mark.parametrize(
    ("request_fields", "reason"),
    [
        ({"milliseconds": 0}, "BAD_DURATION"),
        ({"milliseconds": 60_001}, "BAD_DURATION"),
        ({"milliseconds": 10}, "NO_SUCH_RING"),
        ({"milliseconds": 10, "ring": "nope"}, "NO_SUCH_RING"),
    ],
)
async def test_what_cannot_be_traced_is_refused(
    cluster: Cluster, request_fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SealringError) as caught:
        await cluster.call("TraceRing", admin_pb2.TraceRingRequest(**request_fields))
    assert caught.value.reason == reason


async def test_a_ring_that_is_down_is_refused(cluster: Cluster) -> None:
    await cluster.node("alpha", commit=False)
    spec = admin_pb2.DeploymentSpec(name="demo", model="demo")
    await cluster.call("CreateDeployment", admin_pb2.CreateDeploymentRequest(spec=spec))
    with pytest.raises(SealringError) as caught:
        await cluster.call("TraceRing", admin_pb2.TraceRingRequest(milliseconds=10))
    assert caught.value.reason == "RING_DOWN"


async def refused(call: Awaitable[Any]) -> str:
    with pytest.raises(SealringError) as caught:
        await call
    return caught.value.reason


async def test_an_operator_takes_a_members_place_and_members_wait_between_theirs() -> None:
    """Nobody answers the first question of a trace; an operator's cannot be taken."""
    asked: list[asyncio.Future[Any]] = []

    async def ask_timed(*_: Any) -> Any:
        asked.append(asyncio.get_running_loop().create_future())
        return await asked[-1]

    stage = admin_pb2.StagePlan(member="alpha")
    plan = admin_pb2.RingPlan(ring="demo-0", stages=[stage])
    running = SimpleNamespace(plan=plan, machine=SimpleNamespace(epoch=7))
    questions: Any = SimpleNamespace(ask_timed=ask_timed)
    views: Any = SimpleNamespace(serving=lambda name: running)
    traces = Traces(questions, views, clock_seconds=1e6)
    first = asyncio.create_task(traces.trace("", 60_000, "one"))
    await until(lambda: len(asked) == 1)
    assert await refused(traces.trace("", 1, "two")) == "TRACE_BUSY"
    operators = asyncio.create_task(traces.trace("", 1))
    await until(lambda: len(asked) == 2)
    assert await refused(first) == "TRACE_BUSY"
    for who in ("", "one", "two"):
        assert await refused(traces.trace("", 1, who)) == "TRACE_BUSY"
    operators.cancel()
    await asyncio.wait([operators])
    assert await refused(traces.trace("", 1, "one")) == "RATE_LIMITED"
    second = asyncio.create_task(traces.trace("", 1, "two"))
    await until(lambda: len(asked) == 3)
    second.cancel()
    await asyncio.wait([second])
