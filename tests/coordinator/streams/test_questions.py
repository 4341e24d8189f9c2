"""Questions over streams: what ends with which stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sealring.coordinator.streams.questions import Questions
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.errors import Unavailable
from sealring.v1.membership_pb2 import CoordinatorMessage, ProfileRequest


def numbered(number: int) -> CoordinatorMessage:
    return CoordinatorMessage(profile=ProfileRequest(id=number))


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def connect(sessions: Sessions) -> Callable[[], NodeSession]:
    def open_one() -> NodeSession:
        session = NodeSession("alpha", b"one", clock=lambda: 0.0)
        sessions.open(session)
        return session

    return open_one


async def asked(questions: Questions[str]) -> asyncio.Task[str]:
    """A question that was sent."""
    task = asyncio.create_task(questions.ask("alpha", numbered))
    await asyncio.sleep(0)
    return task


async def test_the_end_of_a_replaced_stream_leaves_its_successors_questions_open(
    sessions: Sessions, connect: Callable[[], NodeSession]
) -> None:
    questions: Questions[str] = Questions(sessions)
    older = connect()
    first = await asked(questions)
    newer = connect()
    second = await asked(questions)
    questions.gone(older)
    with pytest.raises(Unavailable, match="not online"):
        await first
    questions.answered(older, 2, "of nobody's asking")
    questions.answered(newer, 2, "yes")
    assert await second == "yes"


async def test_who_is_not_there_is_not_asked(sessions: Sessions) -> None:
    with pytest.raises(Unavailable) as caught:
        await Questions[str](sessions).ask("alpha", numbered)
    assert caught.value.reason == "MEMBER_OFFLINE"
