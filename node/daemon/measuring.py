"""Measures the ways to other members while no ring answers, as a carrier does when an epoch forms.

The member that is measured opens a port for one call, and gives its caller the tag with which a connection
there has to begin, over mTLS. Nothing but zeros travels. Both ends refuse while a ring of theirs forms or
answers, and the one that measures stops when one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import (
    FailedPrecondition,
    HandshakeError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from sealring.mesh.pki.certificates import PeerIdentity, Role
from sealring.mesh.roster.model import Roster
from sealring.mesh.rpc.reach import Reach
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import TlsStore
from sealring.mesh.system.addresses import format_address, parse_address
from sealring.node.carrier.neighbours import PASS_BYTES, Reception
from sealring.node.carrier.ways import TAG_BYTES, Measured, Way, measure, probe_tag
from sealring.node.daemon.carrier_process import ways_to
from sealring.node.daemon.link_setup import listen_for_neighbour, ring_addresses
from sealring.node.models.giving import member_of
from sealring.v1 import links_pb2, links_pb2_grpc, membership_pb2

SERVICE = links_pb2.DESCRIPTOR.services_by_name["Ways"].full_name

CALLER_SECONDS = 60.0
"""A member is measured by the same caller no more often. Policy: no pair's addresses change more often in the
roster, and a caller can send 32 MiB over each of 64 connections."""

_PORT_SECONDS = 20.0
_MEASURE_SECONDS = 5.0
_REASON_SECONDS = 1.0
_MORE = 2


class Measuring(links_pb2_grpc.WaysServicer):
    """Both roles of one daemon. Use it from one event loop."""

    def __init__(
        self,
        cluster: str,
        store: TlsStore,
        ring_host: str,
        roster: Callable[[], Roster | None],
        quiet: Callable[[], bool],
        *,
        everywhere: bool,
        clock: Clock = monotonic_clock,
    ) -> None:
        """`quiet` says whether no ring of this node forms or answers; it is called from threads too.

        Without `everywhere` only `ring_host` is measured.
        """
        self._cluster = cluster
        self._reach = Reach(store)
        self._ring_host = ring_host
        self._everywhere = everywhere
        self._roster = roster
        self._quiet = quiet
        self._clock = clock
        self._busy = False
        self._called: dict[str, float] = {}

    async def measure(self, member: str) -> membership_pb2.MeasuredWay:
        """The fastest way to another member.

        Raises FailedPrecondition (RING_BUSY), NotFound (UNKNOWN_NODE), Unavailable (PEER_UNREACHABLE,
        NO_WAY), and what the member answers.
        """
        roster = self._roster()
        peer = next((one for one in roster.members if one.id == member), None) if roster else None
        if peer is None:
            raise NotFound("the roster has no such member", reason="UNKNOWN_NODE")
        self._require_quiet()
        channel = await self._reach.connect(PeerIdentity(self._cluster, Role.MEMBER, member), peer.addresses)
        try:
            call = links_pb2_grpc.WaysStub(channel.get()).Measure(
                links_pb2.MeasureRequest(), timeout=_PORT_SECONDS
            )
            try:
                answer: Any = await call.read()
                if answer is grpc.aio.EOF or len(answer.tag) != TAG_BYTES:
                    raise HandshakeError("the member's answer is malformed", reason="BAD_ANSWER")
                found = await self._over(ring_addresses(",".join(answer.addresses).encode()), answer.tag)
                if found is None:  # the other end may have stopped, and says why then
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_REASON_SECONDS):
                            await call.read()
            finally:
                call.cancel()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            await channel.close()
        self._require_quiet()  # else the ring slowed it down
        if found is None:
            raise Unavailable("no way to that member was found", reason="NO_WAY")
        return membership_pb2.MeasuredWay(
            address=format_address(*found.way.address),
            round_trip_us=round(1e6 * found.round_trip),
            bytes_per_second=round(found.rate),
        )

    async def _over(self, addresses: str, tag: bytes) -> Measured | None:
        """The fastest way to these addresses; as far as it was measured before a ring began."""
        ways = [Way(parse_address(one.address), one.source) for one in ways_to(addresses.split(","))]
        deadline = time.monotonic() + _MEASURE_SECONDS
        over = threading.Event()

        def until() -> float:
            return deadline if self._quiet() and not over.is_set() else 0.0

        try:
            return await asyncio.to_thread(_fastest, ways, tag, until)
        finally:
            over.set()

    async def Measure(  # noqa: N802
        self, request: links_pb2.MeasureRequest, context: Any
    ) -> AsyncIterator[links_pb2.MeasureResponse]:
        """Raises PermissionDenied (NOT_A_MEMBER), FailedPrecondition (RING_BUSY), ResourceExhausted
        (MEASURED_LATELY), ConfigError (CANNOT_LISTEN)."""
        self._admit(member_of(context, self._cluster, self._roster()))
        listener, addresses = listen_for_neighbour(self._ring_host, everywhere=self._everywhere)
        link_pass = secrets.token_bytes(PASS_BYTES)  # of which nobody else learns more than the tag
        until = time.monotonic() + _PORT_SECONDS
        over = threading.Event()
        reception = Reception(listener, link_pass, lambda record: None)

        def going() -> bool:
            return not over.is_set() and time.monotonic() < until and self._quiet()

        self._busy = True
        answering = asyncio.get_running_loop().run_in_executor(None, reception.answer_probes, going)
        try:
            yield links_pb2.MeasureResponse(addresses=addresses.split(","), tag=probe_tag(link_pass))
            await asyncio.shield(answering)
            self._require_quiet()
        finally:
            over.set()
            self._busy = False
            answering.add_done_callback(lambda _: listener.close())

    def _admit(self, caller: str) -> None:
        roster, now = self._roster(), self._clock()
        known = {one.id for one in roster.members} if roster is not None else set()
        self._require_quiet()
        if self._busy or now - self._called.get(caller, -CALLER_SECONDS) < CALLER_SECONDS:
            raise ResourceExhausted("the ways to this node are being measured", reason="MEASURED_LATELY")
        self._called = {one: at for one, at in self._called.items() if one in known} | {caller: now}

    def _require_quiet(self) -> None:
        if not self._quiet():
            raise FailedPrecondition("a ring of this node is at work", reason="RING_BUSY")


def _fastest(ways: Sequence[Way], tag: bytes, until: Callable[[], float]) -> Measured | None:
    """The fastest way, which is measured a few times more: plans compare it with those of other pairs."""
    best = next(iter(measure(ways, tag, until)), None)
    for _ in range(_MORE):
        if best is not None and time.monotonic() < until():
            for one in measure([best.way], tag, until):
                best = Measured(best.way, min(best.round_trip, one.round_trip), max(best.rate, one.rate))
    return best
