"""The Scheduling service: gateways see the roster and the state of every ring, and every change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import structlog

from sealring.coordinator.auth.access import Access
from sealring.coordinator.store import StoredRoster
from sealring.coordinator.streams.outbox import Outbox
from sealring.coordinator.streams.proofs import Proofs
from sealring.mesh.errors import Internal, InvalidInput, SealringError
from sealring.mesh.member.proof import PROOF_SECONDS, Purpose, no_proof
from sealring.mesh.member.tenure import Tenure
from sealring.mesh.pki.certificates import Role
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.rpc.protocol import speaks
from sealring.v1 import membership_pb2_grpc
from sealring.v1.membership_pb2 import AllTold, FollowRequest, RosterUpdate, WatchResponse
from sealring.v1.proof_pb2 import Release

log = structlog.get_logger()


class Watchers:
    """Every open watch, with whose it is."""

    def __init__(self) -> None:
        self._open: dict[Outbox[WatchResponse], str] = {}
        self._troubles: dict[Outbox[WatchResponse], str] = {}
        self.releases: dict[str, Release] = {}
        self._spoken: dict[str, int] = {}
        """The protocol of each ring's epoch."""
        self.on_came: Callable[[], None] = lambda: None

    def add(self, gateway: str, release: Release) -> Outbox[WatchResponse]:
        """A new watch."""
        outbox: Outbox[WatchResponse] = Outbox()
        self._open[outbox] = gateway
        self.releases[gateway] = release
        self.on_came()
        return outbox

    def remove(self, outbox: Outbox[WatchResponse]) -> None:
        """A watch has ended."""
        gateway = self._open.pop(outbox, "")
        self._troubles.pop(outbox, None)
        if not self.watches(gateway):
            self.releases.pop(gateway, None)

    def troubled(self, outbox: Outbox[WatchResponse], what: str) -> None:
        """A gateway says what keeps it from its work; nothing when that is over."""
        self._troubles[outbox] = what

    def trouble(self, gateway: str) -> str:
        """What keeps a gateway that is there from its work: as it says, or a ring whose protocol it lacks."""
        said = (what for outbox, what in self._troubles.items() if self._open.get(outbox) == gateway)
        return next(filter(None, said), "") or self._unspoken(gateway)

    def _unspoken(self, gateway: str) -> str:
        release = self.releases.get(gateway)
        for ring, protocol in sorted(self._spoken.items()):
            if release is not None and protocol and not speaks(protocol, release):
                return f"it does not speak protocol {protocol} of ring {ring}: update the older of the two"
        return ""

    def watches(self, gateway: str) -> bool:
        """Whether a gateway is there."""
        return gateway in self._open.values()

    def tell(self, event: WatchResponse) -> None:
        """Tell every gateway."""
        if event.HasField("ring"):
            self._spoken[event.ring.ring] = event.ring.protocol
        elif event.HasField("gone"):
            self._spoken.pop(event.gone.ring, None)
        for outbox in list(self._open):
            tell(outbox, event)

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


def tell(outbox: Outbox[WatchResponse], event: WatchResponse) -> None:
    """Send an event in place of an older one about the same: a gateway goes by what is now, however many
    rings there are and however slowly it reads. A roster comes before the rings that were formed under it."""
    kind = event.WhichOneof("event")
    if kind == "roster":
        outbox.put_latest("roster", event, first=True)
    elif kind == "all_told":
        outbox.put_latest(kind, event)
    else:
        outbox.put_latest(("ring", getattr(event, str(kind)).ring), event)


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

    async def Follow(  # noqa: N802
        self, requests: AsyncIterator[FollowRequest], context: Any
    ) -> AsyncIterator[WatchResponse]:
        """Role gateway. Raises Unauthenticated (NO_PROOF, BAD_PROOF)."""
        peer = self._access.identify(context, Role.GATEWAY)
        offer = (await _message(requests)).offer
        proof = self._proofs.begin(Purpose.WATCH, peer, context, offer)
        yield WatchResponse(proof=await self._proofs.answer(proof))  # also to who is not enrolled any more
        finish = await _message(requests)
        self._access.require(context, Role.GATEWAY)  # it may have been thrown out meanwhile
        if not finish.HasField("proof"):
            raise no_proof()
        tenure = self._proofs.check(proof, peer, finish.proof)
        outbox = self._watchers.add(peer.id, offer.release)
        log.info("gateway_watching", gateway=peer.id)
        reading = asyncio.create_task(self._read(tenure, requests, outbox))
        try:
            for event in (*self._snapshot(), WatchResponse(all_told=AllTold())):
                tell(outbox, event)
            async for event in outbox.messages():
                yield event
        finally:
            reading.cancel()
            self._watchers.remove(outbox)
            log.info("gateway_gone", gateway=peer.id)

    async def _read(
        self, tenure: Tenure, requests: AsyncIterator[FollowRequest], outbox: Outbox[WatchResponse]
    ) -> None:
        """Takes renewed certificates and troubles until the stream ends; anything else ends it."""
        try:
            async for request in requests:
                if request.HasField("renewal"):
                    tenure.renew(request.renewal)
                elif request.HasField("trouble"):
                    said = request.trouble
                    self._watchers.troubled(outbox, str(from_problem(said)) if said.message else "")
                else:
                    raise InvalidInput("a watch holds a message that is not known here", reason="BAD_MESSAGE")
        except SealringError as error:
            outbox.close(error)
        except Exception:
            log.exception("watch_failed")
            outbox.close(Internal("an internal error", hint="see the coordinator's log"))


async def _message(requests: AsyncIterator[FollowRequest]) -> FollowRequest:
    """The next message; an empty one where none comes in time."""
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            return await anext(requests, FollowRequest())
    except TimeoutError:
        return FollowRequest()
