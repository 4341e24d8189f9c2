"""Has nodes measure the links between them while no ring answers: at joining, on change, and every hour."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import combinations

import structlog

from sealring.coordinator.nodes.links import Links
from sealring.coordinator.nodes.questions import Questions
from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.state import State
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import SealringError
from sealring.v1 import membership_pb2

log = structlog.get_logger()

FRESH_SECONDS = 3600.0
"""A pair is measured again after this time. Policy: some MiB an hour for each pair."""

AGAIN_SECONDS = 600.0
"""A pair that found no way is tried again after this time, from its other end."""

MOST_NODES = 64
"""Nodes whose pairs are measured: an hour is enough for their 2,016 pairs."""

LATER_SECONDS = 60.0
"""A pair of which one is at work, or was measured a moment ago, is asked again after this time."""

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 60.0
_BUSY = ("RING_BUSY", "MEASURED_LATELY")
_NO_WAY = ("NO_WAY", "PEER_UNREACHABLE")


class LinkSurvey:
    """Has pairs measure their links: one pair at a time, and only while no ring answers or forms.

    A pair is due when its second member comes, when one of the two has other addresses than at the last
    time, and an hour after that.
    """

    def __init__(
        self,
        links: Links,
        sessions: Sessions,
        questions: Questions,
        state: State,
        addresses: Callable[[str], Collection[str]],
        *,
        clock: Clock = monotonic_clock,
    ) -> None:
        """`addresses` returns those of a member by the newest roster, which change once a minute at most."""
        self._addresses_of = addresses
        self._links = links
        self._sessions = sessions
        self._questions = questions
        self._state = state
        self._clock = clock
        self._next: dict[frozenset[str], _Next] = {}
        self._places: dict[str, frozenset[str]] = {}
        self._none_before = -math.inf  # no pair is due before, as long as nodes and `_places` stay

    async def run(self) -> None:
        """Looks after heartbeats, once a second at most: they say whether rings are quiet. Never returns."""
        while True:
            await self._sessions.next_beat()
            await self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Has the pair measure that is due and has waited longest, if it is quiet."""
        pair = self._due() if self._quiet() else None
        if pair is not None:
            await self._measure(*pair)

    def _quiet(self) -> bool:
        """Whether no ring answers or forms, and no node fetches a model.

        A ring that waits for a member that is away does neither.
        """
        for running in self._state.running.values():
            if running.machine.phase in (Phase.PREPARING, Phase.COMMITTING):
                return False
        for session in self._sessions:
            if session.heartbeat is None or session.idle != session.steps.keys():
                return False
            if any(one.coming for one in session.heartbeat.models):
                return False
        return True

    def _due(self) -> tuple[NodeSession, NodeSession] | None:
        """The pair that is due the longest; the one that was called last time calls."""
        able = sorted((one for one in self._sessions if one.measures), key=lambda one: one.member)
        able = able[:MOST_NODES]
        places = {one.member: frozenset(self._addresses_of(one.member)) for one in able}
        if places == self._places and self._clock() < self._none_before:
            return None
        pairs = {frozenset((one.member, other.member)): (one, other) for one, other in combinations(able, 2)}
        self._next = {pair: following for pair, following in self._next.items() if pair in pairs}
        due = []
        for pair, (one, other) in pairs.items():
            last = self._next.get(pair, _Next(-math.inf, frozenset(), other.member))
            if last.at <= self._clock() or last.addresses != places[one.member] | places[other.member]:
                due.append((last.at, *((other, one) if last.caller == one.member else (one, other))))
        found = min(due, key=lambda each: each[0], default=None)
        self._places = places
        self._none_before = -math.inf
        if found is None:
            self._none_before = min((each.at for each in self._next.values()), default=math.inf)
        return found and found[1:]

    async def _measure(self, caller: NodeSession, called: NodeSession) -> None:
        question = membership_pb2.MeasureQuestion(member=called.member)
        addresses = self._addresses(caller, called)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await self._questions.ask(caller.member, question, membership_pb2.MeasureAnswer)
            seconds = self._take(caller.member, called.member, answer)
        except (SealringError, TimeoutError):  # it went, or stands still
            seconds = AGAIN_SECONDS
        pair = frozenset((caller.member, called.member))
        self._next[pair] = _Next(self._clock() + seconds, addresses, caller.member)

    def _addresses(self, *sessions: NodeSession) -> frozenset[str]:
        return frozenset(address for one in sessions for address in self._addresses_of(one.member))

    def _take(self, caller: str, called: str, answer: membership_pb2.MeasureAnswer) -> float:
        """Notes an answer; the seconds until the pair is measured again."""
        if not answer.HasField("problem"):
            way = answer.way
            self._links.note(caller, called, way.address, way.round_trip_us, way.bytes_per_second)
            return FRESH_SECONDS
        reason = answer.problem.reason
        log.info("link_not_measured", caller=caller, called=called, why=reason[:64])
        if reason in _NO_WAY:
            self._links.failed(caller, called)
        return LATER_SECONDS if reason in _BUSY else AGAIN_SECONDS


@dataclass(frozen=True)
class _Next:
    """When a pair is due, the addresses of both when they were asked last, and which of them was asked."""

    at: float
    addresses: frozenset[str]
    caller: str
