"""The engine of an epoch that is up, as a member's Control service sees it."""

from __future__ import annotations

from sealring.node.daemon.engine_process import EngineFigures
from sealring.v1 import engine_pb2


class PlayedEngine:
    """Keeps the commands that it was given, and answers none."""

    def __init__(self) -> None:
        self.figures = EngineFigures(steps=5, memory=77)
        self.loaded = engine_pb2.StageLoaded(
            kv_bytes_per_token=3,
            kv_bytes_per_row=4,
            capabilities=["tools"],
            device=b"GPU-1",
            vision_not_installed=True,
        )
        self.work: list[engine_pb2.EngineCommand] = []
        self.waited_for: list[int] = []
        """How many commands it had each time somebody waited until it had taken them."""

    def send_work(self, command: bytes) -> None:
        self.work.append(engine_pb2.EngineCommand.FromString(command))

    async def drained(self) -> None:
        self.waited_for.append(len(self.work))

    async def close_epoch(self) -> None:
        return

    def kill(self) -> None:
        return
