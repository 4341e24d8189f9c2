"""The models of a node: profiles, fetching and removing them, and the digests of those that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from sealring.mesh.errors import ModelError, NotFound, Unavailable
from sealring.node.daemon.engines import EngineKeeper
from sealring.node.daemon.epoch import Phase
from sealring.node.daemon.fetching import Fetcher, no_layers
from sealring.node.daemon.seats import Seats
from sealring.v1 import membership_pb2, model_pb2

log = structlog.get_logger()

_LOOK_SECONDS = 10.0


class ModelKeeper:
    """Looks after the models of one daemon. Use it from one event loop."""

    def __init__(
        self,
        fetcher: Fetcher,
        engines: EngineKeeper,
        seats: Seats,
        forget: Callable[[str], Awaitable[None]],
    ) -> None:
        """`forget` destroys what is stored of the prefixes of a model."""
        self._forget = forget
        self._fetcher = fetcher
        self._engines = engines
        self._seats = seats

    async def run(self) -> None:
        """Looks for model folders every 10 s, until it is cancelled."""
        while True:
            await self._fetcher.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def profile(self, request: membership_pb2.ProfileRequest) -> model_pb2.ModelProfile:
        """The profile of a model, or of one rank's share of it. Raises as `EngineKeeper.profile`."""
        return await self._engines.profile(request.model, request.ranks, request.draft, request.adapter)

    async def change(self, request: membership_pb2.ChangeModel) -> None:
        """Removes a model, or starts to fetch one, whose progress heartbeats report.

        Raises as `Fetcher.remove` and `Fetcher.begin`.
        """
        if request.remove:
            await self._fetcher.remove(request.model, self._in_use)
            await self._forget(request.model)
            await self._fetcher.look()
        else:
            self._fetcher.begin(request.model, no_layers if request.to_plan else None)

    def _in_use(self) -> list[Path]:
        """The folders of models that are loaded, or that a running epoch may load."""
        stages = [seat.stage for seat in self._seats if seat.stage is not None]
        epochs = [seat.epoch for seat in self._seats if seat.epoch and seat.phase is not Phase.ENDED]
        names = {epoch.plan.model for epoch in epochs}
        names |= {epoch.plan.draft.model for epoch in epochs if epoch.plan.draft is not None}
        names |= {epoch.plan.adapter for epoch in epochs if epoch.plan.adapter}
        names |= {name.rpartition("/")[2] for name in names if not name.startswith("/")}
        loaded = [Path(stage.path) for stage in stages]
        loaded += [Path(stage.draft.path) for stage in stages if stage.draft is not None]
        loaded += [Path(stage.adapter) for stage in stages if stage.adapter]
        return [*loaded, *map(self._fetcher.place, sorted(names))]

    async def served(self) -> tuple[bytes, ...]:
        """The digests of the models of all rings that are up, sorted, from the files as they are now.

        A model whose files are gone has the digest of 32 zero bytes. Two rings with the same files give the
        same digest twice, because the coordinator counts them.
        """
        stages = [seat.stage for seat in self._seats if seat.phase is Phase.UP]
        digests = [await self._digest(stage.path, stage.adapter) for stage in stages if stage is not None]
        return tuple(sorted(digest for digest in digests if digest is not None))

    async def _digest(self, path: str, adapter: str) -> bytes | None:
        """The digest of a folder and an adapter's. None while they cannot be read: the weights are in memory,
        and the ring goes on."""
        try:
            return bytes.fromhex((await self._engines.profile(path, adapter=adapter)).digest)
        except (NotFound, ModelError):
            return bytes(32)
        except Unavailable as error:
            if error.reason != "MODEL_FOLDER_UNREADABLE":
                raise
            log.warning("served_model_unreadable", why=error.message)
            return None
