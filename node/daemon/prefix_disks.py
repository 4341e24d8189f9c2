"""The daemon's part in stored prefixes: it makes the keys of engines, and destroys what they come from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from sealring.mesh.crypto.identity import Signer
from sealring.mesh.errors import SealringError
from sealring.node.daemon.plan import EpochPlan
from sealring.node.stored.keys import SecretHolder, StageIdentity, forget, model_folder, stage_key
from sealring.v1 import engine_pb2

log = structlog.get_logger()


class PrefixDisks:
    """The disks of one daemon's epochs. Use it from one event loop."""

    def __init__(self, root: Path, cluster: str, signer: Signer, size: int | None) -> None:
        """`size` bounds the bytes, 0 turns the disk off, None leaves the bound to the free disk."""
        self._root = root
        self._cluster = cluster
        self._signer = signer
        self._size = size
        self._warned = False

    async def of(self, plan: EpochPlan, caches: Sequence[bytes]) -> engine_pb2.PrefixDisk | None:
        """The folder and the key with which an epoch's engine stores prefixes; None if it stores none.

        `caches` says with what each rank computes them, as in CommitEpoch. If one rank does not say it, there
        is no disk: blocks would be stale once that member's weights were replaced.

        Tensor rings store none: no rank can compute its caches alone.
        """
        if self._size == 0 or plan.backend or not isinstance(self._signer, SecretHolder):
            return None
        if len(caches) != plan.size or not all(caches):
            return None
        stage = StageIdentity(
            self._cluster,
            plan.deployment,
            plan.model_digest,
            plan.layers,
            plan.kv_bits,
            plan.releases if len(plan.releases) > 1 else (),
            tuple(caches),
        )
        try:
            key = await asyncio.to_thread(stage_key, self._root, stage, plan.model, self._signer)
        except (OSError, SealringError) as error:
            if not self._warned:
                self._warned = True
                log.warning("prefix_disk_unusable", folder=str(self._root), why=str(error))
            return None
        model = model_folder(self._root, plan.model_digest)
        return engine_pb2.PrefixDisk(root=str(self._root), model=str(model), key=key, size=self._size)

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
