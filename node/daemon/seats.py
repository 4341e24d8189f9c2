"""All seats of a node, by the names of their rings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import structlog

from sealring.mesh.errors import EpochEnded, FailedPrecondition, SealringError, Unavailable
from sealring.mesh.roster.model import Roster
from sealring.node.daemon.epoch import MemberEpoch, Phase
from sealring.node.daemon.plan import EpochPlan
from sealring.node.daemon.seat import Seat
from sealring.v1 import membership_pb2

log = structlog.get_logger()


class Background:
    """Tasks of one daemon. The log reports each that fails. Use it from one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends or `stop` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def idle(self) -> None:
        """Returns once no task is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # lets the callbacks of the ended tasks run

    async def stop(self) -> None:
        """Cancels every task and waits for its end."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("daemon_task_failed", exc_info=error)


class Seats:
    """Creates a seat when its ring prepares an epoch, and drops it with its weights.

    Use it from one event loop.
    """

    def __init__(self, own_id: str, make: Callable[[str], Seat], background: Background) -> None:
        """`make` creates the seat of the ring that it is given."""
        self.own_id = own_id
        self._make = make
        self._background = background
        self._seats: dict[str, Seat] = {}

    def quiet(self) -> bool:
        """Whether no epoch forms here, and none has had a step lately."""
        return all(seat.quiet for seat in self)

    def __iter__(self) -> Iterator[Seat]:
        return iter(tuple(self._seats.values()))

    def named(self, ring: str, number: int) -> MemberEpoch | None:
        """The ring's newest epoch, if it has this number."""
        seat = self._seats.get(ring)
        return seat.named(number) if seat is not None else None

    def serving(self, ring: str, number: int) -> MemberEpoch:
        """The ring's newest epoch. Raises FailedPrecondition (EPOCH_NOT_SERVING) if it has another number."""
        found = self.named(ring, number)
        if found is None:
            raise FailedPrecondition(
                "this node does not serve that epoch",
                hint="attach to the current epoch",
                reason="EPOCH_NOT_SERVING",
            )
        return found

    def prepare(self, plan: EpochPlan, prepared: membership_pb2.PrepareEpoch) -> None:
        """Starts an epoch in the ring's seat. Raises Conflict (STALE_EPOCH)."""
        seat = self._seats.get(plan.ring) or self._make(plan.ring)
        seat.prepare(plan, prepared)
        self._seats[plan.ring] = seat

    def end(self, ring: str, number: int, reason: str, *, unload: bool) -> None:
        """Ends the ring's newest epoch if it has this number; `unload` frees its weights too."""
        seat, epoch = self._seats.get(ring), self.named(ring, number)
        if seat is None or epoch is None:
            return
        epoch.end(reason)
        if unload:
            self._background.start(self._vacate(seat, epoch))

    def follow(self, roster: Roster) -> None:
        """Ends epochs whose ring, members or gateway the roster no longer names."""
        for seat in self:
            if seat.epoch is not None:
                self._follow(seat, seat.epoch, roster)

    def _follow(self, seat: Seat, epoch: MemberEpoch, roster: Roster) -> None:
        ring = next((one for one in roster.rings_of(self.own_id) if one.id == seat.ring), None)
        gateways = {one.id for one in roster.gateways}
        if ring is None:
            epoch.end("the ring is not in the roster any more")
            self._background.start(self._vacate(seat, epoch))
        elif ring.members != epoch.plan.members:
            epoch.fault(EpochEnded("the ring has other members now", reason="RING_CHANGED"))
        elif epoch.gateway is not None and epoch.gateway.id not in gateways:
            epoch.fault(EpochEnded("the gateway is not in the roster any more", reason="GATEWAY_REMOVED"))
        else:
            epoch.dismiss(gateways, "GATEWAY_REMOVED")

    def fault(self, error: SealringError) -> None:
        """Ends every epoch that has not ended, because of `error`."""
        for seat in self:
            if seat.epoch is not None and seat.phase is not Phase.ENDED:
                seat.epoch.fault(error)

    async def close(self, reason: str) -> None:
        """Ends all epochs because the node stops. Gateways receive `reason`."""
        epochs = [seat.epoch for seat in self if seat.epoch is not None]
        for epoch in epochs:
            if epoch.gateway is not None:
                epoch.gateway.say_goodbye(reason)
            epoch.fault(Unavailable("the node stops", reason="NODE_STOPPING"))
        await asyncio.gather(*(epoch.closed() for epoch in epochs))

    async def _vacate(self, seat: Seat, epoch: MemberEpoch) -> None:
        await seat.vacate(epoch)
        # Another epoch may have started in the seat while its weights were freed.
        if seat.epoch is None and self._seats.get(seat.ring) is seat:
            del self._seats[seat.ring]
