"""Questions about nodes' machines: one at a time each, and nothing of what comes back is believed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from patience import until

from sealring.coordinator.nodes.diagnoses import MAX_REPORT_BYTES, Diagnoses
from sealring.mesh.errors import Conflict, DeadlineExceeded, NotFound, SealringError
from sealring.mesh.rpc import to_problem
from sealring.v1 import admin_pb2, membership_pb2
from tests.coordinator.conftest import Cluster, online

SECOND = 10**9


def answer(number: int = 1, **fields: Any) -> membership_pb2.DiagnosisAnswer:
    fields = {"id": number, "asked": 1000 * SECOND, "answered": 1004 * SECOND, "report": b"{}", **fields}
    return membership_pb2.DiagnosisAnswer(**fields)


async def asked(diagnoses: Diagnoses) -> asyncio.Task[admin_pb2.DiagnoseNodeResponse]:
    """A question that was sent."""
    asking = asyncio.create_task(diagnoses.ask("alpha"))
    await asyncio.sleep(0)
    return asking


async def test_the_clock_is_measured_beside_the_work() -> None:
    """The node works for 4 s between a way there and back of half a second each; its clock is 60 s ahead."""
    now = 1000 * SECOND
    questions, session = online()
    asking = await asked(Diagnoses(questions, clock=lambda: now))
    now += 5 * SECOND
    ahead = 1060 * SECOND + SECOND // 2
    questions.answered(session, answer(asked=ahead, answered=ahead + 4 * SECOND))
    assert await asking == admin_pb2.DiagnoseNodeResponse(
        report=b"{}", clock_offset=60 * SECOND, clock_error=SECOND // 2
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"report": b"x" * (MAX_REPORT_BYTES + 1)}, "BAD_REPORT"),
        ({"asked": 0}, "BAD_REPORT"),
        ({"asked": 1005 * SECOND}, "BAD_REPORT"),
        ({"answered": 1 << 63}, "BAD_REPORT"),
        ({"problem": to_problem(NotFound("no", reason="NO_REPORT"))}, "NO_REPORT"),
    ],
)
async def test_what_is_out_of_bounds_is_refused_and_a_nodes_own_problem_told(
    fields: dict[str, Any], reason: str
) -> None:
    questions, session = online()
    asking = await asked(Diagnoses(questions))
    questions.answered(session, answer(**fields))
    with pytest.raises(SealringError) as caught:
        await asking
    assert caught.value.reason == reason


async def test_one_question_at_a_time() -> None:
    questions, session = online()
    diagnoses = Diagnoses(questions)
    asking = await asked(diagnoses)
    with pytest.raises(Conflict):
        await diagnoses.ask("alpha")
    questions.gone(session)
    with pytest.raises(SealringError, match="not online"):
        await asking
    again = await asked(diagnoses)
    questions.answered(session, answer(2))
    assert (await again).report == b"{}"


async def test_a_silent_node_is_given_up() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        await Diagnoses(online()[0], timeout=0.0).ask("alpha")
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
