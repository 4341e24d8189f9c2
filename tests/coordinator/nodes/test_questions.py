"""Questions over streams: what ends with which stream."""

from __future__ import annotations

import asyncio

import pytest

from sealring.coordinator.nodes.questions import Questions
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.errors import Unavailable
from sealring.v1.membership_pb2 import ModelChanged, ProfileRequest, ProfileResult, TraceAnswer
from tests.coordinator.conftest import online


async def asked(questions: Questions) -> asyncio.Task[ProfileResult]:
    """A question that was sent."""
    task = asyncio.create_task(questions.ask("alpha", ProfileRequest(), ProfileResult))
    await asyncio.sleep(0)
    return task


async def test_the_end_of_a_replaced_stream_leaves_its_successors_questions_open() -> None:
    sessions = Sessions()
    older, newer = (NodeSession("alpha", bytes(16), clock=lambda: 0.0) for _ in range(2))
    questions = Questions(sessions)
    sessions.open(older)
    first = await asked(questions)
    sessions.open(newer)
    second = await asked(questions)
    questions.gone(older)
    with pytest.raises(Unavailable, match="not online"):
        await first
    questions.answered(older, ProfileResult(id=2))
    questions.answered(newer, ModelChanged(id=2))
    questions.answered(newer, ProfileResult(id=3))
    assert not second.done(), "neither of another stream, nor of another kind, nor of another question"
    questions.answered(newer, ProfileResult(id=2))
    assert (await second).id == 2


async def test_a_reply_has_the_time_at_which_it_arrived() -> None:
    now = 5
    questions, session = online()
    task = asyncio.create_task(questions.ask_timed("alpha", ProfileRequest(), TraceAnswer, lambda: now))
    await asyncio.sleep(0)
    questions.answered(session, TraceAnswer(id=1))
    now = 9  # before the question's task runs again
    questions.answered(session, TraceAnswer(id=1, asked=4))
    assert await task == (TraceAnswer(id=1), 5)


async def test_a_node_that_is_offline_is_not_asked() -> None:
    with pytest.raises(Unavailable) as caught:
        await Questions(Sessions()).ask("alpha", ProfileRequest(), ProfileResult)
    assert caught.value.reason == "MEMBER_OFFLINE"
