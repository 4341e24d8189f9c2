"""Mutual authentication at the start of a stream: the caller's part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import DeadlineExceeded, SealringError
from sealring.mesh.member.proof import (
    PROOF_SECONDS,
    CallerProof,
    Connection,
    Credentials,
    Purpose,
    VerifyProof,
    no_proof,
    of_coordinator,
)
from sealring.mesh.pki.root import RootMetadata, check_root_times
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import PeerChannel
from sealring.v1 import proof_pb2

log = structlog.get_logger()


class Introduction:
    """The caller's part of the proof towards the coordinator, for one kind of stream."""

    def __init__(
        self,
        purpose: Purpose,
        identity: Credentials,
        channel: PeerChannel,
        root: Callable[[], RootMetadata],
        newer_root: Callable[[], Awaitable[None]],
        *,
        clock: Clock = wall_clock,
    ) -> None:
        """`newer_root` fetches root metadata when the coordinator uses a newer version than `root`
        returns."""
        self._purpose = purpose
        self._identity = identity
        self._channel = channel
        self._root = root
        self._newer_root = newer_root
        self._clock = clock

    async def exchange(self, call: Any, message: Callable[..., Any]) -> Introduced:
        """Has the coordinator prove itself, then proves the caller to it.

        `call` was just opened on the channel of `channel.get`; `message` makes the stream's message of a
        field `offer` or `proof`. Nothing that the other end sends counts before this returns. Raises
        Unauthenticated (NO_PROOF, BAD_PROOF), FailedPrecondition, DeadlineExceeded, RosterError
        (ROOT_EXPIRED), what `newer_root` raises, and RpcError.
        """
        own = self._identity
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                return await introduce(call, message, self._purpose, "", own, self._channel, self.verifier)
        except TimeoutError:
            raise DeadlineExceeded(
                "the coordinator did not prove itself in time", reason="NO_PROOF"
            ) from None

    async def verifier(self, answer: proof_pb2.ProofAnswer) -> VerifyProof:
        """The check of the coordinator's proof, with root metadata no older than its answer names.

        Raises RosterError (ROOT_EXPIRED), and what `newer_root` raises.
        """
        if answer.root_version > self._root().version:
            await self._newer_root()
        check_root_times(self._root(), now=self._clock())
        return of_coordinator(self._root())


@dataclass(frozen=True)
class Introduced:
    """A stream whose two ends have proved themselves, as its caller holds it."""

    _proof: CallerProof
    _own: Credentials
    _certificates: AsyncIterator[bytes]

    async def renewals(self) -> AsyncIterator[proof_pb2.ProofRenewal]:
        """The message to send on the stream after each renewal of the caller's certificate.

        Raises what signing raises: the stream then ends with the previous certificate.
        """
        async for certificate in self._certificates:
            yield await self._proof.renew(certificate, self._own.sign)


async def introduce(
    call: Any,
    message: Callable[..., Any],
    purpose: Purpose,
    called: str,
    own: Credentials,
    channel: PeerChannel,
    verifier: Callable[[proof_pb2.ProofAnswer], Awaitable[VerifyProof]],
) -> Introduced:
    """The caller's part of a proof: the called end proves itself to `verifier`, then the caller does to it.

    `call` was just opened on the channel of `channel.get`; `called` is a member's id, empty for the
    coordinator. Raises Unauthenticated (NO_PROOF, BAD_PROOF), FailedPrecondition (ROSTER_EQUIVOCATION), what
    `verifier` raises, and RpcError.
    """
    proof = CallerProof(Connection(purpose, own.cluster, own.id, called, channel.key_hash), own.roster())
    introduced = Introduced(proof, own, channel.renewed())
    await write_first(call, message(offer=proof.offer))
    answer = await call.read()
    if answer is grpc.aio.EOF or not answer.HasField("proof"):
        raise no_proof()
    proof.check(answer.proof, await verifier(answer.proof))
    await write_first(call, message(proof=await proof.finish(own.sign)))
    return introduced


def stream_ended(error: grpc.RpcError) -> SealringError:
    """The error that ended a stream to the coordinator, or prevented it; it is logged here."""
    problem = from_rpc_error(error)
    log.warning(
        "coordinator_stream_ended",
        reason=problem.reason,
        code=problem.code,
        why=problem.message,
        hint=problem.hint,
    )
    return problem


def throws_out(problem: SealringError) -> bool:
    """Whether a proven coordinator's error is final: the machine is evicted, banned or not enrolled."""
    return problem.reason in ("NOT_ENROLLED", "EVICTED", "BANNED")


def not_believed(error: SealringError) -> None:
    """Logs why the peer at the coordinator's address was not accepted as the coordinator."""
    log.error("coordinator_not_believed", reason=error.reason, why=error.message, hint=error.hint)


async def write_first(call: Any, message: Any) -> None:
    """Writes one of a stream's first messages. If the stream is over, the next read raises the reason."""
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        await call.write(message)
