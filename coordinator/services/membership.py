"""The Membership service: a node's one stream, from its hello to its goodbye."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog

from sealring.coordinator.auth.access import Access
from sealring.coordinator.nodes.questions import Questions
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.services.node_messages import NodeMessages
from sealring.coordinator.streams.proofs import Proofs
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.clock import monotonic_clock
from sealring.mesh.errors import (
    FailedPrecondition,
    InvalidInput,
    SealringError,
)
from sealring.mesh.member.proof import Purpose, no_proof
from sealring.mesh.member.tenure import Tenure
from sealring.mesh.pki.certificates import Role
from sealring.mesh.roster.model import MAX_RINGS_OF_MEMBER
from sealring.mesh.rpc.problem import from_problem
from sealring.v1 import membership_pb2, membership_pb2_grpc, proof_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, Goodbye, MemberMessage

_HELLO_SECONDS = 10.0
_PARTING_SECONDS = 5.0
log = structlog.get_logger()


class MembershipService(membership_pb2_grpc.MembershipServicer):
    """Keeps the stream of each node, from its proof of identity to its goodbye."""

    def __init__(
        self,
        access: Access,
        proofs: Proofs,
        publisher: RosterPublisher,
        sessions: Sessions,
        questions: Questions,
        messages: NodeMessages,
    ) -> None:
        self._access = access
        self._proofs = proofs
        self._publisher = publisher
        self._sessions = sessions
        self._questions = questions
        self._messages = messages

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[MemberMessage], context: Any
    ) -> AsyncIterator[CoordinatorMessage]:
        """Role member.

        Raises Unauthenticated (NO_PROOF, BAD_PROOF), InvalidInput (BAD_HELLO), AttestationError,
        FailedPrecondition (INCOMPATIBLE_VERSION, ROSTER_CLAIMED_NEWER), AlreadyExists (IDENTITY_IN_USE),
        Unavailable (SILENT, SLOW_PEER).
        """
        peer = self._access.identify(context, Role.MEMBER)
        first = await self._message(peer.id, requests)
        if not first.HasField("offer"):
            self._access.require(context, Role.MEMBER)  # it may have been evicted meanwhile
            raise no_proof()
        proof = self._proofs.begin(Purpose.SESSION, peer, context, first.offer)
        yield CoordinatorMessage(
            proof=await self._proofs.answer(proof)
        )  # also to a node that is no longer enrolled
        second = await self._message(peer.id, requests)
        self._access.require(context, Role.MEMBER)
        if not second.HasField("proof"):
            raise no_proof()
        tenure = self._proofs.check(proof, peer, second.proof)
        yield CoordinatorMessage(accepted=proof_pb2.ProofAccepted(hears=True))
        try:
            hello = await self._hello(peer.id, requests, context)
            self._messages.hello(peer.id, hello)
        except SealringError as error:
            log.warning("node_refused", member=peer.id, reason=error.reason, why=error.message)
            self._sessions.refused(peer.id, str(error))
            yield CoordinatorMessage(goodbye=Goodbye(reason=error.reason))
            await _parted(asyncio.create_task(_read_out(requests)))
            raise
        session = NodeSession(
            peer.id,
            hello.instance,
            {one.prepared.ring: one for one in hello.serving[:MAX_RINGS_OF_MEMBER]},
            release=first.offer.release,
            measures=hello.measures,
            clock=monotonic_clock,
        )
        session.send_roster(self._publisher.current)
        log.info("node_session", member=peer.id, version=hello.software_version)
        self._sessions.open(session)
        reading = asyncio.create_task(self._read(session, tenure, requests))
        try:
            async for message in session.outbox.messages():
                yield message
        except SealringError:
            self._ended(session)
            await _parted(reading)
            raise
        finally:
            reading.cancel()
            self._ended(session)

    def _ended(self, session: NodeSession) -> None:
        self._questions.gone(session)
        self._sessions.closed(session)

    async def _hello(
        self, member: str, requests: AsyncIterator[MemberMessage], context: Any
    ) -> membership_pb2.Hello:
        message = await self._message(member, requests)
        self._access.require(context, Role.MEMBER)
        if message.HasField("trouble"):
            trouble = from_problem(message.trouble)  # of any kind there; here it is a failed precondition
            raise FailedPrecondition(trouble.message, hint=trouble.hint, reason=trouble.reason)
        if not message.HasField("hello"):
            raise InvalidInput("a session begins with a hello", reason="BAD_HELLO")
        return message.hello

    async def _message(self, member: str, requests: AsyncIterator[MemberMessage]) -> MemberMessage:
        """The next message of a session that begins, or an empty one after the timeout."""
        try:
            async with asyncio.timeout(_HELLO_SECONDS) as limit:
                with self._sessions.arriving(member, limit):
                    return await anext(requests, MemberMessage())
        except TimeoutError:
            return MemberMessage()

    async def _read(
        self, session: NodeSession, tenure: Tenure, requests: AsyncIterator[MemberMessage]
    ) -> None:
        """Takes messages until the stream ends. After a goodbye to the node they are read and dropped."""
        try:
            async for message in requests:
                if not session.outbox.closed:
                    self._listen(session, tenure, message)
            session.outbox.close()
        except SealringError as error:
            session.close(error.reason, error)
        except Exception:
            log.exception("session_failed", member=session.member)
            session.close("an internal error")

    def _listen(self, session: NodeSession, tenure: Tenure, message: MemberMessage) -> None:
        session.seen()
        try:
            if message.HasField("renewal"):
                tenure.renew(message.renewal)
            elif self._messages.take(session, message):
                session.said_goodbye = True
                session.outbox.close()
        except SealringError as error:
            session.close(error.reason, error)


async def _read_out(requests: AsyncIterator[MemberMessage]) -> None:
    async for _ in requests:
        pass


async def _parted(reading: asyncio.Task[None]) -> None:
    """Waits, for a while, until a node has ended its side of the stream after a goodbye.

    A caller of grpc.aio whose write meets the end of its stream reads INTERNAL and not why it ended.
    """
    try:
        await asyncio.wait((reading,), timeout=_PARTING_SECONDS)
    finally:
        reading.cancel()
