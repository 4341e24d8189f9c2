"""Handles the messages of nodes: bounds each, and passes it to the part of the coordinator that uses it."""

from __future__ import annotations

import math
from copy import deepcopy

import structlog

from sealring.coordinator.members.challenges import Challenges
from sealring.coordinator.members.enrolment import check_addresses
from sealring.coordinator.nodes.models import check_held
from sealring.coordinator.nodes.questions import REPLIES, Questions
from sealring.coordinator.rings.driver import ClusterDriver
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.clock import Clock
from sealring.mesh.errors import AlreadyExists, FailedPrecondition, InvalidInput, PermissionDenied
from sealring.mesh.ring.limits import MAX_PREFILL_CHUNK
from sealring.mesh.roster.model import term_of
from sealring.mesh.trust.attestation import verify_sealing_key
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import MemberMessage

_MAX_VERSION = 64
_INSTANCE_BYTES = 16
_MAX_BYTES = 1 << 50
_MAX_RINGS = 64
_MAX_ALARMS = 1000
_MAX_DEVICE = 16
_MOVE_SECONDS = 60.0
_HEARD = membership_pb2.CoordinatorMessage(heard=membership_pb2.Heard())
"""The least time between two changes of a node's addresses while it stays: each makes a new roster."""

log = structlog.get_logger()


class NodeMessages:
    """What nodes send once they have proved their identity."""

    def __init__(
        self,
        store: Store,
        publisher: RosterPublisher,
        sessions: Sessions,
        driver: ClusterDriver,
        questions: Questions,
        challenges: Challenges,
        cluster: str,
        *,
        clock: Clock,
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._driver = driver
        self._questions = questions
        self._challenges = challenges
        self._cluster = cluster
        self._clock = clock
        self._alarms: set[tuple[str, int]] = set()
        self._places: dict[str, tuple[tuple[str, ...], float]] = {}
        """The addresses that members stated last, and the time of the last change, by the wall clock."""

    def hello(self, identifier: str, hello: membership_pb2.Hello) -> None:
        """Stores what a node states of itself, and signs a roster if other members have to know.

        Raises InvalidInput (BAD_HELLO, BAD_ADDRESS), AttestationError, AlreadyExists (IDENTITY_IN_USE),
        FailedPrecondition (ROSTER_CLAIMED_NEWER).
        """
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
        self._places[identifier] = addresses, -math.inf
        changed = deepcopy(member)
        changed.addresses[:] = addresses
        changed.sealing_key, changed.software_version = hello.sealing_key, hello.software_version
        if (changed.addresses, changed.sealing_key) != (member.addresses, member.sealing_key):
            with self._publisher.change(grows=True):
                self._store.members.save(changed)
        elif changed != member:
            self._store.members.save(changed)

    def take(self, session: NodeSession, message: MemberMessage) -> bool:
        """Handles one message and returns whether it was a goodbye.

        Raises InvalidInput (BAD_MESSAGE, BAD_HEARTBEAT), PermissionDenied (ROSTER_EQUIVOCATION).
        """
        kind = message.WhichOneof("message")
        member = session.member
        if kind == "heartbeat":
            self._heartbeat(session, message.heartbeat)
        elif kind in REPLIES:
            self._questions.answered(session, getattr(message, kind))
        elif kind in ("progress", "prepared", "up", "fault"):
            self._driver.reported(member, getattr(message, kind))
        elif kind == "challenge_answer":
            self._challenges.answered(member, message.challenge_answer)
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
        sizes = (*node, heartbeat.memory_used, heartbeat.memory_overhead, heartbeat.stored_bytes)
        bounded = max(sizes) <= _MAX_BYTES and heartbeat.longest_chunk <= MAX_PREFILL_CHUNK
        if not bounded or len(heartbeat.rings) > _MAX_RINGS or len(heartbeat.computes_on) > _MAX_DEVICE:
            raise InvalidInput("a heartbeat is out of bounds", reason="BAD_HEARTBEAT")
        check_held(heartbeat.models)
        if heartbeat.addresses:
            self._move(session.member, check_addresses(heartbeat.addresses))
        if heartbeat.answer:
            session.outbox.put_latest(membership_pb2.Heard, _HEARD)
        self._driver.beaten(session, heartbeat)
        self._sessions.beaten()

    def _move(self, identifier: str, addresses: tuple[str, ...]) -> None:
        """Signs a roster with a node's addresses where these have changed, as when a cable comes or goes."""
        stated, changed_at = self._places.get(identifier, ((), -math.inf))
        if addresses == stated or abs(self._clock() - changed_at) < _MOVE_SECONDS:
            return
        self._places[identifier] = addresses, self._clock()
        member = self._store.members.find(identifier)
        if member is None or tuple(member.addresses) == addresses:
            return
        log.info("node_addresses_changed", member=identifier, addresses=addresses)
        with self._publisher.change(grows=True):
            member.addresses[:] = addresses
            self._store.members.save(member)

    def _check_seen(self, member: str, seen: membership_pb2.RosterSeen) -> None:
        """Raises the alarm for a roster that this coordinator did not sign: another one has signed it."""
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


def _newer_roster(member: str, theirs: int, ours: int) -> FailedPrecondition:
    """The error for a node that claims a newer roster. It may lie, so the hint asks for other nodes' word."""
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
