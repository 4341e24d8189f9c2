"""Links between neighbours: a SIGMA handshake over gRPC for each link of an epoch, then the ring port.

The lower rank calls `Links.Handshake` of its neighbour. Both ends are pinned twice: by the name in the mTLS
certificate and by the identity key inside the handshake. A handshake is answered only for an epoch that the
coordinator told this member to prepare, once; one that comes a little early waits a little. What exactly went
wrong stands in the own log only.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog

from mesh.addresses import free_port, parse_address
from mesh.certificates import PeerIdentity, Role
from mesh.errors import (
    DeadlineExceeded,
    EpochEnded,
    HandshakeError,
    ResourceExhausted,
    SealringError,
    Unavailable,
)
from mesh.identity import Signer
from mesh.session import LinkParams, SessionKeys
from mesh.sigma import DEADLINE_SECONDS, MAX_FRAME_BYTES, EphemeralLedger, Initiator, Responder
from mesh.tls import PeerChannel, TlsStore, peer_identity
from node.daemon_epoch import LinkSecrets
from node.daemon_plan import EpochPlan, LinkPlan
from sealring.v1 import links_pb2, links_pb2_grpc, membership_pb2

log = structlog.get_logger()

SERVICE = links_pb2.DESCRIPTOR.services_by_name["Links"].full_name
EARLY_SECONDS = 5.0
"""How long a handshake waits for the PrepareEpoch that it belongs to."""

PEER_SECONDS = 30.0
"""How long a member waits for its lower-ranked neighbour's handshake."""

_CONNECT_SECONDS = 4.0
_MAX_EARLY = 64
_MAX_EARLY_PER_PEER = 4
_PORT_LABEL = b"ring address"

Send = Callable[[links_pb2.HandshakeFrame], Awaitable[None]]
LinkKey = tuple[str, int, int, int]
"""Ring, epoch, from_rank, to_rank."""


@dataclass
class LinkResult:
    """A finished handshake: the session, and where the next member's ring port is (outgoing links only)."""

    session: SessionKeys
    neighbour_address: str


@dataclass(frozen=True)
class _Expected:
    """A link on which the neighbour is to call."""

    plan: LinkPlan
    own_address: str
    result: asyncio.Future[LinkResult]


class Links(links_pb2_grpc.LinksServicer):
    """All handshakes of one daemon, in both roles."""

    def __init__(self, cluster: str, signer: Signer, store: TlsStore, ring_host: str) -> None:
        self._cluster = cluster
        self._signer = signer
        self._store = store
        self._ring_host = ring_host
        self._ledger = EphemeralLedger()
        self._expected: dict[LinkKey, _Expected] = {}
        self._arrived = asyncio.Condition()
        self._early: list[str] = []

    async def establish(self, plan: EpochPlan) -> LinkSecrets:
        """Shakes hands on all links of an epoch at once.

        Raises HandshakeError, Unavailable (PEER_UNREACHABLE), DeadlineExceeded (PEER_SILENT); then nothing is
        expected any more and no keys are left.
        """
        own_address = f"{self._ring_host}:{free_port(self._ring_host)}"
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._link(link, own_address)) for link in plan.links]
        results = [task.result() for task in tasks]
        incoming = next(result for link, result in zip(plan.links, results, strict=True) if link.receives)
        outgoing = next(result for link, result in zip(plan.links, results, strict=True) if not link.receives)
        return LinkSecrets(
            outgoing_keys=outgoing.session.to_carrier(),
            incoming_keys=incoming.session.to_carrier(),
            own_address=own_address,
            next_address=outgoing.neighbour_address,
            infos=[_info(link.params, result) for link, result in zip(plan.links, results, strict=True)],
        )

    async def Handshake(  # type: ignore[override]  # noqa: N802 - writes to the context, named by the rpc
        self, requests: AsyncIterator[links_pb2.HandshakeFrame], context: Any
    ) -> None:
        """One handshake, as its responder. The caller learns of a failure and of nothing else."""
        try:
            await self._respond(_Frames(requests), context)
        except (SealringError, TimeoutError) as error:
            reason = error.reason if isinstance(error, SealringError) else "HANDSHAKE_TIMEOUT"
            log.warning("handshake refused", reason=reason)
            raise HandshakeError("the handshake failed", hint="see the log of the other node") from None

    async def _respond(self, frames: _Frames, context: Any) -> None:
        caller = peer_identity(context)
        if caller.role is not Role.MEMBER or caller.cluster != self._cluster:
            raise HandshakeError("caller is no member of this cluster", reason="NOT_A_MEMBER")
        async with asyncio.timeout(DEADLINE_SECONDS):
            hello = await frames.hello()
        expected = await self._claim(hello, caller.id)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                machine = Responder(expected.plan.params, self._signer, self._ledger)
                session = await _agree(machine, frames, context.write)
                neighbour = await _exchange_address(
                    expected.plan, session, expected.own_address, frames, context.write
                )
                if expected.plan.receives:
                    await frames.end()
        except BaseException as error:
            if not expected.result.done():
                expected.result.set_exception(_own_view(error))
            raise
        if not expected.result.done():
            expected.result.set_result(LinkResult(session, neighbour))

    async def _claim(self, hello: links_pb2.LinkHello, caller: str) -> _Expected:
        """The expected link that a hello is for; nobody else can claim it afterwards."""
        key = (hello.ring, hello.epoch, hello.from_rank, hello.to_rank)
        if hello.session != 0:
            raise HandshakeError("no further session of the link is due", reason="NOT_EXPECTED")
        if len(self._early) >= _MAX_EARLY or self._early.count(caller) >= _MAX_EARLY_PER_PEER:
            raise ResourceExhausted("too many handshakes wait", reason="TOO_MANY_HANDSHAKES")
        self._early.append(caller)
        try:
            async with asyncio.timeout(EARLY_SECONDS), self._arrived:
                await self._arrived.wait_for(lambda: key in self._expected)
                expected = self._expected[key]
                if expected.plan.params.peer_id != caller:
                    raise HandshakeError("caller is not the member on this link", reason="WRONG_PEER")
                return self._expected.pop(key)
        except TimeoutError:
            raise HandshakeError("no handshake is expected on this link", reason="NOT_EXPECTED") from None
        finally:
            self._early.remove(caller)

    async def _link(self, plan: LinkPlan, own_address: str) -> LinkResult:
        if plan.params.initiates:
            return await self._call(plan, own_address)
        expected = _Expected(plan, own_address, asyncio.get_running_loop().create_future())
        key = _key(plan.params)
        try:
            async with self._arrived:
                self._expected[key] = expected
                self._arrived.notify_all()
            return await asyncio.wait_for(expected.result, PEER_SECONDS + DEADLINE_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(
                "the neighbour did not shake hands", reason="PEER_SILENT", peer=plan.params.peer_id
            ) from None
        finally:
            if self._expected.get(key) is expected:
                del self._expected[key]

    async def _call(self, plan: LinkPlan, own_address: str) -> LinkResult:
        channel = await self._connect(plan)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS + EARLY_SECONDS):
                return await self._initiate(plan, own_address, channel)
        except TimeoutError:
            raise HandshakeError("handshake took too long", reason="HANDSHAKE_TIMEOUT") from None
        except grpc.RpcError as error:
            log.warning("handshake failed", peer=plan.params.peer_id, code=error.code().name)
            raise HandshakeError(
                "the neighbour broke the handshake off",
                hint="see the log of the other node",
                peer=plan.params.peer_id,
            ) from None
        finally:
            await channel.close()

    async def _connect(self, plan: LinkPlan) -> PeerChannel:
        """A channel to the first of the neighbour's addresses that answers with the right certificate."""
        name = PeerIdentity(self._cluster, Role.MEMBER, plan.params.peer_id).server_name
        for address in plan.peer_addresses:
            channel = PeerChannel(address, self._store, name)
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await channel.get().channel_ready()
            except TimeoutError:
                await channel.close()
                continue
            except BaseException:
                await channel.close()
                raise
            return channel
        raise Unavailable(
            "the neighbour cannot be reached",
            hint="check the addresses that it advertises",
            reason="PEER_UNREACHABLE",
            peer=plan.params.peer_id,
            addresses=",".join(plan.peer_addresses),
        )

    async def _initiate(self, plan: LinkPlan, own_address: str, channel: PeerChannel) -> LinkResult:
        machine = Initiator(plan.params, self._signer)
        call = links_pb2_grpc.LinksStub(channel.get()).Handshake()
        frames = _Frames(_responses(call))
        try:
            await call.write(links_pb2.HandshakeFrame(hello=_hello(plan.params)))
            await call.write(links_pb2.HandshakeFrame(sigma=await asyncio.to_thread(machine.start)))
            session = await _agree(machine, frames, call.write)
            neighbour = await _exchange_address(plan, session, own_address, frames, call.write)
            await call.done_writing()
            await frames.end()
            return LinkResult(session, neighbour)
        finally:
            call.cancel()


class _Frames:
    """The peer's frames, each of the kind that is due and at most 16 KiB long."""

    def __init__(self, frames: AsyncIterator[links_pb2.HandshakeFrame]) -> None:
        self._frames = frames

    async def hello(self) -> links_pb2.LinkHello:
        return (await self._next("hello")).hello

    async def sigma(self) -> bytes:
        return (await self._next("sigma")).sigma

    async def sealed(self) -> bytes:
        return (await self._next("sealed")).sealed

    async def end(self) -> None:
        async for _ in self._frames:
            raise HandshakeError("a frame follows the last one", reason="OUT_OF_ORDER")

    async def _next(self, kind: str) -> links_pb2.HandshakeFrame:
        try:
            frame = await anext(self._frames)
        except StopAsyncIteration:
            raise HandshakeError("the neighbour broke the handshake off", reason="BROKEN_OFF") from None
        if frame.WhichOneof("frame") != kind:
            raise HandshakeError("a frame is out of order", reason="OUT_OF_ORDER")
        if frame.ByteSize() > MAX_FRAME_BYTES + 8:
            raise HandshakeError("a frame is too large", reason="FRAME_TOO_LARGE")
        return frame


async def _responses(call: Any) -> AsyncIterator[links_pb2.HandshakeFrame]:
    while (frame := await call.read()) is not grpc.aio.EOF:
        yield frame
    if await call.code() is not grpc.StatusCode.OK:
        raise HandshakeError("the neighbour broke the handshake off", reason="BROKEN_OFF")


async def _agree(machine: Initiator | Responder, frames: _Frames, send: Send) -> SessionKeys:
    """The rest of the handshake.

    Key agreement and signing take milliseconds, with an enclave tens of them: not on the event loop.
    """
    while True:
        outcome = await asyncio.to_thread(machine.on_message, await frames.sigma())
        if outcome.message is not None:
            await send(links_pb2.HandshakeFrame(sigma=outcome.message))
        if outcome.session is not None:
            return outcome.session


async def _exchange_address(
    plan: LinkPlan, session: SessionKeys, own_address: str, frames: _Frames, send: Send
) -> str:
    """The receiving end tells where it listens; returns what the neighbour told, or nothing."""
    if plan.receives:
        await send(links_pb2.HandshakeFrame(sealed=_seal_address(session, own_address)))
        return ""
    return _open_address(session, await frames.sealed())


def _key(params: LinkParams) -> LinkKey:
    return (params.ring, params.epoch, params.from_rank, params.to_rank)


def _hello(params: LinkParams) -> links_pb2.LinkHello:
    return links_pb2.LinkHello(
        ring=params.ring, epoch=params.epoch, from_rank=params.from_rank, to_rank=params.to_rank, session=0
    )


def _info(params: LinkParams, result: LinkResult) -> membership_pb2.LinkInfo:
    return membership_pb2.LinkInfo(
        from_rank=params.from_rank, to_rank=params.to_rank, suite=result.session.suite.value
    )


def _seal_address(session: SessionKeys, address: str) -> bytes:
    return session.seal_note(_PORT_LABEL, address.encode("ascii"))


def _open_address(session: SessionKeys, sealed: bytes) -> str:
    """The neighbour's ring address. Raises RecordError, HandshakeError (BAD_RING_ADDRESS)."""
    try:
        address = session.open_note(_PORT_LABEL, sealed).decode("ascii")
        host, port = parse_address(address)
        ipaddress.IPv4Address(host)
        if port:
            return address
    except ValueError:
        pass
    raise HandshakeError("the neighbour's ring address is malformed", reason="BAD_RING_ADDRESS")


def _own_view(error: BaseException) -> SealringError:
    """What a failed handshake means to this end's epoch."""
    if isinstance(error, SealringError):
        return error
    if isinstance(error, TimeoutError):
        return HandshakeError("handshake took too long", reason="HANDSHAKE_TIMEOUT")
    return EpochEnded("the neighbour left in the middle of a handshake", reason="HANDSHAKE_BROKEN_OFF")
