"""Fetches a model from the members that have it, checked part by part."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from sealring.mesh.errors import ModelError, SealringError, Unavailable
from sealring.mesh.pki.certificates import PeerIdentity, Role
from sealring.mesh.roster.model import Roster, RosterMember
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import TlsStore, connect_to
from sealring.node.models.giving import MAX_PARTS
from sealring.node.models.landing import Landing
from sealring.node.models.manifest import Manifest, ModelFile
from sealring.v1 import models_pb2, models_pb2_grpc

log = structlog.get_logger()

_DESCRIBE_SECONDS = 3600.0
"""A member that was never asked reads the whole model first."""

_PIECE_SECONDS = 60.0
_BUSY_SECONDS = 2.0
_BUSY = ("MODELS_BUSY", "RATE_LIMITED")

Progress = Callable[[int, int], None]
"""Bytes that are here, and of how many."""


@dataclass
class _Round:
    """What asking every member once has come to."""

    manifest: Manifest | None = None
    busy: bool = False
    error: SealringError | None = None


class ModelAsker:
    """Asks the members of the roster, in an order drawn anew each time."""

    def __init__(
        self, cluster: str, own_id: str, store: TlsStore, roster: Callable[[], Roster | None]
    ) -> None:
        self._cluster = cluster
        self._own_id = own_id
        self._store = store
        self._roster = roster

    async def fetch(self, model: str, landing: Landing, progress: Progress) -> bool:
        """Fills `landing` with a model; False where no member has it.

        The first member that has the model says what it holds; whoever says the same helps out when that one
        goes away. Waits while all of them are busy. Raises Unavailable (MODEL_NOT_FETCHED), and what
        `Landing` raises.
        """
        turn = _Round()
        while True:
            turn.busy, members = False, self._members()
            for member in members:
                try:
                    if await self._from(member, model, landing, turn, progress):
                        return True
                except (grpc.RpcError, SealringError, TimeoutError) as raised:
                    error = from_rpc_error(raised) if isinstance(raised, grpc.RpcError) else raised
                    if not isinstance(error, SealringError):
                        error = Unavailable("it sent nothing for too long", reason="SLOW_PEER")
                    if error.reason in ("DISK_FULL", "STATE_UNWRITABLE"):
                        raise error from None
                    turn.busy = turn.busy or error.reason in _BUSY
                    if error.reason not in (*_BUSY, "MODEL_NOT_FOUND", "PEER_UNREACHABLE"):
                        turn.error = error
                        log.warning("model_not_passed_on", member=member.id, reason=error.reason)
            if not turn.busy:
                break
            await asyncio.sleep(_BUSY_SECONDS)
        if turn.manifest is None:
            return False
        raise Unavailable(
            f"no member passes all of {model} on: {turn.error.message if turn.error else 'they are gone'}",
            hint="try again: what has come is kept",
            reason="MODEL_NOT_FETCHED",
        )

    def _members(self) -> list[RosterMember]:
        roster = self._roster()
        others = [one for one in roster.members if one.id != self._own_id] if roster is not None else []
        random.shuffle(others)
        return others

    async def _from(
        self, member: RosterMember, model: str, landing: Landing, turn: _Round, progress: Progress
    ) -> bool:
        """Whether all of the model is here now."""
        peer = PeerIdentity(self._cluster, Role.MEMBER, member.id)
        channel = await connect_to(peer, member.addresses, self._store)
        try:
            stub = models_pb2_grpc.ModelsStub(channel.get())
            told = await stub.Describe(
                models_pb2.DescribeModelRequest(model=model), timeout=_DESCRIBE_SECONDS
            )
            manifest = Manifest.from_message(told)
            if turn.manifest is None:
                await asyncio.to_thread(landing.begin, manifest)
                turn.manifest = manifest
            elif manifest.digest != turn.manifest.digest:
                raise ModelError("it has another version of the model", reason="OTHER_MODEL_VERSION")
            progress(landing.done, manifest.size)
            for index, file in enumerate(manifest.files):
                while landing.parts(index) < file.parts:
                    await _copy(stub, manifest, index, file, landing, progress)
            return True
        finally:
            await channel.close()


async def _copy(
    stub: models_pb2_grpc.ModelsStub,
    manifest: Manifest,
    index: int,
    file: ModelFile,
    landing: Landing,
    progress: Progress,
) -> None:
    """One call's worth of a file. While a part is hashed and written the next one comes."""
    first = landing.parts(index)
    count = min(MAX_PARTS, file.parts - first)
    request = models_pb2.ReadModelRequest(manifest=manifest.digest, file=index, first=first, parts=count)
    call: Any = stub.Read(request)
    adding: asyncio.Task[None] | None = None
    try:
        for part in range(first, first + count):
            data = bytearray()
            while len(data) < file.length(part):
                async with asyncio.timeout(_PIECE_SECONDS):
                    piece = await call.read()
                if not isinstance(piece, models_pb2.ModelPiece) or not piece.data:
                    raise ModelError(f"{file.name} ends too early", reason="MODEL_PART_DAMAGED")
                data += piece.data
            if adding is not None:
                await adding
                progress(landing.done, manifest.size)
            adding = asyncio.create_task(asyncio.to_thread(landing.add, index, data))
        if adding is not None:
            await adding
            progress(landing.done, manifest.size)
    finally:
        call.cancel()
        if adding is not None and not adding.done():
            await asyncio.wait((adding,))
