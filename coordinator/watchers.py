"""The Scheduling service: gateways see the roster and the state of every ring, and every change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import structlog

from coordinator.access import Access
from coordinator.outbox import Outbox
from coordinator.proofs import Proofs
from coordinator.store import StoredRoster
from mesh.certificates import Role
from mesh.errors import SealringError
from mesh.proof import PROOF_SECONDS, Purpose, no_proof
from sealring.v1 import membership_pb2_grpc
from sealring.v1.membership_pb2 import FollowRequest, RosterUpdate, WatchRequest, WatchResponse

log = structlog.get_logger()


class Watchers:
    """Every open watch, with whose it is."""

    def __init__(self) -> None:
        self._open: dict[Outbox[WatchResponse], str] = {}

    def add(self, gateway: str) -> Outbox[WatchResponse]:
        """A new watch."""
        outbox: Outbox[WatchResponse] = Outbox()
        self._open[outbox] = gateway
        return outbox

    def remove(self, outbox: Outbox[WatchResponse]) -> None:
        """A watch has ended."""
        self._open.pop(outbox, None)

    def tell(self, event: WatchResponse) -> None:
        """Tell every gateway."""
        for outbox in list(self._open):
            outbox.put(event)

    def roster_published(self, roster: StoredRoster) -> None:
        """Tell every gateway of a new roster."""
        self.tell(roster_event(roster))

    def throw_out(self, gateway: str, error: SealringError) -> None:
        """End the watches of a gateway for good."""
        for outbox, owner in list(self._open.items()):
            if owner == gateway:
                outbox.close(error)

    def close_all(self) -> None:
        """End every watch."""
        for outbox in list(self._open):
            outbox.close()


def roster_event(roster: StoredRoster) -> WatchResponse:
    """A roster as gateways see it."""
    return WatchResponse(roster=RosterUpdate(envelope=roster.envelope))


class SchedulingService(membership_pb2_grpc.SchedulingServicer):
    """`snapshot` gives what a new watcher is told first."""

    def __init__(
        self,
        access: Access,
        proofs: Proofs,
        watchers: Watchers,
        snapshot: Callable[[], Iterable[WatchResponse]],
    ) -> None:
        self._access = access
        self._proofs = proofs
        self._watchers = watchers
        self._snapshot = snapshot

    def Watch(self, request: WatchRequest, context: Any) -> AsyncIterator[WatchResponse]:  # noqa: N802
        """Not served: it has no place for a proof. Raises Unauthenticated (NO_PROOF)."""
        raise no_proof()

    async def Follow(  # noqa: N802
        self, requests: AsyncIterator[FollowRequest], context: Any
    ) -> AsyncIterator[WatchResponse]:
        """Role gateway. Raises Unauthenticated (NO_PROOF, BAD_PROOF)."""
        peer = self._access.identify(context, Role.GATEWAY)
        proof = self._proofs.begin(Purpose.WATCH, peer, context, (await _message(requests)).offer)
        yield WatchResponse(proof=await self._proofs.answer(proof))  # also to who is not enrolled any more
        finish = await _message(requests)
        self._access.require(context, Role.GATEWAY)  # it may have been thrown out meanwhile
        if not finish.HasField("proof"):
            raise no_proof()
        self._proofs.check(proof, peer, finish.proof)
        outbox = self._watchers.add(peer.id)
        log.info("gateway_watching", gateway=peer.id)
        try:
            for event in self._snapshot():
                outbox.put(event)
            async for event in outbox.messages():
                yield event
        finally:
            self._watchers.remove(outbox)
            log.info("gateway_gone", gateway=peer.id)


async def _message(requests: AsyncIterator[FollowRequest]) -> FollowRequest:
    """The next message; an empty one where none comes in time."""
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            return await anext(requests, FollowRequest())
    except TimeoutError:
        return FollowRequest()
