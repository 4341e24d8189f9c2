"""Brings blocks of layers that another member had, for a recall of this node's engine, and stores them; and
the key of names of the head before.

They are stored like this member's own, under a key of the part: within the bound, sealed, for the engine to
read. Where a member fails, answers too slowly or sends another number of bytes, the rest is computed anew,
and the member is not asked again for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import structlog

from sealring.mesh.clock import awake_clock
from sealring.mesh.errors import ModelError, NotFound, SealringError
from sealring.mesh.pki.certificates import PeerIdentity, Role
from sealring.mesh.ring.prefix_names import Chain
from sealring.mesh.roster.model import Roster
from sealring.mesh.rpc.reach import Reach
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import TlsStore
from sealring.node.stored.codec import buffer
from sealring.node.stored.giving import MAX_PIECE
from sealring.node.stored.keys import KEY_BYTES
from sealring.node.stored.parts import brought, read_table
from sealring.node.stored.places import units_of
from sealring.node.stored.policy import WriteBudget
from sealring.v1 import engine_pb2, links_pb2, links_pb2_grpc

log = structlog.get_logger()

AGAIN_SECONDS = 60.0
"""How long a member that has failed is not asked: each time costs a row the wait."""

NAMES_SECONDS = 3.0
"""For the key of names: an epoch waits to form, once for each ring before."""

_PIECE_SECONDS = 5.0
_PART_SECONDS = 60.0
"""For what one member has of a recall: others wait meanwhile."""

_ROSTER_SECONDS = 0.2
_FAILURES = SealringError, grpc.RpcError, TimeoutError, OSError


class BlocksAsker:
    """Brings blocks, of one part after the other. Use it from one event loop."""

    def __init__(self, cluster: str, store: TlsStore, roster: Callable[[], Roster | None]) -> None:
        """`roster` gives the valid roster in use, or None."""
        self._cluster = cluster
        self._reach = Reach(store)
        self._roster = roster
        self._turn = asyncio.Lock()
        self._failed: dict[str, float] = {}
        self._budget = WriteBudget(awake_clock)

    async def bring(
        self, ring: str, layers: tuple[int, int], kv_bits: int, disk: engine_pb2.PrefixDisk, asked: Any
    ) -> None:
        """Stores what other members have of what an engine that stores on `disk` asks for, by a BringBlocks.
        `layers` are the engine's."""
        if asked.former >= len(disk.former):
            return
        async with self._turn:
            for part in disk.former[asked.former].parts:
                if not part.member or awake_clock() < self._failed.get(part.member, 0.0):
                    continue
                request = links_pb2.ReadBlocksRequest(
                    ring=ring,
                    kv_bits=kv_bits,
                    caches=part.caches,
                    stage_first=part.stage_first,
                    stage_end=part.stage_end,
                    first=part.first,
                    end=part.end,
                    chain=asked.chain,
                    skip=asked.skip,
                )
                try:
                    async with asyncio.timeout(_PART_SECONDS):
                        await self._bring(part, request, disk, layers[0])
                except _FAILURES as raised:
                    log.warning("blocks_not_handed_over", member=part.member, reason=_reason(raised))
                    self._failed[part.member] = awake_clock() + AGAIN_SECONDS

    async def names(self, ring: str, member: str) -> bytes | None:
        """The key by which the head of a ring before names prompts of this ring's deployment, 32 bytes; None
        where the roster does not name it now, or it gives none."""
        try:
            async with asyncio.timeout(NAMES_SECONDS), self._giver(member) as stub:
                key = await _key(stub, ring)
        except _FAILURES as raised:
            log.warning("names_not_handed_over", member=member, reason=_reason(raised))
            return None
        return key if len(key) == KEY_BYTES else None

    async def _bring(
        self,
        part: engine_pb2.FormerPart,
        request: links_pb2.ReadBlocksRequest,
        disk: engine_pb2.PrefixDisk,
        lo: int,
    ) -> None:
        table = await asyncio.to_thread(read_table, Path(disk.model), disk.key)
        if table is None:  # the engine could not note it
            return
        here, chain = brought(disk, part, table, lo), Chain.unpack(request.chain)
        units = units_of(chain)
        while request.skip < len(units) and here.has(chain.scope, units[request.skip]):
            request.skip += 1
        if request.skip == len(units):
            return
        blocks = 0
        async with self._giver(part.member) as stub:
            call = stub.Read(request)
            try:
                for unit in units[request.skip :]:
                    size = here.size(unit)
                    if not size:
                        continue
                    content = await _content(call, size) if self._budget.take(size) else None
                    if content is None or not await asyncio.to_thread(
                        here.store.write, chain.scope, unit.place, content
                    ):
                        break
                    blocks += 1
            finally:
                call.cancel()
        log.info("blocks_handed_over", member=part.member, first=part.first, end=part.end, blocks=blocks)

    @contextlib.asynccontextmanager
    async def _giver(self, member: str) -> AsyncIterator[Any]:
        """A member's Blocks service. Raises NotFound (NOT_IN_ROSTER), Unavailable (PEER_UNREACHABLE)."""
        roster = self._roster()
        if roster is None:
            raise NotFound("there is no valid roster", reason="NOT_IN_ROSTER")
        peer = PeerIdentity(self._cluster, Role.MEMBER, member)
        channel = await self._reach.connect(peer, roster.member(member).addresses)
        try:
            yield links_pb2_grpc.BlocksStub(channel.get())
        finally:
            await channel.close()


async def _key(stub: Any, ring: str) -> bytes:
    """Raises grpc.RpcError."""
    while True:
        try:
            return bytes((await stub.ReadNames(links_pb2.ReadNamesRequest(ring=ring))).key)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                raise
        await asyncio.sleep(_ROSTER_SECONDS)  # the giver's roster may be the one before


def _reason(raised: BaseException) -> str:
    error = from_rpc_error(raised) if isinstance(raised, grpc.RpcError) else raised
    return str(getattr(error, "reason", type(error).__name__))


async def _content(call: Any, size: int) -> memoryview | None:
    """The next file's content; None at the end. Raises ModelError (BLOCK_DAMAGED) for other pieces than the
    largest that may be, of which none could be endless. Raises TimeoutError, grpc.RpcError."""
    content, at = buffer(size), 0
    while at < size:
        async with asyncio.timeout(_PIECE_SECONDS):
            piece = await call.read()
        if piece is grpc.aio.EOF and not at:
            return None
        if piece is grpc.aio.EOF or len(piece.data) != min(MAX_PIECE, size - at):
            raise ModelError("a block that a member hands over has another length", reason="BLOCK_DAMAGED")
        content[at : at + len(piece.data)] = piece.data
        at += len(piece.data)
    return content
