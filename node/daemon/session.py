"""The node's stream to the coordinator. It is reopened with back-off, and no token waits for it.

An epoch's messages wait in a bounded outbox while the coordinator is away; heartbeats do not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

from sealring.mesh.errors import SealringError
from sealring.mesh.member.coordinators import Coordinators
from sealring.mesh.member.introduction import (
    Introduced,
    Introduction,
    not_believed,
    stream_ended,
    throws_out,
)
from sealring.mesh.roster.difference import whole_roster
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.rpc.reach import Backoff
from sealring.mesh.rpc.silence import ANSWER_SECONDS, Silence
from sealring.mesh.rpc.tls import is_own_cancellation
from sealring.v1 import membership_pb2, membership_pb2_grpc

log = structlog.get_logger()

HEARTBEAT_SECONDS = 2.0
"""Between heartbeats while this node works, or somebody looks at the cluster."""

REST_SECONDS = 5.0
"""Between heartbeats at other times. Each wakes threads in both processes a dozen times."""

_MAX_OUTBOX = 256
_MOST_LOOKED_SECONDS = 60.0
_GOODBYE_SECONDS = 1.0


class Listener(Protocol):
    """The node behind a session."""

    def hello(self) -> membership_pb2.Hello:
        """The first message on a stream. An error keeps the node offline; it is sent as `trouble`."""

    def heartbeat(self) -> membership_pb2.Heartbeat: ...

    async def from_coordinator(self, message: membership_pb2.CoordinatorMessage) -> None:
        """Handles one message. The next one waits meanwhile, so this must be quick."""

    def thrown_out(self) -> None:
        """Called when the authenticated coordinator refuses this node as not enrolled."""


class CoordinatorSession:
    """Keeps `Membership.Session` open until `run` is cancelled."""

    def __init__(
        self,
        coordinators: Coordinators,
        introduction: Introduction,
        listener: Listener,
        *,
        working: Callable[[], bool] = lambda: True,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        """`working` says whether a ring of this node forms or answers; call `stir` when that begins."""
        self._coordinators = coordinators
        self._working = working
        self._heartbeat_seconds = heartbeat_seconds
        self._backoff = backoff
        self.connected = False
        self._introduction = introduction
        self._listener = listener
        self._outbox: deque[membership_pb2.MemberMessage] = deque(maxlen=_MAX_OUTBOX)
        self._lost = 0
        self._renewal: membership_pb2.MemberMessage | None = None  # for the stream that is open
        self._wake = asyncio.Event()
        self._leaving = False
        self._dismissed = False  # the coordinator said goodbye; it reads until this node has ended its side
        self._greeted = False  # a hello was sent on this stream, so a goodbye may follow
        self._left = asyncio.Event()
        self._looked_until = 0.0  # on the event loop's clock
        self._beaten = -math.inf  # when the last heartbeat was sent, on that clock
        self._hears = False  # the coordinator of this stream answers heartbeats

    @property
    def waiting(self) -> tuple[membership_pb2.MemberMessage, ...]:
        """The queued messages."""
        return tuple(self._outbox)

    def send(self, message: membership_pb2.MemberMessage) -> None:
        """Queues a message. A full queue drops its oldest message: a coordinator that asked for it runs into
        its own timeout."""
        if len(self._outbox) == _MAX_OUTBOX:
            self._count_lost(self._outbox[0])
        self._outbox.append(message)
        self._wake.set()

    def _count_lost(self, message: membership_pb2.MemberMessage) -> None:
        self._lost += 1
        if self._lost & (self._lost - 1) == 0:  # 1, 2, 4, 8...: the coordinator may be away for hours
            log.warning("coordinator_message_lost", kind=message.WhichOneof("message"), lost=self._lost)

    def stir(self) -> None:
        """This node may work now: ends a rest."""
        self._wake.set()

    async def run(self) -> None:
        """Connects, exchanges messages, and connects again."""
        await self._coordinators.follow(self._once, self._backoff(), lambda: self._leaving)

    async def goodbye(self, reason: str) -> None:
        """Sends the queue and a goodbye, if a stream is open."""
        self._leaving = True
        self.send(membership_pb2.MemberMessage(goodbye=membership_pb2.Goodbye(reason=reason)))
        if self._greeted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await self._left.wait()

    async def _once(self) -> None:
        beside: list[asyncio.Task[None]] = []
        call: Any = None
        believed = self._dismissed = False
        silence = Silence(lambda: _give_up(call))
        try:
            call = membership_pb2_grpc.MembershipStub(self._coordinators.channel.get()).Session()
            introduced = await self._introduction.exchange(call, membership_pb2.MemberMessage)
            believed = True
            beside.append(asyncio.get_running_loop().create_task(self._renew(introduced)))
            await self._listen(call, silence, beside)
            log.info("coordinator_ended_session")
        except grpc.RpcError as error:
            if throws_out(stream_ended(error)) and believed:
                self._listener.thrown_out()
        except SealringError as error:
            not_believed(error)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            log.info("coordinator_channel_replaced")
        finally:
            for task in reversed(beside):
                task.cancel()
                await asyncio.wait((task,))
                if not task.cancelled() and (failure := task.exception()) is not None:
                    log.error("coordinator_not_told", exc_info=failure)
            self._renewal = None
            silence.heard()
            if call is not None:
                call.cancel()
            self.connected = False
            if self._greeted:
                self._greeted = False
                self._left.set()

    async def _listen(self, call: Any, silence: Silence, beside: list[asyncio.Task[None]]) -> None:
        """Passes messages on until the coordinator ends the stream. `beside` gets the task that writes."""
        writer: asyncio.Task[None] | None = None
        roster = b""
        while (message := await call.read()) is not grpc.aio.EOF:
            silence.heard()
            if message.HasField("roster"):
                roster = whole_roster(message.roster, roster)
                message.roster.CopyFrom(membership_pb2.RosterUpdate(envelope=roster))
            if message.HasField("accepted") and writer is None:
                self._hears = message.accepted.hears
                writer = asyncio.get_running_loop().create_task(self._write(call, silence))
                beside.append(writer)
                writer.add_done_callback(lambda _: None if self._leaving else call.cancel())
            elif message.HasField("heard"):
                self._look(message.heard)
            else:
                await self._hear(message)
            if message.HasField("goodbye"):
                self._dismissed = True
                self._wake.set()

    async def _write(self, call: Any, silence: Silence) -> None:
        """Writes messages until the stream ends. A message leaves the outbox once it is written."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            self._greeted = True
            try:
                hello = self._listener.hello()
            except SealringError as error:
                log.error("node_cannot_come_online", reason=error.reason, why=error.message)
                await call.write(membership_pb2.MemberMessage(trouble=to_problem(error)))
                await self._end_side(call)
                return
            await call.write(membership_pb2.MemberMessage(hello=hello))
            self._beaten = -math.inf
            while True:
                while await self._something_before_heartbeat():
                    await self._write_outbox(call)
                    if self._leaving and (self._dismissed or not self._outbox):
                        await call.done_writing()
                        self._left.set()
                        return
                    if self._dismissed:
                        await self._end_side(call)
                        return
                await self._beat(call, silence)

    @property
    def _interval(self) -> float:
        """Seconds between two heartbeats, as things are."""
        looked_at = asyncio.get_running_loop().time() < self._looked_until
        return self._heartbeat_seconds if looked_at or self._working() else REST_SECONDS

    async def _beat(self, call: Any, silence: Silence) -> None:
        """Sends a heartbeat. A coordinator that does not answer one under work is given up."""
        self._beaten = asyncio.get_running_loop().time()
        heartbeat = self._listener.heartbeat()
        heartbeat.next_ms = int(self._interval * 1000)
        heartbeat.answer = self._hears and self._working()
        if heartbeat.answer and not silence.expecting:
            silence.expect(ANSWER_SECONDS)
        await call.write(membership_pb2.MemberMessage(heartbeat=heartbeat))

    def _look(self, heard: membership_pb2.Heard) -> None:
        """Somebody looks at the cluster, if the message says so."""
        if heard.look_ms:
            until = asyncio.get_running_loop().time() + min(heard.look_ms / 1000, _MOST_LOOKED_SECONDS)
            self._looked_until = max(self._looked_until, until)
            self._wake.set()

    async def _end_side(self, call: Any) -> None:
        """Half-closes the stream; the coordinator then ends it with a reason."""
        await call.done_writing()
        await asyncio.sleep(_GOODBYE_SECONDS)

    async def _renew(self, introduced: Introduced) -> None:
        """Shows each renewed certificate on the stream, which ends otherwise with the one it began with."""
        async for renewal in introduced.renewals():
            self._renewal = membership_pb2.MemberMessage(renewal=renewal)
            self._wake.set()

    async def _write_outbox(self, call: Any) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            await call.write(renewal)
        for _ in range(len(self._outbox)):  # messages queued meanwhile follow the next heartbeat
            if not self._outbox or self._dismissed:
                return
            message = self._outbox[0]
            await call.write(message)
            if self._outbox and self._outbox[0] is message:
                self._outbox.popleft()

    async def _something_before_heartbeat(self) -> bool:
        """Waits for a message to send. False once a heartbeat is due, which may be sooner if a rest ends."""
        while asyncio.get_running_loop().time() < (due := self._beaten + self._interval):
            if self._outbox or self._renewal is not None or self._dismissed:
                return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._wake.wait()
                self._wake.clear()
        return False

    async def _hear(self, message: membership_pb2.CoordinatorMessage) -> None:
        if not self.connected:
            self.connected = True
            log.info("coordinator_answers")
        try:
            await self._listener.from_coordinator(message)
        except SealringError as error:
            kind = message.WhichOneof("message")
            log.warning("coordinator_message_refused", kind=kind, reason=error.reason)


def _give_up(call: Any) -> None:
    log.warning("coordinator_silent", hint="another stream is opened, maybe to another of its addresses")
    call.cancel()
