"""Questions to nodes over their streams: each is answered once, or fails with the stream that carried it.

The times of a question and its reply give the offset of the node's clock.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.errors import Unavailable
from sealring.v1.membership_pb2 import CoordinatorMessage, MemberMessage


@dataclass(frozen=True)
class Offset:
    """Nanoseconds to add to a member's clock for the coordinator's: `value`, wrong by `error` at most."""

    value: int
    error: int

    @classmethod
    def of(cls, sent: int, asked: int, answered: int, received: int) -> Offset:
        """The offset by one round trip: two times of the coordinator's clock around two of the member's.

        RFC 5905, section 8. The error is half of the time that the messages travelled.
        """
        away = max(0, (received - sent) - (answered - asked))
        return cls(((sent - asked) + (received - answered)) // 2, (away + 1) // 2)

    def between(self, later: Offset) -> Offset:
        """The middle of two; the error covers both, and the drift from one to the other."""
        drift = abs(later.value - self.value)
        return Offset((self.value + later.value) // 2, max(self.error, later.error) + (drift + 1) // 2)


Reply = TypeVar("Reply", bound=Message)

REPLIES = frozenset(
    field.name
    for field in MemberMessage.DESCRIPTOR.fields
    if field.message_type is not None and "id" in field.message_type.fields_by_name
)
"""The messages of nodes that answer a question: each has its number."""

_FIELDS: dict[Any, str] = {field.message_type: field.name for field in CoordinatorMessage.DESCRIPTOR.fields}


@dataclass(frozen=True, eq=False)
class _Question:
    clock: Callable[[], int]
    reply: asyncio.Future[tuple[Any, int]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Questions:
    """The open questions of every kind."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._numbers = itertools.count(1)
        self._open: dict[tuple[NodeSession, type, int], _Question] = {}

    async def ask(self, member: str, question: Message, kind: type[Reply]) -> Reply:
        """The reply to a question, which gets its number here. Raises Unavailable (MEMBER_OFFLINE)."""
        reply, _ = await self.ask_timed(member, question, kind, time.monotonic_ns)
        return reply

    async def ask_timed(
        self, member: str, question: Message, kind: type[Reply], clock: Callable[[], int]
    ) -> tuple[Reply, int]:
        """The reply, and the time of `clock` at which it arrived. Raises Unavailable (MEMBER_OFFLINE)."""
        session = self._sessions.find(member)
        if session is None:
            raise _offline()
        number, field = next(self._numbers), _FIELDS[question.DESCRIPTOR]
        sent: dict[str, Any] = {field: question}
        message = CoordinatorMessage(**sent)
        getattr(message, field).id = number
        asked = self._open[session, kind, number] = _Question(clock)
        try:
            session.send(message)
            return await asked.reply
        finally:
            del self._open[session, kind, number]

    def answered(self, session: NodeSession, reply: Any) -> None:
        """Takes a node's reply. A reply to no open question of its kind and stream is dropped."""
        asked = self._open.get((session, type(reply), reply.id))
        if asked is not None and not asked.reply.done():
            asked.reply.set_result((reply, asked.clock()))  # the clock is read here: waiters run later

    def gone(self, session: NodeSession) -> None:
        """Fails the questions of a stream that has ended. Those over its successor go on."""
        for (stream, _, _), asked in self._open.items():
            if stream is session and not asked.reply.done():
                asked.reply.set_exception(_offline())


def _offline() -> Unavailable:
    return Unavailable("the member is not online", hint="see: sealring node list", reason="MEMBER_OFFLINE")
