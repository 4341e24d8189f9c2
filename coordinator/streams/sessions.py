"""The streams of the nodes that are here: one per member, the newest wins."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import structlog

from sealring.coordinator.store import StoredRoster
from sealring.coordinator.streams.outbox import Outbox
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import SealringError, Unavailable
from sealring.mesh.roster.difference import roster_update
from sealring.mesh.rpc.protocol import own_release
from sealring.v1.membership_pb2 import (
    CoordinatorMessage,
    Goodbye,
    Heard,
    Heartbeat,
    ServingEpoch,
)
from sealring.v1.proof_pb2 import Release

_LOOKS = 6
WORK_SECONDS = 2.0
"""Between heartbeats of a node that works, and of one of an earlier release."""

_MOST_REST_SECONDS = 60.0
_ATTEND_SECONDS = 10.0
_HURRY_LOOKS = 3
"""Looks that are left to a node that rested, once somebody looks at the cluster."""

_REPLACED = 8
_TROUBLE_SECONDS = 60.0
log = structlog.get_logger()


@functools.lru_cache(maxsize=1)
def _whole(envelope: bytes) -> CoordinatorMessage:
    """One message for all to whom it goes: a thousand members come at once when a coordinator starts again,
    and their roster has 650 KB."""
    return CoordinatorMessage(roster=roster_update(envelope))


class NodeSession:
    """One node's stream."""

    def __init__(
        self,
        member: str,
        instance: bytes,
        serving: Mapping[str, ServingEpoch] | None = None,
        *,
        release: Release | None = None,
        measures: bool = False,
        clock: Clock,
    ) -> None:
        """`instance` is what the node's process, and no other, is known by; `serving` what it had up when it
        came, by ring; `measures`, whether it answers a MeasureQuestion."""
        self.member = member
        self.instance = instance
        self.serving = serving or {}
        self.release = release or own_release()
        self.measures = measures
        self.outbox: Outbox[CoordinatorMessage] = Outbox()
        self.heartbeat: Heartbeat | None = None
        self.said_goodbye = False
        self.idle: set[str] = set()
        self._clock = clock
        self.last_seen = clock()
        self.silent_looks = 0
        self.rests = 0.0
        """Seconds by which its next heartbeat may come later than under work."""
        self.slow = ""
        """The warning about a member that has become slow, or ""."""
        self.roster = b""
        """The signed roster that was queued last."""

    def send(self, message: CoordinatorMessage) -> None:
        """Queue a message for the node."""
        self.outbox.put(message)

    def send_roster(self, roster: StoredRoster) -> None:
        """Queue a whole roster for the node."""
        self.roster = roster.envelope
        self.send(_whole(roster.envelope))

    def close(self, reason: str, error: SealringError | None = None) -> None:
        """End the stream with a goodbye that says why."""
        self.outbox.close(error, last=CoordinatorMessage(goodbye=Goodbye(reason=reason)))

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Take in a heartbeat; a ring whose steps did not change since the one before is idle.

        Returns whether other rings are idle than before.
        """
        before, idle = self.steps, self.idle
        self.heartbeat = heartbeat
        self.rests = min(max(0.0, heartbeat.next_ms / 1000 - WORK_SECONDS), _MOST_REST_SECONDS)
        self.idle = {ring for ring, count in self.steps.items() if before.get(ring) == count}
        return self.idle != idle

    @property
    def steps(self) -> dict[str, int]:
        """The steps of the node's rings, as it last reported."""
        return {one.ring: one.steps for one in self.heartbeat.rings} if self.heartbeat else {}

    def seen(self) -> None:
        """The node said something."""
        self.last_seen = self._clock()
        self.silent_looks = 0


class SessionListener(Protocol):
    """A part of the coordinator that follows the streams of nodes."""

    def online(self, member: str) -> None:
        """A node's stream is there."""

    def left(self, member: str, *, gone: bool) -> None:
        """A node's stream broke or fell silent; or the node is `gone`: it said goodbye, or was thrown out."""


class Sessions:
    """Every open stream, by member id."""

    def __init__(self, *, clock: Clock = monotonic_clock) -> None:
        self._clock = clock
        self._refused: dict[str, tuple[str, float]] = {}
        self._replaced: dict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=_REPLACED))
        self.listeners: list[SessionListener] = []
        self._open: dict[str, NodeSession] = {}
        self.releases: dict[str, Release] = {}
        """The last that each member ran, also while it is offline."""
        self._arriving: dict[asyncio.Timeout, str] = {}
        self._beat = asyncio.Event()
        self._attended = -math.inf

    def __iter__(self) -> Iterator[NodeSession]:
        return iter(list(self._open.values()))

    @property
    def waiting(self) -> list[str]:
        """The members whose streams have not sent a hello yet."""
        return list(self._arriving.values())

    def find(self, member: str) -> NodeSession | None:
        """The stream of a member, if it is online."""
        return self._open.get(member)

    def refused(self, member: str, why: str) -> None:
        """Notes the reason for refusing a member's stream; `trouble` shows it for a minute."""
        self._refused[member] = (why, self._clock())

    def trouble(self, member: str) -> str:
        """The reason of the last refusal of a member that still tries, else the warning about an online
        one."""
        why, at = self._refused.get(member, ("", 0.0))
        if why and self._clock() - at < _TROUBLE_SECONDS:
            return why
        session = self._open.get(member)
        return session.slow if session is not None else ""

    def is_double(self, member: str, instance: bytes) -> bool:
        """Whether a stream of this process would be a second one beside another process that is online.

        A new process replaces the stream of an older one. If the older process connects again after that,
        both of them run."""
        current = self._open.get(member)
        return (
            current is not None
            and current.instance != instance
            and instance in self._replaced.get(member, ())
        )

    def open(self, session: NodeSession) -> None:
        """Take up a stream; an older one of the same member ends."""
        older = self._open.get(session.member)
        if older is not None:
            if older.instance != session.instance:
                self._replaced[session.member].append(older.instance)
            self.closed(older)
            older.close("replaced by a newer stream")
        self._open[session.member] = session
        self.releases[session.member] = session.release
        for listener in self.listeners:
            listener.online(session.member)

    def closed(self, session: NodeSession) -> None:
        """A stream has ended, or is treated as if it had."""
        if self._open.get(session.member) is not session:
            return
        del self._open[session.member]
        self._beat.set()
        log.info("node_session_ended", member=session.member, goodbye=session.said_goodbye)
        for listener in self.listeners:
            listener.left(session.member, gone=session.said_goodbye)

    @contextmanager
    def arriving(self, member: str, limit: asyncio.Timeout) -> Iterator[None]:
        """A stream that has not sent a hello, within the block. `limit` expires when its member is
        evicted."""
        self._arriving[limit] = member
        try:
            yield
        finally:
            del self._arriving[limit]

    def throw_out(self, member: str, reason: str, error: SealringError) -> None:
        """End a member's streams for good."""
        self.releases.pop(member, None)
        for limit, arriving in self._arriving.items():
            if arriving == member and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        session = self._open.get(member)
        if session is None:
            return
        session.said_goodbye = True
        self.closed(session)
        session.close(reason, error)

    def send(self, member: str, message: CoordinatorMessage) -> None:
        """Send to a member if it is online."""
        session = self._open.get(member)
        if session is not None:
            session.send(message)

    async def watch(self, silence: float) -> None:
        """Ends sessions that are silent for that many seconds. Runs until cancelled.

        Counts looks instead of comparing times: when this process itself stood still (a slow disk, a laptop
        asleep), what nodes have said meanwhile is read before the next look, and nobody is silent for it.
        """
        while True:
            await asyncio.sleep(silence / _LOOKS)
            self.look(silence)

    def look(self, silence: float) -> None:
        """Ends the sessions that have been silent for longer than `silence` and their rest, in looks."""
        for session in self:
            session.silent_looks += 1
            if session.silent_looks > _LOOKS + math.ceil(session.rests * _LOOKS / silence):
                log.warning("node_silent", member=session.member, seconds=silence + session.rests)
                error = Unavailable("no heartbeat came in time", hint="connect again", reason="SILENT")
                self.closed(session)
                session.close("no heartbeat", error)

    def attend(self) -> None:
        """Somebody looks at the cluster: for a while all nodes send heartbeats as often as under work."""
        if self._clock() - self._attended < _ATTEND_SECONDS / 2:
            return
        self._attended = self._clock()
        look = CoordinatorMessage(heard=Heard(look_ms=int(_ATTEND_SECONDS * 1000)))
        for session in self:
            session.send(look)
            if session.rests:
                session.rests = 0.0
                session.silent_looks = min(session.silent_looks, _LOOKS - _HURRY_LOOKS)

    def roster_published(self, roster: StoredRoster) -> None:
        """Sends a new roster to all nodes: the difference to those that have the one before."""
        sent = next((session.roster for session in self._open.values()), b"")
        news = CoordinatorMessage(roster=roster_update(roster.envelope, sent))
        for session in self:
            if session.roster == sent:
                session.roster = roster.envelope
                session.send(news)
            else:
                session.send_roster(roster)

    def beaten(self) -> None:
        """Wakes those that wait for a heartbeat."""
        self._beat.set()

    async def next_beat(self) -> None:
        """Waits for the next heartbeat of any node, or for a stream to end."""
        self._beat.clear()
        await self._beat.wait()

    def close_all(self, reason: str) -> None:
        """Says goodbye on every stream."""
        for session in self:
            session.close(reason)
