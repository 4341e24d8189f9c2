"""The Membership service: a node's one stream, from its hello to its goodbye."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import structlog

from sealring.coordinator.auth.access import Access
from sealring.coordinator.planning.profiles import Profiles
from sealring.coordinator.rings.rings import Rings
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.services.challenges import Challenges
from sealring.coordinator.services.diagnoses import Diagnoses
from sealring.coordinator.services.enrolment import check_addresses
from sealring.coordinator.services.models import Models, check_held
from sealring.coordinator.services.traces import Traces
from sealring.coordinator.store import Store
from sealring.coordinator.streams.proofs import Proofs
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidInput,
    PermissionDenied,
    SealringError,
)
from sealring.mesh.member.proof import Purpose, no_proof
from sealring.mesh.member.tenure import Tenure
from sealring.mesh.pki.certificates import Role
from sealring.mesh.roster.model import MAX_RINGS_OF_MEMBER, term_of
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.trust.attestation import verify_sealing_key
from sealring.v1 import membership_pb2, membership_pb2_grpc, proof_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, Goodbye, MemberMessage

_HELLO_SECONDS = 10.0
_PARTING_SECONDS = 5.0
_MAX_VERSION = 64
_INSTANCE_BYTES = 16
_MAX_BYTES = 1 << 50
_MAX_RINGS = 64
_MAX_ALARMS = 1000
log = structlog.get_logger()


class MembershipService(membership_pb2_grpc.MembershipServicer):
    """Takes what nodes report to those who need it."""

    def __init__(
        self,
        access: Access,
        proofs: Proofs,
        store: Store,
        publisher: RosterPublisher,
        sessions: Sessions,
        rings: Rings,
        profiles: Profiles,
        challenges: Challenges,
        traces: Traces,
        diagnoses: Diagnoses,
        models: Models,
        cluster: str,
        *,
        clock: Clock,
    ) -> None:
        self._access = access
        self._proofs = proofs
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._rings = rings
        self._profiles = profiles
        self._challenges = challenges
        self._traces = traces
        self._diagnoses = diagnoses
        self._models = models
        self._alarms: set[tuple[str, int]] = set()
        self._cluster = cluster
        self._clock = clock

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
            self._access.require(context, Role.MEMBER)  # it may have been thrown out meanwhile
            raise no_proof()
        proof = self._proofs.begin(Purpose.SESSION, peer, context, first.offer)
        yield CoordinatorMessage(
            proof=await self._proofs.answer(proof)
        )  # also to who is not enrolled any more
        second = await self._message(peer.id, requests)
        self._access.require(context, Role.MEMBER)
        if not second.HasField("proof"):
            raise no_proof()
        tenure = self._proofs.check(proof, peer, second.proof)
        yield CoordinatorMessage(accepted=proof_pb2.ProofAccepted())
        try:
            hello = await self._hello(peer.id, requests, context)
            self._take_hello(peer.id, hello)
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
        self._profiles.gone(session)
        self._traces.gone(session)
        self._diagnoses.gone(session)
        self._models.gone(session)
        self._sessions.closed(session)

    async def _hello(
        self, member: str, requests: AsyncIterator[MemberMessage], context: Any
    ) -> membership_pb2.Hello:
        message = await self._message(member, requests)
        self._access.require(context, Role.MEMBER)
        if message.HasField("trouble"):
            told = from_problem(message.trouble)  # whatever kind of error it is there, here it is no fault
            raise FailedPrecondition(told.message, hint=told.hint, reason=told.reason)
        if not message.HasField("hello"):
            raise InvalidInput("a session begins with a hello", reason="BAD_HELLO")
        return message.hello

    async def _message(self, member: str, requests: AsyncIterator[MemberMessage]) -> MemberMessage:
        """The next of the messages that a session begins with; an empty one where none comes in time."""
        try:
            async with asyncio.timeout(_HELLO_SECONDS) as limit:
                with self._sessions.arriving(member, limit):
                    return await anext(requests, MemberMessage())
        except TimeoutError:
            return MemberMessage()

    def _take_hello(self, identifier: str, hello: membership_pb2.Hello) -> None:
        """What a node says of itself now; the roster is signed again when it differs from before."""
        member = self._store.members.get(identifier)
        if not 0 < len(hello.software_version) <= _MAX_VERSION:
            raise InvalidInput("software version has a wrong length", reason="BAD_HELLO")
        addresses = check_addresses(hello.addresses)
        if len(hello.instance) != _INSTANCE_BYTES:
            raise InvalidInput("instance has a wrong length", reason="BAD_HELLO")
        if self._sessions.is_double(identifier, hello.instance):
            raise AlreadyExists(
                f"the identity of {member.name} is in use twice",
                hint="a copy of its state folder runs somewhere: stop one of the two",
                reason="IDENTITY_IN_USE",
            )
        verify_sealing_key(member.identity_key, self._cluster, hello.sealing_key, hello.sealing_key_signature)
        if hello.roster_version > self._publisher.current.version:
            raise _newer_roster(identifier, hello.roster_version, self._publisher.current.version)
        changed = dataclasses.replace(
            member,
            addresses=addresses,
            sealing_key=hello.sealing_key,
            software_version=hello.software_version,
        )
        if (changed.addresses, changed.sealing_key) != (member.addresses, member.sealing_key):
            with self._publisher.change(grows=True):
                self._store.members.save(changed)
        elif changed != member:
            self._store.members.save(changed)

    async def _read(
        self, session: NodeSession, tenure: Tenure, requests: AsyncIterator[MemberMessage]
    ) -> None:
        """Takes messages until the stream ends; who was said goodbye to is not listened to any more."""
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
            elif self._take(session, message):
                session.said_goodbye = True
                session.outbox.close()
        except SealringError as error:
            session.close(error.reason, error)

    def _take(self, session: NodeSession, message: MemberMessage) -> bool:
        """Handles one message; True when it was a goodbye."""
        kind = message.WhichOneof("message")
        member = session.member
        if kind == "heartbeat":
            self._heartbeat(session, message.heartbeat)
        elif kind == "profile":
            self._profiles.answered(session, message.profile)
        elif kind == "progress":
            self._rings.progressed(member, message.progress)
        elif kind == "prepared":
            self._rings.prepared(member, message.prepared)
        elif kind == "up":
            self._rings.up(member, message.up)
        elif kind == "fault":
            self._rings.faulted(member, message.fault)
        elif kind == "challenge_answer":
            self._challenges.answered(member, message.challenge_answer)
        elif kind == "trace":
            self._traces.answered(session, message.trace)
        elif kind == "diagnosis":
            self._diagnoses.answered(session, message.diagnosis)
        elif kind == "model_changed":
            self._models.answered(session, message.model_changed)
        elif kind == "roster_seen":
            self._check_seen(member, message.roster_seen)
        elif kind == "goodbye":
            log.info("node_goodbye", member=member, why=message.goodbye.reason[:64])
            return True
        else:
            raise InvalidInput("a session holds a message that is not known here", reason="BAD_MESSAGE")
        return False

    def _heartbeat(self, session: NodeSession, heartbeat: membership_pb2.Heartbeat) -> None:
        node = heartbeat.memory_total, heartbeat.memory_usable
        sizes = (*node, heartbeat.memory_used, heartbeat.memory_overhead)
        if max(sizes) > _MAX_BYTES or len(heartbeat.rings) > _MAX_RINGS:
            raise InvalidInput("a heartbeat is out of bounds", reason="BAD_HEARTBEAT")
        check_held(heartbeat.models)
        first = session.heartbeat is None
        session.beat(heartbeat)
        self._rings.beaten(session, heartbeat, first=first)
        self._sessions.beaten()

    def _check_seen(self, member: str, seen: membership_pb2.RosterSeen) -> None:
        """A node that holds another roster of one version has met another coordinator: the alarm."""
        newest = self._publisher.current.version
        known = self._store.rosters.find(seen.version) if seen.version <= newest else None
        if seen.version > newest or (known is not None and known.hash != seen.hash):
            log.error("roster_equivocation", member=member, version=seen.version, newest=newest)
            if (member, seen.version) not in self._alarms and len(self._alarms) < _MAX_ALARMS:
                self._alarms.add((member, seen.version))
                details = {"version": seen.version, "newest": newest}
                self._store.audit.append(self._clock(), member, "roster_equivocation", member, details)
            raise PermissionDenied(
                "node holds a roster that this coordinator did not sign", reason="ROSTER_EQUIVOCATION"
            )


async def _read_out(requests: AsyncIterator[MemberMessage]) -> None:
    async for _ in requests:
        pass


async def _parted(reading: asyncio.Task[None]) -> None:
    """Waits, for a while, until a node that was said goodbye to has ended its side.

    A caller of grpc.aio whose write meets the end of its stream reads INTERNAL and not why it ended.
    """
    try:
        await asyncio.wait((reading,), timeout=_PARTING_SECONDS)
    finally:
        reading.cancel()


def _newer_roster(member: str, theirs: int, ours: int) -> FailedPrecondition:
    """It is the node's word alone: one that lies must not make an operator recover what is well."""
    log.error("roster_claimed_newer", member=member, theirs=theirs, ours=ours)
    if term_of(theirs) > term_of(ours):
        return FailedPrecondition(
            "the node says that a standby has taken over from this coordinator",
            hint="if so, stop this one; a node that is alone in this is wrong: evict it, and join it again",
            reason="ROSTER_CLAIMED_NEWER",
        )
    return FailedPrecondition(
        f"the node says that it has seen roster {theirs}, and the coordinator's newest is {ours}",
        hint="if other nodes say so too, the coordinator's state was set back: stop it and run: sealring "
        "coordinator recover; a node that is alone in this is wrong: evict it, and join it again",
        reason="ROSTER_CLAIMED_NEWER",
    )
