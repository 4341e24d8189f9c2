"""The daemon's part in stored prefixes: it makes the keys of engines, and destroys what they come from."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import structlog

from sealring.mesh.crypto.identity import Signer
from sealring.mesh.errors import SealringError
from sealring.node.daemon.plan import EpochPlan
from sealring.node.stored.asking import BlocksAsker
from sealring.node.stored.giving import MAX_RANKS
from sealring.node.stored.keys import (
    SecretHolder,
    StageIdentity,
    expand,
    forget,
    model_folder,
    model_secret,
    stage_key,
)
from sealring.node.stored.naming import Naming
from sealring.v1 import engine_pb2, membership_pb2

log = structlog.get_logger()


class PrefixDisks:
    """The disks of one daemon's epochs. Use it from one event loop."""

    def __init__(
        self, root: Path, cluster: str, signer: Signer, size: int | None, asker: BlocksAsker
    ) -> None:
        """`size` bounds the bytes, 0 turns the disk off, None leaves the bound to the free disk."""
        self._root = root
        self._cluster = cluster
        self._signer = signer
        self._size = size
        self._asker = asker
        self._warned = False

    async def of(
        self,
        plan: EpochPlan,
        caches: Sequence[bytes],
        former: Sequence[membership_pb2.FormerRing] = (),
    ) -> engine_pb2.PrefixDisk | None:
        """The folder and the key with which an epoch's engine stores prefixes; None if it stores none.

        `caches` says with what each rank computes them, and `former` is of rings of before, as in
        CommitEpoch. If one rank does not say it, there is no disk: blocks would be stale once that member's
        weights were replaced.

        Tensor rings store none: no rank can compute its caches alone.
        """
        if self._size == 0 or plan.backend or not isinstance(self._signer, SecretHolder):
            return None
        if len(caches) != plan.size or not all(caches):
            return None
        releases = plan.releases if len(plan.releases) > 1 else ()
        stage = StageIdentity(
            self._cluster,
            plan.deployment,
            plan.model_digest,
            plan.held,
            plan.kv_bits,
            releases,
            tuple(caches),
        )
        try:
            key = await asyncio.to_thread(stage_key, self._root, stage, plan.model, self._signer)
            secret = await asyncio.to_thread(model_secret, self._root, plan.model_digest, self._signer)
        except (OSError, SealringError) as error:
            if not self._warned:
                self._warned = True
                log.warning("prefix_disk_unusable", folder=str(self._root), why=str(error))
            return None
        disk = engine_pb2.PrefixDisk(root=str(self._root), key=key, size=self._size)
        disk.model = str(model_folder(self._root, plan.model_digest))
        naming = Naming(self._root, secret, self._cluster, plan.deployment, plan.model_digest)
        for ring in former if not releases else ():
            if parts := parts_of(plan, caches, ring):
                if plan.rank == 0 and not disk.former:  # the newest of which there is something
                    await self._name(plan, naming, ring)
                for part in parts:
                    layers = part.first, part.end
                    if not part.member:
                        layers = part.stage_first, part.stage_end
                    had = dataclasses.replace(stage, layers=layers, caches=tuple(part.caches))
                    part.key = expand(secret, had.packed())
                disk.former.add(parts=parts)
        disk.names, _ = await asyncio.to_thread(naming.read)
        return disk

    async def _name(self, plan: EpochPlan, naming: Naming, ring: membership_pb2.FormerRing) -> None:
        """Takes over the key by which the head of a ring before named prompts, if it gives it."""
        head, mark = ring.stages[0].member, sha256(ring.SerializeToString(deterministic=True)).digest()
        key, chosen = await asyncio.to_thread(naming.read)
        if head == plan.members[0].id or chosen == mark:
            return
        key = await self._asker.names(plan.ring, head) or key
        try:
            await asyncio.to_thread(naming.choose, key, mark)
        except OSError as error:
            log.warning("names_not_kept", folder=str(self._root), why=error.strerror)

    async def bring(
        self, plan: EpochPlan, disk: engine_pb2.PrefixDisk, asked: engine_pb2.BringBlocks
    ) -> None:
        """Stores what other members have of what an epoch's engine asks for."""
        await self._asker.bring(plan.ring, plan.held, plan.kv_bits, disk, asked)

    async def run(self) -> None:
        """Destroys what is there if the disk is turned off."""
        if self._size == 0:
            await self.forget()

    async def forget(self, model: str | None = None) -> None:
        """Destroys what is stored of one model, by its name, or of all."""
        try:
            await asyncio.to_thread(forget, self._root, model)
        except (OSError, SealringError) as error:
            log.warning("stored_prefixes_left", folder=str(self._root), why=str(error))


def parts_of(
    plan: EpochPlan, caches: Sequence[bytes], ring: membership_pb2.FormerRing
) -> list[engine_pb2.FormerPart]:
    """The parts of a former ring's stages that this member has the layers of now, without their keys.

    None unless each member that is still in the ring computes caches with what it did then, and one is: the
    blocks of others are by the same software and weights as long as theirs fit together. Of layers that two
    members had it takes its own.
    """
    own, now = plan.members[plan.rank].id, dict(zip((one.id for one in plan.members), caches, strict=True))
    staying = [one for one in ring.stages if one.member in now]
    if len(ring.stages) > MAX_RANKS or not staying or any(one.caches != now[one.member] for one in staying):
        return []
    parts, (at, last) = [], plan.held
    while had := [one for one in ring.stages if at < last and one.first_layer <= at < one.end_layer]:
        one = max(had, key=lambda each: (each.member == own, each.end_layer))
        first, at = at, min(one.end_layer, last)
        parts.append(
            engine_pb2.FormerPart(
                stage_first=one.first_layer,
                stage_end=one.end_layer,
                first=first,
                end=at,
                member=one.member if one.member != own else "",
                caches=[each.caches for each in ring.stages],
            )
        )
    return parts if at == last else []
