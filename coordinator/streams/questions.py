"""Questions to nodes over their streams: each is answered once, or fails with the stream it went over."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.errors import Unavailable
from sealring.v1.membership_pb2 import CoordinatorMessage

Answer = TypeVar("Answer")


class Questions(Generic[Answer]):
    """The open questions of one kind."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._numbers = itertools.count(1)
        self._open: dict[tuple[NodeSession, int], asyncio.Future[Answer]] = {}

    async def ask(self, member: str, question: Callable[[int], CoordinatorMessage]) -> Answer:
        """The answer to what `question` makes of a number. Raises Unavailable (MEMBER_OFFLINE)."""
        session = self._sessions.find(member)
        if session is None:
            raise _gone()
        key = (session, next(self._numbers))
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[key] = waiting
        try:
            session.send(question(key[1]))
            return await waiting
        finally:
            del self._open[key]

    def answered(self, session: NodeSession, number: int, answer: Answer) -> None:
        """An answer has come; those to questions that nobody asked are dropped."""
        waiting = self._open.get((session, number))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def gone(self, session: NodeSession) -> None:
        """A stream has ended; what was asked over its successor goes on."""
        for (asked, _), waiting in self._open.items():
            if asked is session and not waiting.done():
                waiting.set_exception(_gone())


def _gone() -> Unavailable:
    return Unavailable("the member is not online", hint="see: sealring node list", reason="MEMBER_OFFLINE")
