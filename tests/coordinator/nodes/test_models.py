"""Orders to nodes about models, and bounds on what nodes say of theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sealring.coordinator.nodes.models import Models, check_held
from sealring.mesh.errors import DeadlineExceeded, InvalidInput, SealringError, Unavailable
from sealring.mesh.rpc import to_problem
from sealring.v1.membership_pb2 import ChangeModel, HeldModel, ModelChanged
from tests.coordinator.conftest import online


async def test_a_node_is_told_and_its_refusal_passed_on() -> None:
    questions, session = online()
    models = Models(questions)
    problem = to_problem(InvalidInput("no", reason="BAD_MODEL_NAME"))
    for number, answer in enumerate((ModelChanged(), ModelChanged(problem=problem)), 1):
        asking = asyncio.create_task(models.change("alpha", "org/model", remove=False))
        await asyncio.sleep(0)
        asked = ChangeModel(id=number, model="org/model", remove=False, to_plan=False)
        assert (await anext(session.outbox.messages())).change_model == asked
        questions.answered(session, ModelChanged(id=number, problem=answer.problem if number > 1 else None))
        if number == 1:
            await asking
        else:
            with pytest.raises(SealringError) as raised:
                await asking
            assert raised.value.reason == "BAD_MODEL_NAME"


async def test_nodes_that_do_not_answer() -> None:
    questions, session = online()
    with pytest.raises(DeadlineExceeded):
        await Models(questions, timeout=0.0).change("alpha", "m", remove=True)
    with pytest.raises(Unavailable):
        await Models(questions).change("beta", "m", remove=True)
    models = Models(questions)
    asking = asyncio.create_task(models.change("alpha", "m", remove=True))
    await asyncio.sleep(0)
    questions.gone(session)
    with pytest.raises(Unavailable):
        await asking
    for name in ("", "x" * 257, "a\nb"):
        with pytest.raises(InvalidInput) as refused:
            await models.change("alpha", name, remove=False)
        assert refused.value.reason == "BAD_MODEL_NAME"
    for name in ("x", "x" * 256):
        with pytest.raises(Unavailable):
            await models.change("beta", name, remove=False)


async def test_a_node_is_told_how_much_of_a_model_to_fetch() -> None:
    questions, session = online()
    models = Models(questions)
    asking = asyncio.create_task(models.change("alpha", "m", remove=True, to_plan=True))
    await asyncio.sleep(0)
    asked = ChangeModel(id=1, model="m", remove=True, to_plan=True)
    assert (await anext(session.outbox.messages())).change_model == asked
    questions.answered(session, ModelChanged(id=1))
    await asking


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "x" * 257},
        {"name": "a\x1b"},
        {"problem": "a\x1b"},
        {"problem": "x" * 1001},
        {"size": (1 << 50) + 1},
        {"done": (1 << 50) + 1},
    ],
)
def test_what_nodes_say_is_bounded(fields: dict[str, Any]) -> None:
    most = HeldModel(name="a" * 256, problem="p" * 1000, size=1 << 50, done=1 << 50)
    check_held([most] * 64)
    with pytest.raises(InvalidInput) as caught:
        check_held([most, HeldModel(**fields)])
    assert caught.value.reason == "BAD_HEARTBEAT"
    with pytest.raises(InvalidInput):
        check_held([HeldModel()] * 65)
