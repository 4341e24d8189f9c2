"""The Blocks service: hands the caches of layers that this member had on to the member that has them now.

A caller gets layers that the roster gives it now, of its own ring's deployment, and no file whose name it
does not know: that is in a head's parameter record. What it gets was computed by this member alone, as were
the activations that it once sent along the ring; nobody else can vouch for either. A caller that is the head
of a ring now gets the key by which this member names prompts of the ring's deployment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sealring.mesh.crypto.identity import Signer
from sealring.mesh.errors import (
    InvalidInput,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SealringError,
)
from sealring.mesh.ring.prefix_names import Chain
from sealring.mesh.roster.model import Ring, Roster
from sealring.mesh.rpc.limits import Buckets
from sealring.node.models.giving import Streams, member_of, write_piece
from sealring.node.stored.keys import SecretHolder, StageIdentity, expand, model_folder, model_secret
from sealring.node.stored.naming import Naming
from sealring.node.stored.parts import Part
from sealring.node.stored.places import units_of
from sealring.v1 import links_pb2, links_pb2_grpc

SERVICE = links_pb2.DESCRIPTOR.services_by_name["Blocks"].full_name

MAX_PIECE = 1 << 20
"""Bytes."""

MAX_RANKS = 64
_CALLS_PER_SECOND = 4.0
CALLS_AT_ONCE = 32


class BlocksGiver(links_pb2_grpc.BlocksServicer):
    """The Blocks service of one node."""

    def __init__(self, cluster: str, root: Path, signer: Signer, roster: Callable[[], Roster | None]) -> None:
        """`root` is the folder of prefixes, `roster` gives the valid roster in use, or None."""
        self._cluster = cluster
        self._root = root
        self._signer = signer
        self._roster = roster
        self._streams = Streams(_busy)
        self._calls = Buckets(_CALLS_PER_SECOND, CALLS_AT_ONCE)

    async def Read(  # type: ignore[override]  # noqa: N802 - writes to the context, named by the rpc
        self, request: links_pb2.ReadBlocksRequest, context: Any
    ) -> None:
        """Raises PermissionDenied (NOT_A_MEMBER, NOT_ITS_LAYERS), InvalidInput (BAD_BLOCKS, BAD_PREFIXES),
        ResourceExhausted (RATE_LIMITED, BLOCKS_BUSY), Unavailable (SLOW_PEER)."""
        caller = member_of(context, self._cluster, self._roster())
        self._calls.check(caller)
        chain, stage = Chain.unpack(request.chain), self._stage(request, caller)
        with self.slot(caller):
            part = await asyncio.to_thread(self._part, stage, request)
            if part is None:
                return
            for unit in units_of(chain)[request.skip :]:
                reading = asyncio.ensure_future(asyncio.to_thread(part.read, chain.scope, unit))
                try:
                    content = await asyncio.shield(reading)
                finally:  # a caller that is gone keeps its slot while a thread reads for it
                    await asyncio.gather(reading, return_exceptions=True)
                if content is None:
                    return
                for start in range(0, len(content), MAX_PIECE):
                    self._stage(request, caller)  # ends the stream of a caller that has lost its layers
                    piece = links_pb2.BlocksPiece(data=bytes(content[start : start + MAX_PIECE]))
                    await write_piece(context, piece)

    async def ReadNames(  # noqa: N802 - as above
        self, request: links_pb2.ReadNamesRequest, context: Any
    ) -> links_pb2.NamesKey:
        """Raises PermissionDenied (NOT_A_MEMBER, NOT_ITS_LAYERS, NOT_THE_HEAD), NotFound (NO_NAMES),
        ResourceExhausted (RATE_LIMITED)."""
        caller = member_of(context, self._cluster, self._roster())
        self._calls.check(caller)
        ring = self._ring(request.ring, caller, 0, 1)
        if ring.members[0].id != caller:
            raise PermissionDenied("only the head of a ring names its prompts", reason="NOT_THE_HEAD")
        digest = ring.model_digest.hex()
        secret = await asyncio.to_thread(self._secret, digest)
        if secret is None:
            raise NotFound("this node has named no prompts of this model", reason="NO_NAMES")
        naming = Naming(self._root, secret, self._cluster, ring.deployment, digest)
        key, _ = await asyncio.to_thread(naming.read)
        return links_pb2.NamesKey(key=key)

    def _ring(self, name: str, caller: str, first: int, end: int) -> Ring:
        """The ring in which the layers [first, end) are the caller's. Raises PermissionDenied
        (NOT_ITS_LAYERS)."""
        roster = self._roster()
        for ring in roster.rings_of(caller) if roster is not None else ():
            lo, hi = ring.member(caller).held
            if ring.id == name and lo <= first < end <= hi:
                return ring
        raise PermissionDenied("the roster does not give the caller these layers", reason="NOT_ITS_LAYERS")

    def _stage(self, request: links_pb2.ReadBlocksRequest, caller: str) -> StageIdentity:
        """The stage that this member had. Raises PermissionDenied (NOT_ITS_LAYERS), InvalidInput
        (BAD_BLOCKS)."""
        ring = self._ring(request.ring, caller, request.first, request.end)
        if (
            not request.stage_first <= request.first < request.end <= request.stage_end
            or not 1 <= len(request.caches) <= MAX_RANKS
        ):
            raise InvalidInput("a request for blocks is malformed", reason="BAD_BLOCKS")
        layers = (request.stage_first, request.stage_end)
        digest = ring.model_digest.hex()
        caches = tuple(request.caches)
        return StageIdentity(self._cluster, ring.deployment, digest, layers, request.kv_bits, (), caches)

    def _part(self, stage: StageIdentity, request: links_pb2.ReadBlocksRequest) -> Part | None:
        """The layers that are asked for; None where nothing was stored of that stage."""
        secret = self._secret(stage.model_digest)
        if secret is None:
            return None
        folder = model_folder(self._root, stage.model_digest)
        first, end = request.first - stage.layers[0], request.end - stage.layers[0]
        return Part.of_stage(self._root, folder, expand(secret, stage.packed()), first, end)

    def _secret(self, model_digest: str) -> bytes | None:
        """The secret of a model; None where nothing was ever stored of it."""
        if not isinstance(self._signer, SecretHolder):
            return None
        try:
            return model_secret(self._root, model_digest, self._signer)
        except (OSError, SealringError):
            return None

    def slot(self, caller: str) -> contextlib.AbstractContextManager[None]:
        """As Streams.slot."""
        return self._streams.slot(caller)


def _busy() -> ResourceExhausted:
    return ResourceExhausted(
        "this node already hands as many blocks on as it may", hint="try again", reason="BLOCKS_BUSY"
    )
