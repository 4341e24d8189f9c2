"""The Control service: passes a gateway's steps to the engine and the engine's answers back.

About 300 steps pass in a second, so messages are not built anew if only their frame changes. ScheduleRequest
and EngineCommand hold the same inner message under two field numbers, as do EngineEvent and ScheduleResponse:
only the first byte is exchanged. Requests are parsed all the same (1 us), so that malformed bytes end an
epoch and not an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.errors import (
    DeadlineExceeded,
    EpochEnded,
    InvalidInput,
    PermissionDenied,
    ResourceExhausted,
    SealringError,
)
from sealring.mesh.member.proof import CalledProof, Connection, Credentials, Purpose, no_proof, of_identity
from sealring.mesh.member.tenure import Tenure
from sealring.mesh.pki.certificates import Role, key_hash
from sealring.mesh.ring.composition import MAX_CHANGES, MAX_CHOICES
from sealring.mesh.ring.prefix_names import MAX_CHAIN_BYTES, clear_scope, sealed_scope
from sealring.mesh.roster.rules import links_in_clear
from sealring.mesh.rpc import protocol12
from sealring.mesh.rpc.pieces import MAX_WHOLE, Joiner, Outgoing
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.rpc.silence import ANSWER_SECONDS, Silence
from sealring.mesh.rpc.tls import peer_certificate, peer_identity
from sealring.mesh.system.power import power
from sealring.node.daemon.epoch import MemberEpoch
from sealring.node.daemon.receipts import ReceiptKey, ReceiptRows
from sealring.node.daemon.sealed_rows import SealedReply, SealedRows, Unsealer
from sealring.v1 import control_pb2, engine_pb2, membership_pb2

log = structlog.get_logger()

SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
ATTACH_SECONDS = 10.0
MAX_WAITING_BYTES = 2 * MAX_WHOLE
"""Unread bytes of a gateway before the epoch ends: twice the largest message. Messages of guests are passed
on to it while it has less than half of that to read."""

MAX_GUEST_BYTES = 8 << 20
"""Unread bytes of each of 16 guests before its stream ends."""

MAX_TAKEN_BACK = 4096
"""Requests that one guest takes back while the scheduling gateway is behind. That one holds half as many of
all guests (gateway.rings.served.MOST_ASKED). More end the guest's stream, which cancels all that it sent."""

_MESSAGE_BYTES = 128
"""Estimated memory of a queued message beside its own bytes."""

MAX_CLIENT_BYTES = 32

_REQUEST_STEP = b"\x22"
_COMMAND_STEP, _COMMAND_DISCARD, _COMMAND_RECALL = b"\x3a", b"\x32", b"\x62"
"""EngineCommand.step (7), .discard (6) and .recall (12); ScheduleRequest has them as 4, 3 and 12."""

_OF_GUESTS = ("forward", "ping", "renewal", "goodbye")
"""Messages of a gateway's stream while another gateway schedules the ring."""

_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,39}")

_RESPONSE_OF_EVENT = {0x32: b"\x12", 0x3A: b"\x1a", 0x42: b"\x22", 0x7A: b"\x5a"}
"""EngineEvent.opened (6) -> ScheduleResponse.opened (2); .refused (7) -> (3); .done (8) -> (4);
.recalled (15) -> (11)."""


class Schedules(Protocol):
    """The parts of the daemon that the service uses."""

    def gateway_key(self, cluster: str, identifier: str) -> bytes:
        """The gateway's identity key. Raises PermissionDenied unless the roster in use lets it schedule."""

    def authorities(self) -> tuple[bytes, ...]:
        """The certificates of the valid authorities, DER."""

    @property
    def identity(self) -> Credentials:
        """This member's credentials, which sign its proof."""

    def serving_epoch(self, ring: str, epoch: int) -> MemberEpoch:
        """Raises FailedPrecondition (EPOCH_NOT_SERVING)."""

    @property
    def unsealer(self) -> Unsealer:
        """Opens sealed prompts."""

    @property
    def receipt_key(self) -> ReceiptKey:
        """Signs receipts."""


def reframe(message: bytes, tag: bytes) -> bytes:
    """The one inner message of `message` under another field number, byte for byte.

    Raises InvalidInput (BAD_MESSAGE) unless the first field is the only one: further ones would pass as
    fields of the engine's own protocol.
    """
    length, shift, position = 0, 0, 1
    while position < len(message) and shift < 35:
        byte = message[position]
        position += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if position + length == len(message):
                return tag + message[1:]
            break
    raise InvalidInput("a schedule message is malformed", reason="BAD_MESSAGE")


class GatewayStream:
    """One gateway's stream: in to the engine, out to the gateway. Belongs to one epoch.

    A guest's stream leads to the scheduling gateway instead, whose answers come back on it.
    """

    def __init__(
        self,
        identifier: str,
        epoch: MemberEpoch,
        unsealer: Unsealer,
        tenure: Tenure,
        receipt_key: ReceiptKey,
        max_waiting: int = MAX_WAITING_BYTES,
        max_guest: int = MAX_GUEST_BYTES,
    ) -> None:
        self.id = identifier
        self.used = False
        self.guest = 0
        self.goodbye = ""
        self._unsealer = unsealer
        self._tenure = tenure
        self._max_waiting = max_waiting
        self._max_guest = max_guest
        self._sealed = SealedRows()
        self._receipts = ReceiptRows(receipt_key, epoch.plan, epoch.signed_once, self._send_receipt)
        self._epoch = epoch
        self._head = epoch.plan.rank == 0
        self._waiting = Outgoing(lambda piece: control_pb2.ScheduleResponse(piece=piece).SerializeToString())
        self._joiner = Joiner()
        self._unread = 0  # bytes of what waits
        self._wake = asyncio.Event()
        self._ended = False
        self._taken_back: dict[int, dict[int, None]] = {}  # by guest, while this gateway is behind
        self._looking: asyncio.Task[None] | None = None
        self._silence = Silence(self._gateway_silent)
        self._writing: asyncio.Timeout | None = None
        self._over = False
        self._handlers: dict[str, Callable[[control_pb2.ScheduleRequest, bytes], None]] = {
            "step": self._step,
            "ping": self._ping,
            "recall": self._recall,
            "forward": self._forward,
            "renewal": self._renew,
            "goodbye": self._leave,
        }
        if self._head:
            self._handlers |= {"discard": self._discard, "open": self._open, "forwarded": self._forwarded}
        else:
            self._handlers["sign"] = self._sign

    def row_event(self, event: bytes) -> None:
        """Queues an engine's event of a row or step."""
        try:
            event = self._sealed.seal(event)
        except SealringError as error:
            self._epoch.fault(error)
            return
        if self._epoch.plan.protocol == protocol12.PROTOCOL:
            event = protocol12.say_as_12(event)
        self._put(_RESPONSE_OF_EVENT[event[0]] + event[1:])

    def row_digests(self, digests: engine_pb2.RowDigests) -> None:
        """Has a row's receipt signed."""
        self._receipts.ended(digests)

    def _send_receipt(self, receipt: control_pb2.RowReceipt) -> None:
        self._put(control_pb2.ScheduleResponse(receipt=receipt).SerializeToString())

    def epoch_over(self, problem: membership_pb2.Problem) -> None:
        """Queues the fault as the stream's last message."""
        plan = self._epoch.plan
        fault = membership_pb2.EpochFault(ring=plan.ring, epoch=plan.epoch, problem=problem)
        self._finish(control_pb2.ScheduleResponse(fault=fault))

    @property
    def behind(self) -> bool:
        """Whether the gateway has much unread."""
        return self._unread > self._max_waiting // 2

    def close(self) -> None:
        """Stops answering pings and signing receipts."""
        self._receipts.close()
        self._silence.heard()
        if self._looking is not None:
            self._looking.cancel()

    def say_goodbye(self, reason: str) -> None:
        """Queues a goodbye as the stream's last message."""
        self._finish(control_pb2.ScheduleResponse(goodbye=membership_pb2.Goodbye(reason=reason)))

    def pass_on(self, **message: Any) -> None:
        """Queues a message from another gateway's stream. A cancellation does not overtake its request."""
        passed = control_pb2.ScheduleResponse(**message)
        self._put(passed.SerializeToString(), long=passed.HasField("forward"))

    def guest_left(self, guest: int) -> None:
        """Cancels the requests that a guest has forwarded."""
        self._taken_back.pop(guest, None)
        self.pass_on(forward=control_pb2.Forward(guest=guest, cancel=True))

    def take_back(self, guest: int, number: int) -> None:
        """Cancels a request that a guest has forwarded, once this gateway is not behind.

        Raises ResourceExhausted (GUEST_TOO_FAST) for more than MAX_TAKEN_BACK that wait.
        """
        waiting = self._taken_back.setdefault(guest, {})
        waiting[number] = None
        if len(waiting) > MAX_TAKEN_BACK:
            raise ResourceExhausted("a guest takes back too many requests", reason="GUEST_TOO_FAST")
        self._pass_on_taken_back()

    def _pass_on_taken_back(self) -> None:
        while self._taken_back and not self.behind:
            guest, numbers = next(iter(self._taken_back.items()))
            if numbers:
                self.pass_on(
                    forward=control_pb2.Forward(guest=guest, number=numbers.popitem()[0], cancel=True)
                )
            else:
                del self._taken_back[guest]

    async def answer(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes everything that is queued, until the stream is finished or its gateway silent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as self._writing:
                await self._write_all(write)

    async def _write_all(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            while self._waiting:
                message, written = self._waiting.take()
                await write(message)
                if written is not None:
                    written()
            if self._ended:
                return
            self._wake.clear()
            await self._wake.wait()

    def _written(self, size: int) -> None:
        self._unread -= size
        self._pass_on_taken_back()

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Takes requests until the gateway ends its stream. An invalid one ends the epoch; one of a guest
        ends only the guest's stream."""
        try:
            async for request in requests:
                if request[:1] == _REQUEST_STEP:
                    await self._epoch.gate.pass_step()
                if not self.take(request):
                    break
                engine = self._epoch.engine
                if engine is not None:
                    await engine.drained()
        except Exception as error:
            if self.guest:
                log.warning("guest_refused", gateway=self.id, error=type(error).__name__)
            else:
                self._epoch.fault(error)
        self._end()

    def _end(self) -> None:
        """Has `answer` return once what waits is written, but for what has to go in pieces."""
        self._waiting.shorten()
        self._ended = True
        self._wake.set()

    def take(self, request: bytes) -> bool:
        """Handles one request; False if it is the last one."""
        message = self._whole(parse_request(request))
        if message is None:
            return True
        what = message.WhichOneof("message") or ""
        if self.guest and what not in _OF_GUESTS:
            raise InvalidInput("a guest may only forward", reason="BAD_MESSAGE")
        handler = self._handlers.get(what)
        if handler is None or (what == "forward" and not self.guest):
            raise InvalidInput("a schedule message is not allowed here", reason="BAD_MESSAGE")
        handler(message, request)
        return what != "goodbye"

    def _whole(self, message: control_pb2.ScheduleRequest) -> control_pb2.ScheduleRequest | None:
        """A message that came in one piece, or whose last piece this is; None before that."""
        if not self._head or not message.HasField("piece"):
            return message
        whole = self._joiner.add(message.piece)
        if whole is None:
            return None
        message = parse_request(whole)
        if message.WhichOneof("message") not in ("open", "forward"):
            raise InvalidInput("only prompts come in pieces", reason="BAD_MESSAGE")
        return message

    def _step(self, message: control_pb2.ScheduleRequest, request: bytes) -> None:
        if len(message.step.changes) > MAX_CHANGES:
            raise InvalidInput("a step has too many changes", reason="BAD_MESSAGE")
        self._sealed.evict(message.step)
        self._work(reframe(request, _COMMAND_STEP))
        self._epoch.gate.passed(message.step.number)

    def _discard(self, message: control_pb2.ScheduleRequest, request: bytes) -> None:
        self._sealed.discard(message.discard.row)
        self._receipts.forget(message.discard.row)
        self._work(reframe(request, _COMMAND_DISCARD))

    def _ping(self, message: control_pb2.ScheduleRequest, _: bytes) -> None:
        if message.ping.next_ms and not self._over:
            self._silence.expect(message.ping.next_ms / 1000 + ANSWER_SECONDS)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._pong(message.ping))

    def _recall(self, message: control_pb2.ScheduleRequest, request: bytes) -> None:
        if len(message.recall.chain) > MAX_CHAIN_BYTES:
            raise InvalidInput("a recall has too many names", reason="BAD_MESSAGE")
        self._work(reframe(request, _COMMAND_RECALL))

    def _sign(self, message: control_pb2.ScheduleRequest, _: bytes) -> None:
        self._work(engine_pb2.EngineCommand(sign=message.sign).SerializeToString())

    def _forwarded(self, message: control_pb2.ScheduleRequest, _: bytes) -> None:
        guest = self._epoch.guests.get(message.forwarded.guest)
        if guest is not None:
            guest.pass_on(forwarded=message.forwarded)

    def _renew(self, message: control_pb2.ScheduleRequest, _: bytes) -> None:
        self._tenure.renew(message.renewal)

    def _leave(self, message: control_pb2.ScheduleRequest, _: bytes) -> None:
        reason = message.goodbye.reason
        self.goodbye = reason if _REASON.fullmatch(reason) else "UNKNOWN"

    def _gateway_silent(self) -> None:
        """Ends the stream of a gateway that stands still or is gone, as gRPC ends one whose pings fail."""
        log.warning("gateway_silent", gateway=self.id)
        if self._writing is not None:
            self._writing.reschedule(asyncio.get_running_loop().time())

    def _work(self, command: bytes) -> None:
        engine = self._epoch.engine
        if engine is None:
            raise EpochEnded("the epoch is over")
        self.used = True
        engine.send_work(command)

    def _forward(self, message: control_pb2.ScheduleRequest, _: bytes) -> None:
        """Passes a request to the scheduling gateway; refuses it if that is gone or behind."""
        forward = message.forward
        scheduler, forward.guest = self._epoch.gateway, self.guest
        if scheduler is not None and forward.cancel:
            scheduler.take_back(self.guest, forward.number)
        elif scheduler is not None and not scheduler.behind:
            scheduler.pass_on(forward=forward)
        elif not forward.cancel:
            error = ResourceExhausted("the gateway that schedules is behind", reason="QUEUE_FULL")
            refused = control_pb2.Forwarded(number=forward.number, problem=to_problem(error))
            self.pass_on(forwarded=refused)

    def _open(self, message: control_pb2.ScheduleRequest, _: bytes) -> None:
        open_row = message.open
        self._sealed.check(open_row.row, open_row.choices or 1)
        reply = None
        try:
            command, reply = self._command(open_row)
            self._sealed.add(open_row.row, reply, open_row.choices or 1)
        except SealringError as error:
            if reply is not None:
                reply.unclaim()
            refused = control_pb2.RowRefused(row=open_row.row, problem=to_problem(error))
            self._put(control_pb2.ScheduleResponse(refused=refused).SerializeToString())
            return
        self._work(engine_pb2.EngineCommand(open_row=command).SerializeToString())

    def _command(self, open_row: control_pb2.OpenRow) -> tuple[engine_pb2.OpenEngineRow, SealedReply | None]:
        if open_row.deployment != self._epoch.plan.deployment:
            raise InvalidInput("the request is for another deployment", reason="WRONG_DEPLOYMENT")
        content = open_row.envelope.WhichOneof("content")
        if content is None:
            raise InvalidInput("the envelope is empty", reason="EMPTY_ENVELOPE")
        if content == "sealed" and self._epoch.plan.backend:  # gateways refuse it too; one may be faulty
            raise links_in_clear(self._epoch.plan.deployment)
        if open_row.choices > MAX_CHOICES:
            raise InvalidInput(f"more than {MAX_CHOICES} choices", reason="BAD_CHOICES", param="n")
        command = engine_pb2.OpenEngineRow(
            row=open_row.row,
            max_tokens=open_row.max_tokens,
            choices=open_row.choices,
            client=open_row.client[:MAX_CLIENT_BYTES],
        )
        if content == "clear":
            command.prompt.CopyFrom(open_row.envelope.clear)
            command.prefix_scope = clear_scope(open_row.prefix_scope)
            if open_row.HasField("receipt"):
                roster = self._unsealer.roster(open_row.receipt.roster_hash, self._epoch.plan)
                nonce = open_row.receipt.nonce
                command.receipt = self._receipts.open(open_row, command.prompt, nonce, roster, None)
            return command, None
        body, reply = self._unsealer.open(open_row, self._epoch.plan)
        command.prompt.CopyFrom(body.prompt)
        command.prefix_scope = sealed_scope(body.prefix_salt)
        if body.receipt_nonce:
            roster = self._unsealer.roster(open_row.envelope.sealed_for.roster_hash, self._epoch.plan)
            try:
                command.receipt = self._receipts.open(
                    open_row, command.prompt, body.receipt_nonce, roster, reply
                )
            except SealringError:
                reply.unclaim()
                raise
            reply.receipts = True
        return command, reply

    async def _pong(self, ping: control_pb2.Ping) -> None:
        try:
            links = await self._epoch.look()
        except EpochEnded:
            return
        engine = self._epoch.engine
        if engine is not None:
            pong = control_pb2.Pong(
                sequence=ping.sequence,
                steps=engine.figures.steps,
                engine_memory=engine.figures.memory,
                records_sent=links.sent,
                records_received=links.received,
                waiting_ms=links.waiting_ms,
                on_battery=power().on_battery,
                low_power=power().low,
            )
            self._put(control_pb2.ScheduleResponse(pong=pong).SerializeToString())

    def _put(self, message: bytes, *, long: bool = False) -> None:
        if self._over:
            return
        size = len(message) + _MESSAGE_BYTES
        if self._unread + size > (self._max_guest if self.guest else self._max_waiting):
            if self.guest:
                self.say_goodbye("GATEWAY_SLOW")
            else:
                slow = ResourceExhausted("the gateway is behind in reading", reason="GATEWAY_SLOW")
                self._epoch.fault(slow)
            return
        self._queue(message, size, long=long)

    def _queue(self, message: bytes, size: int, *, long: bool = False) -> None:
        self._unread += size
        put = self._waiting.put_long if long else self._waiting.put
        put(message, partial(self._written, size))
        self._wake.set()

    def _finish(self, last: control_pb2.ScheduleResponse) -> None:
        if not self._over:
            self._over = True
            message = last.SerializeToString()
            self._waiting.shorten()
            self._queue(message, len(message) + _MESSAGE_BYTES)
            self._end()


class ControlService:
    """`Control.Schedule` over serialized messages."""

    def __init__(
        self,
        schedules: Schedules,
        *,
        attach_seconds: float = ATTACH_SECONDS,
        max_waiting: int = MAX_WAITING_BYTES,
    ) -> None:
        self._schedules = schedules
        self._attach_seconds = attach_seconds
        self._max_waiting = max_waiting

    async def schedule(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Serves one stream. It writes its answers itself, because nested generators cost time at each step.

        Raises Unauthenticated, PermissionDenied, InvalidInput, FailedPrecondition, Conflict.
        """
        caller = peer_identity(context)
        if caller.role is not Role.GATEWAY:
            raise PermissionDenied("only a gateway may schedule", reason="NOT_A_GATEWAY")
        self._schedules.gateway_key(caller.cluster, caller.id)
        own = self._schedules.identity
        connection = Connection(
            Purpose.SCHEDULE, caller.cluster, caller.id, own.id, key_hash(peer_certificate(context))
        )
        proof = CalledProof(connection, (await self._first(requests, "offer")).offer, own.roster())
        proven = control_pb2.ScheduleResponse(proof=await proof.answer(own.sign))
        await context.write(proven.SerializeToString())
        finish = await self._first(requests, "proof")
        attach = (await self._first(requests, "attach")).attach  # read now: the checks below may refuse it
        key = self._schedules.gateway_key(
            caller.cluster, caller.id
        )  # the gateway may be out of the roster by now
        proof.check(finish.proof, of_identity(key))
        epoch = self._schedules.serving_epoch(attach.ring, attach.epoch)
        if (
            epoch.plan.backend and not attach.clear_links
        ):  # the gateway would pass on requests that demand trust
            raise links_in_clear(epoch.plan.deployment)
        tenure = Tenure(
            proof,
            caller,
            lambda: self._schedules.gateway_key(caller.cluster, caller.id),
            self._schedules.authorities,
        )
        stream = GatewayStream(
            caller.id,
            epoch,
            self._schedules.unsealer,
            tenure,
            self._schedules.receipt_key,
            self._max_waiting,
        )
        epoch.attach(stream, yields=attach.yields)
        log.info("gateway_attached", gateway=caller.id, ring=attach.ring, epoch=attach.epoch)
        reader: asyncio.Task[None] | None = None
        try:
            attached = _attached(epoch)
            attached.guest = stream.guest > 0
            await context.write(control_pb2.ScheduleResponse(attached=attached).SerializeToString())
            reader = asyncio.get_running_loop().create_task(stream.read(requests))
            await stream.answer(context.write)
        finally:
            epoch.detach(stream)
            stream.close()
            if reader is not None:
                reader.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await reader
            log.info("gateway_detached", gateway=caller.id, ring=attach.ring, epoch=attach.epoch)

    async def _first(self, requests: AsyncIterator[bytes], kind: str) -> control_pb2.ScheduleRequest:
        """The next of a stream's first messages. Raises InvalidInput, DeadlineExceeded, Unauthenticated."""
        try:
            async with asyncio.timeout(self._attach_seconds):
                first = await anext(requests)
        except TimeoutError:
            raise DeadlineExceeded("the gateway did not attach in time", reason="NO_ATTACH") from None
        except StopAsyncIteration:
            raise InvalidInput("the stream ended before it attached", reason="NO_ATTACH") from None
        message = parse_request(first)
        if message.WhichOneof("message") == kind:
            return message
        if kind == "attach":
            raise InvalidInput("the message after the proof is not an attach", reason="NO_ATTACH")
        raise no_proof()


def add_control_to_server(service: ControlService, server: Any) -> None:
    """Registers the service with serialized messages instead of decoded ones."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(service.schedule)
    server.add_registered_method_handlers(SERVICE, {"Schedule": handler})


def parse_request(request: bytes) -> control_pb2.ScheduleRequest:
    """Raises InvalidInput (BAD_MESSAGE)."""
    try:
        return control_pb2.ScheduleRequest.FromString(request)
    except DecodeError:
        raise InvalidInput("a schedule message is malformed", reason="BAD_MESSAGE") from None


def _attached(epoch: MemberEpoch) -> control_pb2.Attached:
    plan, engine = epoch.plan, epoch.engine
    loaded = engine.loaded if engine is not None else None
    if loaded is None:
        raise EpochEnded("the epoch is over")
    return control_pb2.Attached(
        ring=plan.ring,
        epoch=plan.epoch,
        rank=plan.rank,
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        kv_bytes_per_row=loaded.kv_bytes_per_row,
        kv_budget=max(0, plan.kv_budget - epoch.draft_bytes),
        prefixes=loaded.prefixes,
        prompts_alone=loaded.prompts_alone,
        mark_bytes=loaded.mark_bytes,
        times=loaded.times,
        capabilities=loaded.capabilities,
        vision_not_installed=loaded.vision_not_installed,
        own=loaded.own,
        sources=loaded.sources,
        kept=epoch.kept,
        recalls=epoch.recalls,
        draft_runs=epoch.draft_runs,
        drafts_together=epoch.drafts_together,
        device=_device(loaded.device, plan.ring, plan.epoch),
    )


def _device(identity: bytes, ring: str, epoch: int) -> bytes:
    """A name of a GPU that says nothing in another epoch; empty for none."""
    if not identity:
        return b""
    fields = (b"sealring/v1 device", identity, ring.encode(), epoch.to_bytes(8, "big"))
    return hashlib.sha256(pack_fields(*fields)).digest()
