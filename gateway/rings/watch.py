"""The gateway's one stream from the coordinator: rosters and ring states, opened anew with back-off.

While the coordinator is away, rings go on until the roster that they stand in expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import structlog

from sealring.gateway.rings.rings import Rings
from sealring.mesh.errors import PermissionDenied, SealringError
from sealring.mesh.member.introduction import (
    Introduced,
    Introduction,
    not_believed,
    stream_ended,
    throws_out,
    write_first,
)
from sealring.mesh.member.roster_keeper import RosterKeeper, removed
from sealring.mesh.rpc.backoff import Backoff
from sealring.mesh.rpc.tls import PeerChannel, is_own_cancellation
from sealring.mesh.system.processes import first_of
from sealring.v1 import membership_pb2 as membership
from sealring.v1 import membership_pb2_grpc as membership_grpc

log = structlog.get_logger()

_TICK_SECONDS = 1.0


class Watch:
    """Keeps the rings in step with the coordinator."""

    def __init__(
        self,
        channel: PeerChannel,
        introduction: Introduction,
        keeper: RosterKeeper,
        rings: Rings,
        newer_root: Callable[[], Awaitable[None]],
    ) -> None:
        self._channel = channel
        self._introduction = introduction
        self._keeper = keeper
        self._rings = rings
        self._newer_root = newer_root

    async def run(self) -> None:
        """Watches for ever. Raises PermissionDenied (REMOVED) once this gateway is out of the roster."""
        self._rings.use_roster(self._keeper.valid)
        await first_of(self._watch(), self._tick())

    async def _watch(self) -> None:
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await self._once()
            await self._channel.pause(backoff.after(loop.time() - started))

    async def _once(self) -> None:
        call: Any = None
        renewing: asyncio.Task[None] | None = None
        believed = False
        try:
            call = membership_grpc.SchedulingStub(self._channel.get()).Follow()
            introduced = await self._introduction.exchange(call, membership.FollowRequest)
            believed = True
            self._rings.begin_watch()
            renewing = asyncio.create_task(_renew(call, introduced))
            while (event := await call.read()) is not grpc.aio.EOF:
                await self._hear(event)
            log.info("coordinator_ended_watch")
        except grpc.RpcError as error:
            if throws_out(stream_ended(error)) and believed:
                raise removed() from None
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            log.info("coordinator_channel_replaced")
        except SealringError as error:
            if believed:
                raise
            not_believed(error)
        finally:
            if renewing is not None:
                renewing.cancel()
                await asyncio.wait((renewing,))
                if not renewing.cancelled() and (failure := renewing.exception()) is not None:
                    log.error("watch_ends_with_certificate", exc_info=failure)
            if call is not None:
                call.cancel()

    async def _hear(self, event: membership.WatchResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "roster":
            try:
                self._rings.use_roster(await self._keeper.accept(event.roster.envelope, self._newer_root))
            except PermissionDenied as error:
                if error.reason == "REMOVED":
                    raise
                log.error("roster_refused", reason=error.reason)
            except SealringError as error:
                log.error("roster_refused", reason=error.reason)
        elif kind == "ring":
            self._rings.ring_state(event.ring)
        elif kind == "gone":
            self._rings.ring_gone(event.gone.ring)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._rings.tick()
            if self._keeper.valid is None:
                self._rings.use_roster(None)


async def _renew(call: Any, introduced: Introduced) -> None:
    """Lets the stream outlive every certificate that this gateway renews."""
    async for renewal in introduced.renewals():
        await write_first(call, membership.FollowRequest(renewal=renewal))
