"""The door for members: their programs ask with a certificate that the coordinator gives each member.

It proves role `client` and the member's id, and gives no other right. The roster in use names the members, so
an eviction ends calls that are under way. A connection outlives its certificate, so each call looks at both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

from sealring.edge.access.gate import Caller, Limits, Shares
from sealring.edge.access.interceptor import Context
from sealring.edge.access.keys import Scope
from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import PermissionDenied, SealringError, Unauthenticated, Unavailable
from sealring.mesh.pki.certificates import Role, expires_at
from sealring.mesh.roster.model import Roster
from sealring.mesh.rpc.running import RunningCalls
from sealring.mesh.rpc.server import INFERENCE
from sealring.mesh.rpc.tls import MAX_CONNECTION_AGE_MILLISECONDS, peer_certificate, peer_identity

LOOK_SECONDS = 1.0

MEMBERS = replace(INFERENCE, age=MAX_CONNECTION_AGE_MILLISECONDS / 1000)
"""The port for members: each connection ends, and with it what an authority of before has vouched for."""


class MemberDoor:
    """Lets in the programs of members. `rosters` gives the newest roster, or None where none is valid."""

    def __init__(
        self,
        cluster: str,
        rosters: Callable[[], Roster | None],
        limits: Limits,
        on_refused: Callable[[str], None] = lambda reason: None,
        *,
        clock: Clock = wall_clock,
    ) -> None:
        self._clock = clock
        self._cluster = cluster
        self._rosters = rosters
        self._shares = Shares(limits, on_refused)
        self._on_refused = on_refused
        self._running = RunningCalls(_not_enrolled)

    @asynccontextmanager
    async def admit(self, context: Context, scopes: Collection[Scope] | None) -> AsyncIterator[Caller]:
        """Lets one call in for the length of the block. All of a member's programs count as one.

        Raises Unauthenticated (NO_CLIENT_CERTIFICATE, OTHER_CLUSTER, CERTIFICATE_EXPIRED), PermissionDenied
        (WRONG_ROLE, NOT_ENROLLED), Unavailable, ResourceExhausted (RATE_LIMITED, TOO_MANY_AT_ONCE).
        """
        with ExitStack() as call:
            try:
                member = self._member(context)
                caller = call.enter_context(self._shares.one(member))
            except SealringError as error:
                self._on_refused(error.reason)
                raise
            call.enter_context(self._running.one(member))
            yield caller

    async def run(self) -> None:
        """Ends the calls of those that are members no more, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            roster = self._rosters()
            for member in set(self._running.callers) if roster is not None else ():
                if not _has(roster, member):
                    self._running.end(member)

    def _member(self, context: Context) -> str:
        peer, roster = peer_identity(context), self._rosters()
        if peer.cluster != self._cluster:
            raise Unauthenticated("caller belongs to another cluster", reason="OTHER_CLUSTER")
        if peer.role != Role.CLIENT:
            raise PermissionDenied(f"a {peer.role} may not ask here", reason="WRONG_ROLE")
        if self._clock() >= expires_at(peer_certificate(context)):
            raise Unauthenticated(
                "the certificate of the caller's programs has ended", reason="CERTIFICATE_EXPIRED"
            )
        if roster is None:
            raise Unavailable("this gateway has no roster that is valid now", hint="start the coordinator")
        if not _has(roster, peer.id):
            raise _not_enrolled()
        return peer.id


def _has(roster: Roster | None, member: str) -> bool:
    return roster is not None and any(one.id == member for one in roster.members)


def _not_enrolled() -> PermissionDenied:
    return PermissionDenied(
        "the caller's machine is no member of this cluster",
        hint="join again: sealring join",
        reason="NOT_ENROLLED",
    )
