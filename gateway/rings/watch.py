"""The gateway's one stream from the coordinator: rosters and ring states, opened anew with back-off.

While the coordinator is away, rings go on until their roster expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
import structlog

from sealring.gateway.rings.rings import Rings
from sealring.mesh.errors import SealringError
from sealring.mesh.member.coordinators import Coordinators
from sealring.mesh.member.introduction import (
    Introduced,
    Introduction,
    not_believed,
    stream_ended,
    throws_out,
    write_first,
)
from sealring.mesh.member.roster_keeper import MAY_PASS, RosterKeeper, removed
from sealring.mesh.names import is_label
from sealring.mesh.roster.model import Roster
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.rpc.reach import Backoff
from sealring.mesh.rpc.silence import ANSWER_SECONDS, Silence
from sealring.mesh.rpc.tls import is_own_cancellation
from sealring.mesh.system.processes import first_of
from sealring.v1 import membership_pb2 as membership
from sealring.v1 import membership_pb2_grpc as membership_grpc

log = structlog.get_logger()

_TICK_SECONDS = 1.0
_BEAT_SECONDS = 2.0
"""Between questions to the coordinator whether it is there, while clients wait for answers."""

_DOOR_SECONDS = 5.0
"""Between looks whether this machine's addresses have changed."""


class Door:
    """The addresses at which others may ask, and those that the coordinator of the stream knows."""

    def __init__(self, addresses: Callable[[], membership.Door]) -> None:
        self._addresses = addresses
        self._told: membership.Door | None = None  # None where the coordinator does not ask
        self._looked = -math.inf

    def asked(self, asked: bool) -> None:
        """Whether the coordinator of this stream, which knows nothing yet, asks for it."""
        self._told, self._looked = membership.Door() if asked else None, -math.inf

    def news(self) -> membership.Door | None:
        """The addresses, if this coordinator asks for them and does not know them; looks seldom."""
        now = asyncio.get_running_loop().time()
        if self._told is None or now < self._looked + _DOOR_SECONDS:
            return None
        self._looked, found = now, self._addresses()
        if found == self._told:
            return None
        self._told = found
        return found


class Watch:
    """Keeps the rings in step with the coordinator."""

    def __init__(
        self,
        coordinators: Coordinators,
        introduction: Introduction,
        keeper: RosterKeeper,
        rings: Rings,
        newer_root: Callable[[], Awaitable[None]],
        door: Callable[[], membership.Door] = membership.Door,
        names: dict[str, str] | None = None,
    ) -> None:
        """`door` says at which addresses this gateway takes questions of others now. `names` is kept to the
        names of the roster's members, by their ids."""
        self._coordinators = coordinators
        self._introduction = introduction
        self._keeper = keeper
        self._rings = rings
        self._newer_root = newer_root
        self._door = Door(door)
        self._names = {} if names is None else names
        self._later = b""  # the newest roster, while it is refused for a reason of MAY_PASS
        self._used: Roster | None = None
        self._told = ""  # the reason of the trouble that the coordinator knows
        self._call: Any = None
        self._hears = False  # the coordinator of this stream answers beats
        self._beaten = -math.inf
        self._silence = Silence(lambda: None)
        self._taking = asyncio.Lock()
        self._writing = asyncio.Lock()  # gRPC takes one write at a time

    async def run(self) -> None:
        """Watches for ever. Raises PermissionDenied (REMOVED) once this gateway is out of the roster."""
        self._serve(self._keeper.lapsed)  # requests may wait for its rings; none can be attached
        self._serve(self._keeper.valid)
        await first_of(self._coordinators.follow(self._once, Backoff()), self._tick())

    async def _once(self) -> None:
        call: Any = None
        tasks: dict[str, asyncio.Task[None]] = {}
        believed = False
        self._silence = silence = Silence(lambda: _give_up(call))
        try:
            call = membership_grpc.SchedulingStub(self._coordinators.channel.get()).Follow()
            introduced = await self._introduction.exchange(call, membership.FollowRequest)
            believed = True
            # the coordinator begins with its newest roster, and knows of no trouble
            self._call, self._later, self._told = call, b"", ""
            self._rings.begin_watch()
            tasks["renew"] = asyncio.create_task(self._renew(introduced))
            tasks["report"] = asyncio.create_task(self._report())
            while (event := await call.read()) is not grpc.aio.EOF:
                silence.heard()
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
            for what, task in tasks.items():
                task.cancel()
                await asyncio.wait((task,))
                if not task.cancelled() and (failure := task.exception()) is not None:
                    log.error("watch_task_failed", task=what, exc_info=failure)
            self._call = None
            self._hears = False
            self._door.asked(False)
            silence.heard()
            self._rings.end_watch()
            if call is not None:
                call.cancel()

    async def _hear(self, event: membership.WatchResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "roster":
            await self._take_roster(event.roster.envelope)
            self._learn(event.roster.names)
        elif kind == "ring":
            self._rings.ring_state(event.ring)
        elif kind == "gone":
            self._rings.ring_gone(event.gone.ring)
        elif kind == "model":
            self._rings.model_state(event.model)
        elif kind == "model_gone":
            self._rings.model_gone(event.model_gone.deployment)
        elif kind == "all_told":
            self._hears = event.all_told.hears
            self._door.asked(event.all_told.doors)
            await self._say_door()
            self._rings.all_told()

    def _learn(self, names: Mapping[str, str]) -> None:
        members = self._used.members if self._used is not None else ()
        found = {one.id: names.get(one.id, "") for one in members}
        self._names.clear()
        self._names |= {one: name for one, name in found.items() if is_label(name)}

    async def _use(self, envelope: bytes) -> membership.Problem:
        """The reason that a roster is refused, or an empty problem. Raises PermissionDenied (REMOVED)."""
        try:
            self._serve(await self._keeper.accept(envelope, self._newer_root))
        except SealringError as error:
            if error.reason == "REMOVED":
                raise
            if not self._later:
                log.error("roster_refused", reason=error.reason)
            return to_problem(error)
        return membership.Problem()

    def _serve(self, roster: Roster | None) -> None:
        if roster is not self._used:
            self._used = roster
            self._rings.use_roster(roster)

    async def _take_roster(self, envelope: bytes = b"") -> None:
        """Uses a roster, or the one that was refused for the moment, and reports to the coordinator what
        keeps this gateway from it, or from the roster that it has."""
        async with self._taking:
            envelope = envelope or self._later
            problem = await self._use(envelope) if envelope else membership.Problem()
            self._later = envelope if problem.reason in MAY_PASS else b""
            self._serve(self._keeper.valid)
            self._rings.clock_ahead = self._keeper.ahead
            if self._used is None and self._keeper.lapses:
                problem = to_problem(self._keeper.lapse())
            elif not self._later:
                problem = membership.Problem()
            if problem.reason != self._told:
                self._told = problem.reason
                await self._say(membership.FollowRequest(trouble=problem))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._rings.tick()
            await self._take_roster()  # its clock may have been set, or its disk may have room
            await self._beat()
            await self._say_door()

    async def _say_door(self) -> None:
        door = self._door.news()
        if door is not None:
            await self._say(membership.FollowRequest(door=door))

    async def _beat(self) -> None:
        """Asks, while clients wait, whether the coordinator is still there; gRPC asks seldom."""
        now = asyncio.get_running_loop().time()
        if not self._hears or not self._rings.asked or now - self._beaten < _BEAT_SECONDS:
            return
        self._beaten = now
        if not self._silence.expecting:
            self._silence.expect(ANSWER_SECONDS)
        await self._say(membership.FollowRequest(beat=membership.Beat()))

    async def _renew(self, introduced: Introduced) -> None:
        """Lets the stream outlive every certificate that this gateway renews."""
        async for renewal in introduced.renewals():
            await self._say(membership.FollowRequest(renewal=renewal))

    async def _report(self) -> None:
        """Reports what clients want of the models on demand, whenever it has changed."""
        sent: membership.Demand | None = None
        while True:
            self._rings.wanted.clear()
            demand = self._rings.demand()
            if demand is not None and demand != sent:
                await self._say(membership.FollowRequest(demand=demand))
                sent = demand
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._rings.wanted.wait()

    async def _say(self, message: membership.FollowRequest) -> None:
        async with self._writing:
            if self._call is not None:
                await write_first(self._call, message)


def _give_up(call: Any) -> None:
    log.warning("coordinator_silent", hint="another stream is opened, maybe to another of its addresses")
    call.cancel()
