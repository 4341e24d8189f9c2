"""The node's engine process: started when first needed, kept while in use; never two with weights at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from sealring.mesh.errors import DeadlineExceeded, InvalidInput, NotFound
from sealring.node.daemon.engine_process import EngineProcess, StageKey
from sealring.node.daemon.fetching import Fetcher
from sealring.node.daemon.memory import MemoryMeter
from sealring.node.models.folders import FolderState, local_model, not_found
from sealring.node.models.kept import note_of
from sealring.v1 import model_pb2

log = structlog.get_logger()

_MAX_PROFILES = 32
_MAX_NAME = 1024
_SPARE_SECONDS = 300.0

T = TypeVar("T")


class EngineKeeper:
    """Answers for profiles and loaded stages. A member serves one ring, so one engine is enough; beside one
    with weights there is another for as long as it measures a model."""

    def __init__(self, folders: Sequence[Path], meter: MemoryMeter, fetcher: Fetcher) -> None:
        self._folders = folders
        self._meter = meter
        self._fetcher = fetcher
        self._engine: EngineProcess | None = None
        self._turn = asyncio.Lock()
        self._profiling = asyncio.Lock()
        self._profiles: OrderedDict[tuple[FolderState, int], model_pb2.ModelProfile] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reaping: set[asyncio.Task[None]] = set()
        self._spare: asyncio.TimerHandle | None = None

    @property
    def memory_used(self) -> int:
        """Bytes that the engine holds, as far as it has told."""
        engine = self._engine
        if engine is None or not engine.alive:
            return 0
        return max(engine.figures.memory, engine.loaded.weight_bytes if engine.loaded else 0)

    @property
    def stage(self) -> StageKey | None:
        """What the engine has loaded."""
        engine = self._engine
        return engine.stage if engine is not None and engine.alive else None

    async def profile(self, name: str, ranks: int = 0) -> model_pb2.ModelProfile:
        """Measures a model by its name, or what one of so many ranks holds of it; what has not changed since
        is not measured again.

        Raises NotFound, InvalidInput, ModelError, EpochEnded, DeadlineExceeded.
        """
        path = await self.find(name)
        key = (await asyncio.to_thread(FolderState.read, path), ranks)
        if key in self._profiles:
            return self._profiles[key]
        profile = await self._shielded(self._measure(lambda engine: engine.profile(str(path), ranks)))
        self._profiles[key] = profile
        if len(self._profiles) > _MAX_PROFILES:
            self._profiles.popitem(last=False)
        return profile

    async def with_stage(self, stage: StageKey, progress: Callable[[float], None]) -> EngineProcess:
        """The engine with `stage` loaded. A caller that gives up leaves the load running.

        Raises NotFound, ModelError, ResourceExhausted, EpochEnded, DeadlineExceeded.
        """
        return await self._shielded(self._with_stage(stage, progress))

    async def for_stage(self, name: str, layers: tuple[int, int] | None) -> Path:
        """A model's folder with what these layers need, None: with all. What is not here is brought here,
        where the owner allows it.

        Raises as `find`, what `Fetcher.fetch` raises, and what measuring raises.
        """
        needs = None if layers is None else partial(self._ranges, *layers)
        try:
            path = await self.find(name)
        except NotFound as error:
            if error.metadata.get("fetchable") != "yes":
                raise
        else:
            own = self._fetcher.place(name)  # more than the owner's part of it may have come there
            for place in (path, own) if own != path and own.is_dir() else (path,):
                note = await asyncio.to_thread(note_of, place)
                if note is None or note.whole or (needs is not None and note.holds(await needs(place))):
                    return place
        return await self._fetcher.fetch(name, needs)

    async def _ranges(self, lo: int, hi: int, path: Path) -> list[tuple[str, int, int]]:
        return await self._shielded(self._measure(lambda engine: engine.ranges(str(path), lo, hi)))

    async def find(self, name: str) -> Path:
        """A model's folder.

        Raises NotFound (MODEL_NOT_FOUND), InvalidInput (BAD_MODEL_NAME). A NotFound says with `fetchable`
        that the node would fetch the model.
        """
        if not name or len(name) > _MAX_NAME:
            raise InvalidInput("a model's name is empty or too long", reason="BAD_MODEL_NAME", param="model")
        try:
            path = await asyncio.to_thread(local_model, name, self._folders)
            if path is not None:
                return path
            missing = not_found(name, f"fetch it: sealring model pull {name}, or copy it to the node")
        except NotFound as error:
            missing = error
        if self._fetcher.allowed and not name.startswith("/"):
            missing.metadata["fetchable"] = "yes"
        raise missing

    async def drop(self) -> None:
        """Ends the engine and frees its memory."""
        await self._shielded(self._drop())

    async def stop(self) -> None:
        """Ends everything, whatever is under way."""
        self._cancel_spare()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._stop_engine()
        if self._reaping:
            await asyncio.wait(self._reaping)

    async def _measure(self, ask: Callable[[EngineProcess], Coroutine[Any, Any, T]]) -> T:
        """Measured by an engine without weights: one that serves would make its rows wait."""
        engine = self._engine
        if engine is None or not engine.alive:
            async with self._turn:
                engine = await self._any()
                self._keep_spare()
        if engine.stage is not None:
            return await self._measure_apart(ask)
        try:
            return await ask(engine)
        except DeadlineExceeded:
            engine.kill()  # whatever it does with that folder, it would go on
            raise

    async def _measure_apart(self, ask: Callable[[EngineProcess], Coroutine[Any, Any, T]]) -> T:
        """Beside an engine that serves, whose GPU the other leaves alone."""
        async with self._profiling:
            engine = await self._start(cpu=True)
            try:
                return await ask(engine)
            finally:
                await engine.stop()

    async def _with_stage(self, stage: StageKey, progress: Callable[[float], None]) -> EngineProcess:
        if self._engine is not None and self._engine.stage not in (None, stage):
            self._engine.kill()
        async with self._turn:
            self._cancel_spare()
            engine = await self._any()
            try:
                await engine.load(stage, progress)
            except BaseException:
                await self._stop_engine()
                raise
            return engine

    async def _drop(self) -> None:
        async with self._turn:
            await self._stop_engine()

    async def _any(self) -> EngineProcess:
        if self._engine is None or not self._engine.alive:
            await self._stop_engine()
            self._engine = await self._start()
            self._meter.set_device_limit(self._engine.memory_limit)
        return self._engine

    async def _start(self, *, cpu: bool = False) -> EngineProcess:
        return await EngineProcess.start(on_end=self._ended, environment={"HF_HUB_OFFLINE": "1"}, cpu=cpu)

    def _ended(self, engine: EngineProcess) -> None:
        if engine is self._engine:
            self._engine = None
        task = asyncio.get_running_loop().create_task(engine.stop())
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    async def _stop_engine(self) -> None:
        self._cancel_spare()
        engine = self._engine
        if engine is not None:
            await engine.stop()
            if self._engine is engine:  # known until it has ended: who stops all engines waits for it
                self._engine = None

    def _keep_spare(self) -> None:
        """An engine without weights waits a while for the deployment that often follows a profile."""
        self._cancel_spare()
        loop = asyncio.get_running_loop()
        self._spare = loop.call_later(_SPARE_SECONDS, lambda: self._go(self._drop_spare()))

    def _cancel_spare(self) -> None:
        if self._spare is not None:
            self._spare.cancel()
            self._spare = None

    async def _drop_spare(self) -> None:
        async with self._turn:
            if self._engine is not None and self._engine.stage is None:
                log.info("spare_engine_ended")
                await self._stop_engine()

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._go(work))

    def _go(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits sees it; a caller that gave up does not
