"""How an enrolled machine and the coordinator come to believe each other at the start of a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from mesh.errors import DeadlineExceeded
from mesh.proof import (
    PROOF_SECONDS,
    CallerProof,
    Connection,
    Identity,
    Purpose,
    no_proof,
    of_coordinator,
)
from mesh.rootmeta import RootMetadata
from mesh.tls import PeerChannel


class Introduction:
    """The caller's part of the proof towards the coordinator, for one kind of stream."""

    def __init__(
        self,
        purpose: Purpose,
        identity: Identity,
        channel: PeerChannel,
        root: Callable[[], RootMetadata],
        newer_root: Callable[[], Awaitable[None]],
    ) -> None:
        """`newer_root` fetches root metadata, when the coordinator goes by newer than `root` gives."""
        self._purpose = purpose
        self._identity = identity
        self._channel = channel
        self._root = root
        self._newer_root = newer_root

    async def exchange(self, call: Any, message: Callable[..., Any]) -> None:
        """Has the coordinator prove itself, then shows it who calls.

        `call` was just opened on what `channel.get` gives; `message` makes what the caller writes on it of a
        field `offer` or `proof`. Nothing that the other end says counts before this returns. Raises
        Unauthenticated (NO_PROOF, BAD_PROOF), FailedPrecondition, DeadlineExceeded, what `newer_root` raises,
        and RpcError.
        """
        own = self._identity
        proof = CallerProof(
            Connection(self._purpose, own.cluster, own.id, "", self._channel.key_hash), own.roster()
        )
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                await _write(call, message(offer=proof.offer))
                answer = await call.read()
                if answer is grpc.aio.EOF or not answer.HasField("proof"):
                    raise no_proof()
                if answer.proof.root_version > self._root().version:
                    await self._newer_root()
                proof.check(answer.proof, of_coordinator(self._root()))
                finish = await proof.finish(own.sign)
        except TimeoutError:
            raise DeadlineExceeded(
                "the coordinator did not prove itself in time", reason="NO_PROOF"
            ) from None
        await _write(call, message(proof=finish))


async def _write(call: Any, message: Any) -> None:
    """If the stream is over, reading tells why."""
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        await call.write(message)
