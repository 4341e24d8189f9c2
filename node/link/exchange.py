"""Handshakes between neighbours: SIGMA over gRPC, in both roles.

The lower rank calls `Links.Handshake` of its neighbour. Both ends are pinned twice: by the name in the mTLS
certificate and by the identity key inside the handshake. A handshake is answered once, and only for an epoch
that the coordinator had this member prepare; an early one waits up to 5 s. The reason of a failure is only in
the own log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
import structlog

from sealring.mesh.crypto.identity import Signer
from sealring.mesh.errors import (
    EpochEnded,
    FailedPrecondition,
    HandshakeError,
    ResourceExhausted,
    SealringError,
    forget_frames,
)
from sealring.mesh.member.introduction import write_first
from sealring.mesh.pki.certificates import PeerIdentity, Role
from sealring.mesh.roster.model import MAX_RINGS_OF_MEMBER
from sealring.mesh.rpc.protocol import check_release, own_release
from sealring.mesh.rpc.reach import Reach
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import PeerChannel, TlsStore, peer_identity
from sealring.node.link.handshake import (
    DEADLINE_SECONDS,
    MAX_FRAME_BYTES,
    EphemeralLedger,
    Initiator,
    Responder,
)
from sealring.node.link.keys import SessionKeys
from sealring.node.link.params import LinkParams
from sealring.v1 import links_pb2, links_pb2_grpc

log = structlog.get_logger()

SERVICE = links_pb2.DESCRIPTOR.services_by_name["Links"].full_name
EARLY_SECONDS = 5.0
"""Time for which a handshake waits for its PrepareEpoch."""

_OTHER_RELEASE = "INCOMPATIBLE_VERSION"
_MAX_OPEN = 64
MAX_OPEN_PER_PEER = 2 * MAX_RINGS_OF_MEMBER
"""A member makes one call at a time for each ring that two members share. A broken call may still be open
here, hence twice as many. Further calls fail, and the caller retries."""


Send = Callable[[links_pb2.HandshakeFrame], Awaitable[None]]
LinkKey = tuple[str, int, int, int, bool]
"""Ring, epoch, from_rank, to_rank, and whether it is for later keys than the epoch's first."""


T = TypeVar("T")
Talk: TypeAlias = Callable[["Conversation"], Awaitable[T]]
"""The exchange of notes under a finished handshake."""


@dataclass(frozen=True)
class Conversation:
    """A finished handshake, and one sealed note in each direction."""

    session: SessionKeys
    _frames: Frames
    _send: Send

    async def tell(self, label: bytes, note: bytes) -> None:
        """Seals and sends a note. Raises RecordError (NOTE_REUSED)."""
        await self._send(links_pb2.HandshakeFrame(sealed=self.session.seal_note(label, note)))

    async def hear(self, label: bytes) -> bytes:
        """Receives and opens a note. Raises RecordError (NOTE_REFUSED), HandshakeError."""
        return self.session.open_note(label, await self._frames.next("sealed"))


@dataclass
class _Expected:
    """A link on which the neighbour will call, for its first session or a later one.

    `done` or `failed` is called at the end of an attempt, before the neighbour learns of it.
    """

    params: Callable[[], LinkParams]
    peer_id: str
    session: int
    talk: Talk[Any]
    done: Callable[[Any], None]
    failed: Callable[[SealringError], None]
    repeatable: bool = False
    limit: asyncio.Timeout | None = None

    def takes(self, number: int) -> bool:
        """Whether a session number is valid: 0 for the first keys, later a number that was not used."""
        return number == 0 if self.session == 0 else number >= self.session

    def begin(self, limit: asyncio.Timeout) -> None:
        """Ends the attempt before, which the neighbour has given up, and starts a new one."""
        if self.limit is not None and not self.limit.expired():
            with contextlib.suppress(RuntimeError):  # the attempt has just ended by itself
                self.limit.reschedule(asyncio.get_running_loop().time())
        self.limit = limit


@dataclass(frozen=True, eq=False)
class _Open:
    """An incoming handshake, and the timeout that can end it."""

    caller: str
    limit: asyncio.Timeout


class Handshakes(links_pb2_grpc.LinksServicer):
    """All handshakes of one daemon, in both roles."""

    def __init__(
        self,
        cluster: str,
        signer: Signer,
        store: TlsStore,
        *,
        revoked: Callable[[str], bool],
        early_seconds: float = EARLY_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """`revoked` says whether the roster names a member's id as evicted or banned."""
        self._cluster = cluster
        self._signer = signer
        self._reach = Reach(store)
        self._revoked = revoked
        self._early_seconds = early_seconds
        self._deadline_seconds = deadline_seconds
        self._ledger = EphemeralLedger()
        self._expected: dict[LinkKey, _Expected] = {}
        self._arrived = asyncio.Condition()
        self._open: list[_Open] = []

    @property
    def open(self) -> int:
        """Incoming handshakes that are open."""
        return len(self._open)

    @property
    def awaited(self) -> int:
        """Links on which a neighbour's handshake is awaited."""
        return len(self._expected)

    async def call(
        self,
        params: LinkParams,
        addresses: Sequence[str],
        session: int,
        talk: Talk[T],
        *,
        seconds: float = DEADLINE_SECONDS + EARLY_SECONDS,
    ) -> T:
        """Connects, then shakes hands as the initiator and talks, both in `seconds`. `session` is 0 for the
        first keys of the epoch.

        Raises HandshakeError, Unavailable (PEER_UNREACHABLE), FailedPrecondition (INCOMPATIBLE_VERSION), and
        what `talk` raises. After an error that `is_broken_off`, another call may succeed: it has another
        ephemeral key and another connection.
        """
        peer = PeerIdentity(self._cluster, Role.MEMBER, params.peer_id)
        channel = await self._reach.connect(peer, addresses)
        try:
            async with asyncio.timeout(seconds):
                try:
                    return await self._initiate(params, session, talk, channel)
                except BaseException as error:
                    forget_frames(error)  # its call keeps the connection open
                    raise
        except TimeoutError:
            raise HandshakeError("handshake took too long", reason="HANDSHAKE_TIMEOUT") from None
        except (grpc.RpcError, asyncio.InvalidStateError) as error:  # the latter: a write after its end
            if isinstance(error, grpc.RpcError):
                refused, code = from_rpc_error(error), error.code().name
                if refused.reason == _OTHER_RELEASE:
                    raise refused from None
            else:
                code = "ENDED"
            log.warning("handshake_failed", peer=params.peer_id, code=code)
            raise HandshakeError(
                "the neighbour broke the handshake off",
                hint="see the log of the other node",
                reason="BROKEN_OFF",
                peer=params.peer_id,
            ) from None
        finally:
            await channel.close()

    async def answer(
        self, link: LinkParams, session: int, talk: Talk[T], *, params: Callable[[], LinkParams] | None = None
    ) -> T:
        """Waits for the neighbour's handshake on `link`, once, and talks as its responder.

        `params` is called when it arrives; by default it returns `link`. The caller sets a deadline.
        Raises HandshakeError and what `talk` raises.
        """
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        done, failed = _settle(result)
        expected = _Expected(params or (lambda: link), link.peer_id, session, talk, done, failed)
        async with self._expecting(_key(link, session), expected):
            return await result

    @contextlib.asynccontextmanager
    async def answering(
        self,
        link: LinkParams,
        talk: Talk[T],
        done: Callable[[T], None],
        failed: Callable[[SealringError], None],
    ) -> AsyncIterator[None]:
        """Within the block the neighbour may shake hands for the first keys of `link`, and again.

        An attempt that breaks off, or that the neighbour repeats, has no effect. `failed` receives any other
        error, which ends the answering.
        """
        expected = _Expected(lambda: link, link.peer_id, 0, talk, done, failed, repeatable=True)
        async with self._expecting(_key(link, 0), expected):
            yield

    @contextlib.asynccontextmanager
    async def _expecting(self, key: LinkKey, expected: _Expected) -> AsyncIterator[None]:
        try:
            async with self._arrived:
                self._expected[key] = expected
                self._arrived.notify_all()
            yield
        finally:
            self._forget(key, expected)

    def _forget(self, key: LinkKey, expected: _Expected) -> None:
        if self._expected.get(key) is expected:
            del self._expected[key]

    def close_revoked(self) -> None:
        """Ends the open handshakes of evicted and banned callers; call it after each new roster."""
        now = asyncio.get_running_loop().time()
        for one in self._open:
            if self._revoked(one.caller):
                one.limit.reschedule(now)

    async def Handshake(  # type: ignore[override]  # noqa: N802 - writes to the context, named by the rpc
        self, requests: AsyncIterator[links_pb2.HandshakeFrame], context: Any
    ) -> None:
        """Answers one handshake. A caller learns only that it failed, and if so, of another release."""
        try:
            await self._respond(Frames(requests), context)
        except (SealringError, TimeoutError) as error:
            reason = error.reason if isinstance(error, SealringError) else "HANDSHAKE_TIMEOUT"
            log.warning("handshake_refused", reason=reason)
            if reason == _OTHER_RELEASE:
                raise
            raise HandshakeError("the handshake failed", hint="see the log of the other node") from None

    async def _respond(self, frames: Frames, context: Any) -> None:
        caller = peer_identity(context)
        if caller.role is not Role.MEMBER or caller.cluster != self._cluster:
            raise HandshakeError("caller is no member of this cluster", reason="NOT_A_MEMBER")
        if self._revoked(caller.id):
            raise HandshakeError("caller was evicted or banned", reason="REVOKED")
        try:
            async with asyncio.timeout(None) as limit:
                with self._admitted(_Open(caller.id, limit)):
                    await self._answer_caller(caller.id, frames, context)
        except TimeoutError:
            if limit.expired():
                raise HandshakeError(
                    "caller was evicted or banned during the handshake", reason="REVOKED"
                ) from None
            raise

    @contextlib.contextmanager
    def _admitted(self, handshake: _Open) -> Iterator[None]:
        """Counts a handshake as open within the block. Raises ResourceExhausted (TOO_MANY_HANDSHAKES)."""
        own = sum(one.caller == handshake.caller for one in self._open)
        if len(self._open) >= _MAX_OPEN or own >= MAX_OPEN_PER_PEER:
            raise ResourceExhausted("too many handshakes are open", reason="TOO_MANY_HANDSHAKES")
        self._open.append(handshake)
        try:
            yield
        finally:
            self._open.remove(handshake)

    async def _answer_caller(self, caller: str, frames: Frames, context: Any) -> None:
        async with asyncio.timeout(self._deadline_seconds):
            hello = await frames.next("hello")
        expected = await self._claim(hello, caller)
        try:
            async with asyncio.timeout(self._deadline_seconds) as limit:
                expected.begin(limit)
                params = expected.params()
                await _check_release(hello, frames, caller, params.own_id)
                machine = Responder(params, self._signer, self._ledger)
                session = await _agree(machine, frames, context.write)
                result = await expected.talk(Conversation(session, frames, context.write))
                await frames.end()
        except BaseException as error:
            view = _own_view(error)
            if not (expected.repeatable and is_broken_off(view)):
                self._forget(_key(hello, hello.session), expected)
                expected.failed(view)
            raise
        if expected.limit is not limit:
            raise HandshakeError("the caller has begun again meanwhile", reason="HANDSHAKE_TIMEOUT")
        expected.done(result)

    async def _claim(self, hello: links_pb2.LinkHello, caller: str) -> _Expected:
        """The expected link of a hello. A link that is not repeatable can be claimed once."""
        key = _key(hello, hello.session)
        try:
            async with asyncio.timeout(self._early_seconds), self._arrived:
                await self._arrived.wait_for(lambda: key in self._expected)
                expected = self._expected[key]
                if expected.peer_id != caller:
                    raise HandshakeError("caller is not the member on this link", reason="WRONG_PEER")
                if not expected.takes(hello.session):
                    raise HandshakeError("this session of the link was used before", reason="NOT_EXPECTED")
                if not expected.repeatable:
                    del self._expected[key]
                return expected
        except TimeoutError:
            raise HandshakeError("no handshake is expected on this link", reason="NOT_EXPECTED") from None

    async def _initiate(self, params: LinkParams, number: int, talk: Talk[T], channel: PeerChannel) -> T:
        machine = Initiator(params, self._signer)
        call = links_pb2_grpc.LinksStub(channel.get()).Handshake()
        frames = Frames(_responses(call))
        try:
            await write_first(call, links_pb2.HandshakeFrame(hello=_hello(params, number)))
            await write_first(call, links_pb2.HandshakeFrame(sigma=await asyncio.to_thread(machine.start)))
            session = await _agree(machine, frames, call.write)
            result = await talk(Conversation(session, frames, call.write))
            await call.done_writing()
            await frames.end()
            return result
        finally:
            call.cancel()


class Frames:
    """The peer's frames, checked for kind and size (at most 16 KiB)."""

    def __init__(self, frames: AsyncIterator[links_pb2.HandshakeFrame]) -> None:
        self._frames = frames

    async def end(self) -> None:
        async for _ in self._frames:
            raise HandshakeError("a frame follows the last one", reason="OUT_OF_ORDER")

    async def next(self, kind: str) -> Any:
        """The content of the next frame. Raises HandshakeError (BROKEN_OFF, OUT_OF_ORDER,
        FRAME_TOO_LARGE)."""
        try:
            frame = await anext(self._frames)
        except StopAsyncIteration:
            raise HandshakeError("the neighbour broke the handshake off", reason="BROKEN_OFF") from None
        if frame.WhichOneof("frame") != kind:
            raise HandshakeError("a frame is out of order", reason="OUT_OF_ORDER")
        if frame.ByteSize() > MAX_FRAME_BYTES + 8:
            raise HandshakeError("a frame is too large", reason="FRAME_TOO_LARGE")
        return getattr(frame, kind)


async def _responses(call: Any) -> AsyncIterator[links_pb2.HandshakeFrame]:
    while (frame := await call.read()) is not grpc.aio.EOF:
        yield frame
    if await call.code() is not grpc.StatusCode.OK:
        raise HandshakeError("the neighbour broke the handshake off", reason="BROKEN_OFF")


async def _agree(machine: Initiator | Responder, frames: Frames, send: Send) -> SessionKeys:
    """Runs a handshake to its end.

    Key agreement and signing run in a thread: they take milliseconds, with an enclave tens of them.
    """
    while True:
        outcome = await asyncio.to_thread(machine.on_message, await frames.next("sigma"))
        if outcome.message is not None:
            await send(links_pb2.HandshakeFrame(sigma=outcome.message))
        if outcome.session is not None:
            return outcome.session


async def _check_release(hello: links_pb2.LinkHello, frames: Frames, caller: str, own: str) -> None:
    """Raises FailedPrecondition (INCOMPATIBLE_VERSION), also to the caller."""
    try:
        check_release(hello.release, f"node {caller}", f"node {own}")
    except FailedPrecondition:
        await frames.next("sigma")  # a caller whose stream ends during a write reads INTERNAL
        raise


def _key(link: LinkParams | links_pb2.LinkHello, session: int) -> LinkKey:
    return (link.ring, link.epoch, link.from_rank, link.to_rank, session > 0)


def _hello(params: LinkParams, session: int) -> links_pb2.LinkHello:
    return links_pb2.LinkHello(
        ring=params.ring,
        epoch=params.epoch,
        from_rank=params.from_rank,
        to_rank=params.to_rank,
        session=session,
        release=own_release(),
    )


def is_broken_off(error: SealringError) -> bool:
    """Whether a handshake broke off without a sign of anything wrong."""
    return error.reason in ("BROKEN_OFF", "HANDSHAKE_TIMEOUT", "HANDSHAKE_BROKEN_OFF", "PEER_UNREACHABLE")


def _settle(result: asyncio.Future[T]) -> tuple[Callable[[T], None], Callable[[SealringError], None]]:
    """Two functions that set a future once: to a value, or to an error."""

    def done(value: T) -> None:
        if not result.done():
            result.set_result(value)

    def failed(error: SealringError) -> None:
        if not result.done():
            result.set_exception(error)

    return done, failed


def _own_view(error: BaseException) -> SealringError:
    """A failed handshake as the error of this end's epoch."""
    if isinstance(error, SealringError):
        return error
    if isinstance(error, TimeoutError):
        return HandshakeError("handshake took too long", reason="HANDSHAKE_TIMEOUT")
    return EpochEnded("the neighbour left in the middle of a handshake", reason="HANDSHAKE_BROKEN_OFF")
