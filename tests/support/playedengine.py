"""The engine of an epoch (`node.daemon.epoch.StageEngine`), as its member's daemon sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sealring.mesh.errors import EpochEnded
from sealring.node.daemon.engine_process import EngineFigures
from sealring.v1 import engine_pb2, trace_pb2


async def _at_once(name: str) -> None:
    return


class PlayedEngine:
    """Keeps the commands that it was given, and answers none. What it is asked for waits at `gate`."""

    def __init__(self, gate: Callable[[str], Awaitable[None]] = _at_once) -> None:
        self._gate = gate
        self.figures, self.computes_on = EngineFigures(steps=5, memory=77), "Metal"
        self.loaded = engine_pb2.StageLoaded(
            kv_bytes_per_token=3,
            kv_bytes_per_row=4,
            capabilities=["tools"],
            device=b"GPU-1",
            vision_not_installed=True,
            caches=b"own",
        )
        self.work: list[engine_pb2.EngineCommand] = []
        self.waited_for: list[int] = []
        """How many commands it had each time somebody waited until it had taken them."""
        self.log: list[str] = []
        """What was done with it otherwise."""
        self.opened: engine_pb2.OpenEngineEpoch | None = None
        self.descriptors = 0
        self.disks: list[str] = []
        self.row_keys: list[bytes] = []
        self.close_fails = False

    async def open_epoch(
        self, command: engine_pb2.OpenEngineEpoch, descriptors: tuple[int, ...], sink: Any
    ) -> engine_pb2.EpochOpened:
        self.opened, self.descriptors = command, len(descriptors)
        self.log.append("open")
        await self._gate("open")
        return engine_pb2.EpochOpened()

    async def join_group(self, command: engine_pb2.JoinGroup, seconds: float) -> None:
        self.log.append(f"join {command.backend} {' '.join([*command.addresses, *command.rdma_devices])}")
        await self._gate("join")

    async def close_epoch(self) -> None:
        self.log.append("close")
        if self.close_fails:
            raise EpochEnded("it hangs")

    async def stop(self) -> None:
        self.log.append("stop")

    def use_disk(self, command: engine_pb2.UseDisk) -> None:
        self.disks.append(command.disk.root)

    def seal_rows(self, key: bytes) -> None:
        self.row_keys.append(key)

    def send_work(self, command: bytes) -> None:
        self.work.append(engine_pb2.EngineCommand.FromString(command))

    async def drained(self) -> None:
        self.waited_for.append(len(self.work))

    async def trace(self, since: int) -> trace_pb2.ProcessTrace:
        return trace_pb2.ProcessTrace(since=since)

    def kill(self) -> None:
        self.log.append("kill")
