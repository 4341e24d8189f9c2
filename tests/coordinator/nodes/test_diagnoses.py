"""Questions about nodes' machines: one at a time each, and nothing of what comes back is believed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from patience import until

from sealring.coordinator.nodes.diagnoses import MAX_REPORT_BYTES, Diagnoses
from sealring.coordinator.nodes.questions import Questions
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.errors import Conflict, DeadlineExceeded, InvalidInput, NotFound, SealringError
from sealring.mesh.rpc.problem import to_problem
from sealring.v1 import admin_pb2, membership_pb2
from tests.coordinator.conftest import Cluster

SECOND = 10**9


class Times:
    """A clock that is turned by hand, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 1000 * SECOND

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Times:
    return Times()


@pytest.fixture
def session() -> NodeSession:
    return NodeSession("alpha", b"one", clock=lambda: 0.0)


@pytest.fixture
def questions(session: NodeSession) -> Questions:
    sessions = Sessions()
    sessions.open(session)
    return Questions(sessions)


@pytest.fixture
def make(questions: Questions, clock: Times) -> Callable[..., Diagnoses]:
    def diagnoses(**options: Any) -> Diagnoses:
        return Diagnoses(questions, clock=clock, **options)

    return diagnoses


def answer(number: int = 1, **fields: Any) -> membership_pb2.DiagnosisAnswer:
    fields = {"id": number, "asked": 1000 * SECOND, "answered": 1004 * SECOND, "report": b"{}", **fields}
    return membership_pb2.DiagnosisAnswer(**fields)


async def test_the_clock_is_measured_beside_the_work(
    make: Callable[..., Diagnoses], questions: Questions, session: NodeSession, clock: Times
) -> None:
    """The node works for 4 s between a way there and back of half a second each; its clock is 60 s ahead."""
    diagnoses = make()
    asking = asyncio.create_task(diagnoses.ask("alpha"))
    await asyncio.sleep(0)
    clock.now += 5 * SECOND
    ahead = 1060 * SECOND + SECOND // 2
    questions.answered(session, answer(asked=ahead, answered=ahead + 4 * SECOND))
    assert await asking == admin_pb2.DiagnoseNodeResponse(
        report=b"{}", clock_offset=60 * SECOND, clock_error=SECOND // 2
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"report": b"x" * (MAX_REPORT_BYTES + 1)},
        {"asked": 0},
        {"asked": 1005 * SECOND},
        {"answered": 1 << 63},
    ],
)
async def test_what_is_out_of_bounds_is_refused(
    make: Callable[..., Diagnoses], questions: Questions, session: NodeSession, fields: dict[str, Any]
) -> None:
    diagnoses = make()
    asking = asyncio.create_task(diagnoses.ask("alpha"))
    await asyncio.sleep(0)
    questions.answered(session, answer(**fields))
    with pytest.raises(InvalidInput) as caught:
        await asking
    assert caught.value.reason == "BAD_REPORT"


async def test_a_nodes_own_problem_is_told(
    make: Callable[..., Diagnoses], questions: Questions, session: NodeSession
) -> None:
    diagnoses = make()
    asking = asyncio.create_task(diagnoses.ask("alpha"))
    await asyncio.sleep(0)
    questions.answered(session, answer(problem=to_problem(NotFound("no", reason="NO_REPORT"))))
    with pytest.raises(NotFound, match="no"):
        await asking


async def test_one_question_at_a_time(
    make: Callable[..., Diagnoses], questions: Questions, session: NodeSession
) -> None:
    diagnoses = make()
    asking = asyncio.create_task(diagnoses.ask("alpha"))
    await asyncio.sleep(0)
    with pytest.raises(Conflict):
        await diagnoses.ask("alpha")
    questions.gone(session)
    with pytest.raises(SealringError, match="not online"):
        await asking
    again = asyncio.create_task(diagnoses.ask("alpha"))
    await asyncio.sleep(0)
    questions.answered(session, answer(2))
    assert (await again).report == b"{}"


async def test_a_silent_node_is_given_up(make: Callable[..., Diagnoses]) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        await make(timeout=0.01).ask("alpha")
    assert caught.value.reason == "DIAGNOSIS_TIMEOUT"


async def test_an_operator_asks_a_node(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    asking = asyncio.create_task(cluster.call("DiagnoseNode", admin_pb2.DiagnoseNodeRequest(id=node.id)))
    question = await node.wait_for("diagnose")
    await node.send(diagnosis=answer(question.id, report=b'{"facts": {}}'))
    assert (await asking).report == b'{"facts": {}}'
    asking = asyncio.create_task(cluster.call("DiagnoseNode", admin_pb2.DiagnoseNodeRequest(id=node.id)))
    await node.wait_for("diagnose", lambda one: one.id != question.id)
    node.cut()
    with pytest.raises(SealringError) as caught:
        await asking
    assert caught.value.reason == "MEMBER_OFFLINE"
    with pytest.raises(SealringError) as caught:
        await cluster.call("DiagnoseNode", admin_pb2.DiagnoseNodeRequest(id="somebody"))
    assert caught.value.reason == "BAD_MEMBER_ID"
    entries = cluster.coordinator.store.audit.entries(after=0, limit=100, newest=False)
    asked = [(one.actor, one.subject) for one in entries if one.action == "diagnose_node"]
    assert asked == [("operator", node.id)] * 2
    await until(lambda: cluster.coordinator.sessions.find(node.id) is None)
