"""The Scheduling service: gateways follow the roster and the state of every ring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog

from sealring.coordinator.auth.access import Access
from sealring.coordinator.rings.driver import ClusterDriver
from sealring.coordinator.rings.views import RingViews
from sealring.coordinator.streams.outbox import Outbox
from sealring.coordinator.streams.proofs import Proofs
from sealring.coordinator.streams.watchers import Watchers, tell
from sealring.mesh.errors import Internal, InvalidInput, SealringError
from sealring.mesh.member.proof import PROOF_SECONDS, Purpose, no_proof
from sealring.mesh.member.tenure import Tenure
from sealring.mesh.pki.certificates import Role
from sealring.mesh.rpc.limits import grpc_peer_host
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.system.networks import hosts_of
from sealring.v1 import membership_pb2_grpc
from sealring.v1.membership_pb2 import AllTold, FollowRequest, Heard, WatchResponse

log = structlog.get_logger()


class SchedulingService(membership_pb2_grpc.SchedulingServicer):
    """Keeps the stream of each gateway, and tells the cluster's machine what gateways report."""

    def __init__(
        self,
        access: Access,
        proofs: Proofs,
        watchers: Watchers,
        driver: ClusterDriver,
        views: RingViews,
    ) -> None:
        self._access = access
        self._proofs = proofs
        self._watchers = watchers
        self._driver = driver
        self._views = views

    async def Follow(  # noqa: N802
        self, requests: AsyncIterator[FollowRequest], context: Any
    ) -> AsyncIterator[WatchResponse]:
        """Role gateway. Raises Unauthenticated (NO_PROOF, BAD_PROOF)."""
        peer = self._access.identify(context, Role.GATEWAY)
        offer = (await _message(requests)).offer
        proof = self._proofs.begin(Purpose.WATCH, peer, context, offer)
        yield WatchResponse(
            proof=await self._proofs.answer(proof)
        )  # also to a gateway that is no longer enrolled
        finish = await _message(requests)
        self._access.require(context, Role.GATEWAY)  # it may have been evicted meanwhile
        if not finish.HasField("proof"):
            raise no_proof()
        tenure = self._proofs.check(proof, peer, finish.proof)
        outbox = self._watchers.add(peer.id, offer.release, hosts_of(grpc_peer_host(context.peer())))
        log.info("gateway_watching", gateway=peer.id)
        reading = asyncio.create_task(self._read(tenure, requests, outbox))
        try:
            self._driver.gateway_came()
            told = WatchResponse(all_told=AllTold(hears=True, doors=True))
            for event in (*self._views.snapshot(), told):
                tell(outbox, event)
            async for event in outbox.messages():
                yield event
        finally:
            reading.cancel()
            self._watchers.remove(outbox)
            self._driver.changed()
            log.info("gateway_gone", gateway=peer.id)

    async def _read(
        self, tenure: Tenure, requests: AsyncIterator[FollowRequest], outbox: Outbox[WatchResponse]
    ) -> None:
        """Takes renewed certificates, troubles and demands until the stream ends; anything else ends it."""
        try:
            async for request in requests:
                if request.HasField("renewal"):
                    tenure.renew(request.renewal)
                elif request.HasField("trouble"):
                    said = request.trouble
                    self._watchers.troubled(outbox, str(from_problem(said)) if said.message else "")
                elif request.HasField("demand"):
                    self._watchers.demanded(outbox, request.demand)
                    self._driver.changed()
                elif request.HasField("door"):
                    self._watchers.opened(outbox, request.door)
                elif request.HasField("beat"):
                    outbox.put_latest(Heard, WatchResponse(heard=Heard()))
                else:
                    raise InvalidInput("a watch holds a message that is not known here", reason="BAD_MESSAGE")
        except SealringError as error:
            outbox.close(error)
        except Exception:
            log.exception("watch_failed")
            outbox.close(Internal("an internal error", hint="see the coordinator's log"))


async def _message(requests: AsyncIterator[FollowRequest]) -> FollowRequest:
    """The next message, or an empty one after the timeout."""
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            return await anext(requests, FollowRequest())
    except TimeoutError:
        return FollowRequest()
