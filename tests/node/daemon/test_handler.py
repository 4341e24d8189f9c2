from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.errors import NotFound, RosterError
from sealring.node.daemon.handler import CoordinatorHandler
from sealring.node.daemon.seats import Background
from sealring.v1 import membership_pb2


def make_handler(sent: list[membership_pb2.MemberMessage], background: Background, **parts: Any) -> Any:
    """A handler whose parts are those that a test gives."""
    missing: Any = SimpleNamespace()
    names = ("status", "intake", "seats", "models", "prover", "diagnosis", "measuring")
    given = {name: parts.get(name, missing) for name in names}
    return CoordinatorHandler(sent.append, lambda: None, background=background, **given)


async def test_a_diagnosis_is_answered_also_without_a_report() -> None:
    sent, background = [], Background()
    results: list[Any] = [b"a report", NotFound("no", reason="NO_REPORT"), ValueError("a fault")]

    async def report() -> bytes:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return bytes(result)

    handler = make_handler(sent, background, diagnosis=SimpleNamespace(report=report))
    question = membership_pb2.CoordinatorMessage(diagnose=membership_pb2.DiagnosisQuestion(id=5))
    for _ in range(3):
        await handler.from_coordinator(question)
        await background.idle()
    answers = [message.diagnosis for message in sent]
    assert [(one.id, one.report, one.problem.reason) for one in answers] == [
        (5, b"a report", ""),
        (5, b"", "NO_REPORT"),
        (5, b"", "INTERNAL"),
    ]
    assert all(0 < one.asked <= one.answered for one in answers), "both times are for the clock's offset"


async def test_no_epoch_is_prepared_while_the_roster_cannot_be_remembered() -> None:
    sent: list[Any] = []

    def plan(_: membership_pb2.PrepareEpoch) -> None:
        raise RosterError("no space", reason="ROSTER_STATE_UNWRITABLE")

    handler = make_handler(sent, Background(), intake=SimpleNamespace(plan=plan))
    prepare = membership_pb2.PrepareEpoch(ring="demo-0", epoch=3)
    await handler.from_coordinator(membership_pb2.CoordinatorMessage(prepare=prepare))
    (message,) = sent
    assert (message.fault.ring, message.fault.epoch) == ("demo-0", 3)
    assert message.fault.problem.reason == "ROSTER_STATE_UNWRITABLE"


async def test_a_commit_of_an_unknown_epoch_is_refused() -> None:
    sent: list[Any] = []
    handler = make_handler(sent, Background(), seats=SimpleNamespace(named=lambda ring, number: None))
    commit = membership_pb2.CommitEpoch(ring="demo-0", epoch=3)
    await handler.from_coordinator(membership_pb2.CoordinatorMessage(commit=commit))
    assert sent[0].fault.problem.reason == "NO_SUCH_EPOCH"


@pytest.mark.parametrize("unload", [False, True])
async def test_an_end_reaches_the_seats_with_a_bounded_reason(unload: bool) -> None:
    ended: list[Any] = []
    seats = SimpleNamespace(end=lambda *names, unload: ended.append((*names, unload)))
    handler = make_handler([], Background(), seats=seats)
    end = membership_pb2.EndEpoch(ring="demo-0", epoch=3, reason="r" * 81, unload=unload)
    await handler.from_coordinator(membership_pb2.CoordinatorMessage(end=end))
    assert ended == [("demo-0", 3, "r" * 80, unload)]
