"""Control streams to the members of a ring, for one epoch.

A stream has one task that reads and one that writes; nothing waits for a round trip. Whatever goes wrong with
any of them ends the epoch: the members see their streams end and report to the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from sealring.gateway.rings.members import Members, MemberTarget
from sealring.mesh.clock import Clock, awake_clock
from sealring.mesh.errors import EpochEnded, InvalidInput, SealringError, StageFailed, forget_frames
from sealring.mesh.member.introduction import Introduced, introduce, write_first
from sealring.mesh.member.proof import Purpose, VerifyProof, of_identity
from sealring.mesh.rpc.pieces import Joiner, Outgoing
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.rpc.status import from_rpc_error, is_servers
from sealring.mesh.rpc.tls import PeerChannel, is_own_cancellation
from sealring.mesh.rpc.wire import check_fields
from sealring.v1 import control_pb2 as control
from sealring.v1 import proof_pb2

log = structlog.get_logger()

_P = ParamSpec("_P")
_T = TypeVar("_T")

METHOD = "/sealring.v1.Control/Schedule"
ATTACH_SECONDS = 10.0
PING_SECONDS = 1.0
REST_SECONDS = 4.0
"""Between pings while nobody waits for the ring."""

PONG_SECONDS = 4.0
"""The silence of a member that ends the epoch."""

STALL_SECONDS = 120.0
GOODBYE_SECONDS = 1.0

_JUST_AFTER = 0.05

LOST_SECONDS = 3.0
"""A record is lost if for this time its sender has been sending it and its receiver has waited without a
byte. A missing record alone is no evidence: its sender may compute for minutes."""

MAX_RESPONSE = 4 << 20
"""Bytes of a member's message, unless it forwards another gateway's. The head sends the outputs of a step in
parts of about 1 MiB, and sealing pads a part to no more than three times that."""

_UNCOUNTED = 1 << 20
"""Bytes up to which fields are not counted: too few fit to cost 64 MiB."""

_MAX_FIELDS = 1 << 18
"""Fields of a larger message: one output with all log-probabilities that a stop string may hold back has
about 1 MiB of them, four fields to 14 bytes."""

_FORWARDED = (b"\x4a", b"\x52")
"""First bytes of `forward` (9) and `forwarded` (10)."""


class Unheard(EpochEnded):
    """A connection broke or fell silent without a member's word. The epoch may go on: maybe nothing that was
    sent last has reached a member."""


class MemberStream:
    """One `Schedule` call. Messages out are serialized bytes, in the order of `send`."""

    def __init__(
        self,
        target: MemberTarget,
        members: Members,
        clock: Clock,
        *,
        head: bool,
        on_pong: Callable[[control.Pong], None],
        rank: int = 0,
    ) -> None:
        """`on_pong` gets every pong and may raise the SealringError that ends the epoch."""
        self.target = target
        self._members = members
        self._head = head
        self._on_pong = on_pong
        self._rank = rank
        self.heard = clock()
        self._clock = clock
        self._channel: PeerChannel | None = None
        self.call: Any = None
        self.introduced: Introduced | None = None
        self._outgoing = Outgoing(lambda piece: _message(piece=piece))
        self._joiner = Joiner()
        self._wake = asyncio.Event()
        self._finished = False
        self.read_out = asyncio.Event()

    async def attach(self, attach: control.Attach) -> control.Attached:
        """Opens the stream. Raises SealringError."""
        self._channel = channel = await self._members.connect(self.target)
        method: Any = channel.get().stream_stream(
            METHOD, request_serializer=None, response_deserializer=parse_response
        )
        self.call = method()
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                self.introduced = await introduce(
                    self.call,
                    _message,
                    Purpose.SCHEDULE,
                    self.target.id,
                    self._members.identity,
                    channel,
                    self._verifier,
                )
                await write_first(self.call, _message(attach=attach))
                return self._attached(await self.call.read())
        except TimeoutError:
            raise Unheard("a member did not answer in time", reason="MEMBER_SILENT") from None
        except grpc.RpcError as error:
            raise _of_status(error, self.target.id) from None
        except asyncio.InvalidStateError:
            raise await self.failure() from None

    async def _verifier(self, _: proof_pb2.ProofAnswer) -> VerifyProof:
        return of_identity(self.target.identity_key)

    def _attached(self, response: Any) -> control.Attached:
        if response is grpc.aio.EOF:
            raise EpochEnded("the member ended the stream", member=self.target.id)
        kind = response.WhichOneof("message")
        if kind == "attached":
            attached: control.Attached = response.attached
            return attached
        raise _over(response, self.target.id)

    async def failure(self) -> SealringError:
        with contextlib.suppress(grpc.RpcError):
            await self.call.read()
        code = await self.call.code()
        if code is grpc.StatusCode.OK:
            return EpochEnded("the member ended the stream", member=self.target.id)
        error = grpc.aio.AioRpcError(
            code,
            await self.call.initial_metadata(),
            await self.call.trailing_metadata(),
            details=await self.call.details(),
        )
        return _of_status(error, self.target.id)

    def send(self, message: bytes, written: Callable[[], None] | None = None) -> None:
        """Queues a message; nothing follows a goodbye. `written` is called once it is on its way."""
        if not self._finished:
            self._outgoing.put(message, written)
            self._wake.set()

    def send_long(self, message: bytes, written: Callable[[], None] | None = None, *, key: str = "") -> None:
        """As `send`, for messages that may be long, and those that must not overtake them."""
        if not self._finished:
            self._outgoing.put_long(message, written, key=key)
            self._wake.set()

    def withdraw(self, key: str) -> bool:
        """Takes a message of `send_long` back that has not begun to leave; whether it was there."""
        return self._outgoing.withdraw(key)

    def finish(self, reason: str) -> None:
        """Says goodbye as the last thing. Nothing in pieces goes out before it."""
        self._outgoing.shorten()
        goodbye = control.ScheduleRequest()
        goodbye.goodbye.reason = reason
        self.send(goodbye.SerializeToString())
        self._finished = True

    async def write_all(self) -> None:
        """Writes the queue until its goodbye, or until `read_all` has raised the reason of the end."""
        try:
            while True:
                while self._outgoing:
                    message, written = self._outgoing.take()
                    await self.call.write(message)
                    if written is not None:
                        written()
                if self._finished:
                    await self.call.done_writing()
                    return
                self._wake.clear()
                await self._wake.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):  # INTERNAL; read_all reads the member's own reason
            await self.read_out.wait()
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            raise _replaced(self.target.id) from None

    async def renew_all(self) -> None:
        """Lets the stream outlive every certificate that this gateway renews."""
        assert self.introduced is not None
        async for renewal in self.introduced.renewals():
            self.send(_message(renewal=renewal))

    async def read_all(self, handle: Callable[[control.ScheduleResponse], None]) -> None:
        """Hands every response on, pongs of the head only. Raises SealringError once the stream is over."""
        try:
            while True:
                response = await self.call.read()
                if response is grpc.aio.EOF:
                    raise await self.failure()
                self.heard = self._clock()
                if response.HasField("piece"):
                    response = self._joined(response.piece)
                if response is not None:
                    self._take(response, handle)
        except grpc.RpcError as error:
            raise _of_status(error, self.target.id) from None
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            raise _replaced(self.target.id) from None
        finally:
            self.read_out.set()

    def _take(
        self, response: control.ScheduleResponse, handle: Callable[[control.ScheduleResponse], None]
    ) -> None:
        kind = response.WhichOneof("message")
        if kind == "pong":
            self._on_pong(response.pong)
            if not self._head:
                return
        if kind == "recalled":
            response.recalled.rank = self._rank
        if kind == "receipt":
            response.receipt.rank = self._rank
        if kind in ("fault", "goodbye", "attached", "proof", None):
            raise _over(response, self.target.id)
        handle(response)

    def _joined(self, piece: control.Piece) -> control.ScheduleResponse | None:
        """The forwarded request that a piece completes; an empty message for anything else."""
        whole = self._joiner.add(piece) if self._head else b""
        if whole is None:
            return None
        response = parse_response(whole)
        return response if response.HasField("forward") else control.ScheduleResponse()

    def cancel(self) -> None:
        """Ends the call, whatever state it is in, and lets go of it: gRPC keeps a connection open for as long
        as there is an object of a call that went over it."""
        call, self.call = self.call, None
        if call is not None:
            call.cancel()
        self._joiner = Joiner()
        channel, self._channel = self._channel, None
        if channel is not None:
            self._members.release(channel)


def _letting_go(method: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """Takes the frames from a SealringError that `method` raises: their calls keep connections open."""

    @functools.wraps(method)
    async def wrapped(*args: _P.args, **options: _P.kwargs) -> _T:
        try:
            return await method(*args, **options)
        except SealringError as error:
            forget_frames(error)
            raise

    return wrapped


class ControlStreams:
    """All control streams of one epoch; `targets` are in the order of ranks, the head first."""

    def __init__(
        self,
        ring: str,
        epoch: int,
        targets: Sequence[MemberTarget],
        members: Members,
        *,
        clear_links: bool = False,
        yields: bool = False,
        busy: Callable[[], bool] = lambda: False,
        clock: Clock = awake_clock,
    ) -> None:
        """`yields`: attaching fails while no other gateway schedules. `busy` says whether a client waits,
        also for an answer that another gateway schedules."""
        self.ring = ring
        self.epoch = epoch
        self.attach_request = control.Attach(ring=ring, epoch=epoch, clear_links=clear_links, yields=yields)
        self.guest = False
        self.out_of_memory = False
        """A member has reported a lack of memory, possibly after another member reported another end."""
        self._waiting_since: float | None = None
        self._clock = clock
        self._losses = LossWatch(len(targets))
        self._saves_power: dict[int, bool] = {}  # by rank
        self.streams = [
            MemberStream(
                target,
                members,
                clock,
                head=rank == 0,
                on_pong=partial(self.pong, rank),
                rank=rank,
            )
            for rank, target in enumerate(targets)
        ]
        self._pings = 0
        self._busy = busy
        self._stirred = asyncio.Event()
        self._fault: Exception | None = None
        self._failed = asyncio.Event()

    @_letting_go
    async def attach(self) -> list[control.Attached]:
        """Attaches to the head, and to the others unless that has another gateway already: then this one is
        its `guest`. The answers are in the order of ranks. Raises SealringError."""
        head, *others = self.streams
        first = await head.attach(self.attach_request)
        answers: list[control.Attached | BaseException] = [first]
        self.guest = first.guest
        if self.guest:
            self.streams = [head]
        else:  # wait for all, so that no attempt is left running when the first failure is raised
            attaching = (stream.attach(self.attach_request) for stream in others)
            answers += await asyncio.gather(*attaching, return_exceptions=True)
        attached = []
        for rank, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                raise answer
            if (answer.ring, answer.epoch, answer.rank) != (self.ring, self.epoch, rank):
                raise EpochEnded("a member attached to something else", reason="WRONG_MEMBER", rank=rank)
            attached.append(answer)
        return attached

    def send_all(self, message: bytes) -> None:
        for stream in self.streams:
            stream.send(message)

    def send_head(self, message: bytes, written: Callable[[], None] | None = None) -> None:
        self.streams[0].send(message, written)

    def send_prompt(self, message: bytes, *, key: str = "") -> None:
        """Sends the head a prompt, or what must not overtake one; steps and pings go between its pieces."""
        self.streams[0].send_long(message, key=key)

    def withdraw(self, key: str) -> bool:
        """Takes a prompt back that has not begun to leave; whether there was one."""
        return self.streams[0].withdraw(key)

    def send_tail(self, message: bytes) -> None:
        self.streams[-1].send(message)

    def expect(self) -> None:
        """The ring owes an answer; STALL_SECONDS count from the first call since `answered`."""
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        self.stir()

    def stir(self) -> None:
        """There may be work now: ends a rest."""
        self._stirred.set()

    def fail(self, error: Exception) -> None:
        """Ends the epoch: `run` raises the error."""
        self._fault = error
        self._failed.set()

    def answered(self) -> None:
        """The ring has answered; call `expect` again if it still owes something."""
        self._waiting_since = None

    @_letting_go
    async def run(self, handle: Callable[[control.ScheduleResponse], None]) -> None:
        """Runs until the epoch is over, says goodbye, and raises the SealringError that says why, or what
        `fail` was given."""
        now = self._clock()
        streams = []
        for stream in self.streams:
            stream.heard = now
            streams.append(asyncio.ensure_future(stream.read_all(handle)))
            streams.append(asyncio.ensure_future(stream.write_all()))
        renewing = [asyncio.ensure_future(stream.renew_all()) for stream in self.streams]
        watch, fault = asyncio.ensure_future(self.watch()), asyncio.ensure_future(self._fail())
        reason = "LEAVING"
        try:
            parts = (watch, fault, *renewing, *streams)
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except SealringError as error:
            reason = error.reason
            raise
        finally:
            for task in (watch, fault, *renewing):
                task.cancel()
            try:
                await self._part(streams, reason)
            finally:  # the caller may cancel this a second time
                gone = asyncio.gather(watch, fault, *renewing, *streams, return_exceptions=True)
                for task in streams:
                    task.cancel()
                for end in await gone:
                    if isinstance(end, BaseException):
                        forget_frames(end)

    async def _fail(self) -> None:
        """Raises what `fail` was given."""
        await self._failed.wait()
        assert self._fault is not None
        raise self._fault

    async def _part(self, streams: Sequence[asyncio.Future[None]], reason: str) -> None:
        """A cancelled read or write cancels its call, so goodbyes come before anything is cancelled."""
        for stream in self.streams:
            stream.finish(reason)
        try:
            await asyncio.wait(streams, timeout=GOODBYE_SECONDS)
        finally:
            ends = [task.exception() for task in streams if task.done() and not task.cancelled()]
            self.out_of_memory = any(
                isinstance(end, SealringError) and end.reason == StageFailed.out_of_memory for end in ends
            )

    def cancel(self) -> None:
        """Ends every call."""
        for stream in self.streams:
            stream.cancel()

    @property
    def saves_power(self) -> bool:
        """Whether a member has said that it runs on battery or in Low Power Mode."""
        return any(self._saves_power.values())

    def pong(self, rank: int, pong: control.Pong) -> None:
        """Raises EpochEnded (RECORD_LOST)."""
        self._saves_power[rank] = pong.on_battery or pong.low_power
        lost = self._losses.heard(
            rank,
            sent=pong.records_sent,
            received=pong.records_received,
            waiting_seconds=pong.waiting_ms / 1000,
            now=self._clock(),
        )
        if lost is not None:
            raise EpochEnded(
                "a record was sent on a link and did not arrive",
                hint="an attacker on the path or a faulty network drops what the members send",
                reason="RECORD_LOST",
                member=self.streams[lost].target.id,
            )

    async def watch(self) -> None:
        """Raises EpochEnded for a member that is silent, and for a ring that makes no step."""
        while True:
            rests = self._waiting_since is None and not self._busy()
            pause = REST_SECONDS if rests else PING_SECONDS
            self._pings += 1
            ping = control.Ping(sequence=self._pings, next_ms=int(pause * 1000))
            self.send_all(_message(ping=ping))
            limit = PONG_SECONDS + (pause if rests else 0.0)
            await self._pause(pause, rests=rests)
            now = self._clock()
            for rank, stream in enumerate(self.streams):
                if now - stream.heard > limit:
                    raise Unheard(
                        f"the member of rank {rank} has not answered for {limit:g} s",
                        reason="MEMBER_SILENT",
                        member=stream.target.id,
                    )
                if rests and self._stirred.is_set():  # nothing was asked of it since the last ping
                    stream.heard = now
            if self._waiting_since is not None and now - self._waiting_since > STALL_SECONDS:
                raise EpochEnded(f"no step was done for {STALL_SECONDS:g} s", reason="RING_STALLED")

    async def _pause(self, seconds: float, *, rests: bool) -> None:
        """Returns once the next look is due: at once when a rest ends, or a member has been silent too
        long."""
        if rests:
            self._stirred.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stirred.wait()
            return
        silent = self._clock() - min(stream.heard for stream in self.streams)
        await asyncio.sleep(min(seconds, max(0.0, PONG_SECONDS - silent) + _JUST_AFTER))


@dataclass(slots=True)
class _Link:
    sent: int = 0
    received: int = 0
    behind_since: float | None = None


class LossWatch:
    """Finds records that were lost on a link whose connection stands: somebody on the path dropped them.

    The links of one epoch's ring are in the order of ranks: link r leads from rank r to the next. Pure; time
    is an argument.
    """

    def __init__(self, size: int) -> None:
        self._links = [_Link() for _ in range(size)]

    def heard(self, rank: int, *, sent: int, received: int, waiting_seconds: float, now: float) -> int | None:
        """Takes a member's counts of the records on its two links since the epoch began.

        Returns the rank whose outgoing link has lost a record, if this shows one.
        """
        outgoing, incoming = self._links[rank], self._links[rank - 1]
        if sent > outgoing.sent:
            outgoing.sent = sent
            _look(outgoing, now)
        if received > incoming.received:
            incoming.received = received
            incoming.behind_since = None
            _look(incoming, now)
        since = incoming.behind_since
        lost = since is not None and now - since >= LOST_SECONDS and waiting_seconds >= LOST_SECONDS
        return (rank - 1) % len(self._links) if lost else None


def _look(link: _Link, now: float) -> None:
    if link.behind_since is None and link.sent > link.received:
        link.behind_since = now


def parse_response(data: bytes) -> control.ScheduleResponse:
    """A member's message; an empty one, which ends the epoch as BAD_MESSAGE, where `data` is malformed or
    larger than any message of an honest member."""
    forwarded = data[:1] in _FORWARDED
    try:
        if len(data) > MAX_RESPONSE and not forwarded:
            return control.ScheduleResponse()
        if len(data) > _UNCOUNTED:
            check_fields(data, control.ScheduleResponse.DESCRIPTOR, most=_MAX_FIELDS)
        return control.ScheduleResponse.FromString(data)
    except (InvalidInput, DecodeError):
        return control.ScheduleResponse()


def _message(**field: Any) -> bytes:
    return control.ScheduleRequest(**field).SerializeToString()


def _over(response: control.ScheduleResponse, member: str) -> SealringError:
    kind = response.WhichOneof("message")
    if kind == "fault":
        return from_problem(response.fault.problem)
    if kind == "goodbye":
        return EpochEnded("a member left", reason="MEMBER_LEFT", member=member)
    return EpochEnded("a member sent an unexpected message", reason="BAD_MESSAGE", member=member)


def _of_status(error: grpc.RpcError, member: str) -> SealringError:
    found = from_rpc_error(error)
    if is_servers(error):
        return found
    return Unheard(found.message, hint=found.hint, reason=found.reason, member=member)


def _replaced(member: str) -> Unheard:
    return Unheard("the channel to a member was replaced", reason="CHANNEL_REPLACED", member=member)
