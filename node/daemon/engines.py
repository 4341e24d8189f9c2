"""The node's engine processes: one for each seat with weights, and a spare one, which measures models.

An engine starts when it is first needed. None loads weights before engines that are stopping have ended: the
memory may not hold both.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import structlog

from sealring.mesh.errors import DeadlineExceeded, EpochEnded, InvalidInput, NotFound
from sealring.mesh.system.pace import Reached
from sealring.node.daemon.cost_tables import CostTables
from sealring.node.daemon.engine_process import EngineProcess, StageKey
from sealring.node.daemon.fetching import Fetcher
from sealring.node.daemon.supervisor import Child, Spawn
from sealring.node.models.folders import FolderState, local_model, not_found
from sealring.node.models.kept import check_commit, commit_of, hub_files_of, note_of
from sealring.v1 import engine_pb2, model_pb2

log = structlog.get_logger()

USABLE_SHARE = 0.75
"""Share of all memory when the compute device names no limit: macOS lets a GPU wire this much by default."""

_SYSTEM_BYTES = 4 << 30
"""Left to the system when the owner lets the GPU wire more (`iogpu.wired_limit_mb`)."""


class MemoryMeter:
    """Measures this machine against the limits of its owner and of its compute device."""

    def __init__(self, configured: int | None, computes_on: str = "") -> None:
        self._configured = configured
        self.computes_on = computes_on
        """The kind of the compute device; empty before an engine has said so, or the owner."""
        self._device: int | None = None
        self.total = psutil.virtual_memory().total
        """Bytes of this machine."""
        self.overhead = 0
        """Bytes that each engine beyond the first takes beside weights and KV caches."""
        self.longest_chunk = 0
        """Tokens of a prompt's chunk by which the compute device gains; 0 before an engine has said so."""

    def set_device(self, limit: int, overhead: int, longest_chunk: int) -> None:
        """Takes the figures that an engine process reported, two in bytes; a limit of 0 means none."""
        self._device, self.overhead, self.longest_chunk = limit or None, overhead, longest_chunk

    @property
    def usable(self) -> int:
        """Bytes for weights and KV caches of this node, including those that are loaded now."""
        share = int(self.total * USABLE_SHARE)
        most = share if self._device is None else max(share, self.total - _SYSTEM_BYTES)
        limits = [most, self._device, self._configured]
        return min(limit for limit in limits if limit is not None)


_MAX_PROFILES = 32
_MAX_NAME = 1024
_SPARE_SECONDS = 300.0

T = TypeVar("T")


class EngineKeeper:
    """Starts, lends and ends engines, and finds and measures models with them. Use it from one event loop."""

    def __init__(
        self,
        folders: Sequence[Path],
        meter: MemoryMeter,
        fetcher: Fetcher,
        tables: CostTables,
        *,
        on_cpu: bool = False,
        spawn: Spawn = Child.spawn,
    ) -> None:
        """`on_cpu` keeps all engines off a GPU."""
        self._on_cpu = on_cpu
        self._folders = folders
        self._meter = meter
        self._fetcher = fetcher
        self._tables = tables
        self._spawn = spawn
        # A WeakSet would go through them in the order of their addresses, which differs from run to run.
        self._seats: weakref.WeakKeyDictionary[SeatEngine, None] = weakref.WeakKeyDictionary()
        self._spare = _Place()
        self._turn = asyncio.Lock()
        self._profiling = asyncio.Lock()
        self._taking = asyncio.Lock()
        self._profiles: OrderedDict[tuple[tuple[FolderState, ...], int], model_pb2.ModelProfile] = (
            OrderedDict()
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: set[asyncio.Task[Any]] = set()
        self._spare_over: asyncio.TimerHandle | None = None

    def seat(self) -> SeatEngine:
        """An engine slot for one more seat."""
        made = SeatEngine(self)
        self._seats[made] = None
        return made

    @property
    def memory_used(self) -> int:
        """Bytes that engines hold, as far as they have reported them."""
        return sum(_held(place.process) for place in (self._spare, *self._seats))

    @property
    def stored(self) -> list[engine_pb2.StoredFigures]:
        """What each engine says of the prefixes on this node's disk."""
        engines = [seat.process for seat in self._seats if seat.process is not None]
        return [engine.figures.stored for engine in engines if engine.figures.stored is not None]

    async def profile(
        self, name: str, ranks: int = 0, draft: str = "", adapter: str = ""
    ) -> model_pb2.ModelProfile:
        """Measures a model, or the share of it that one of `ranks` ranks holds; 0 means the whole. A folder
        that has not changed is not measured again. With `draft` the profile of that draft model is in it,
        unless the node lacks that. `adapter` names a folder with an adapter by which the model is tuned.

        Raises NotFound, InvalidInput, ModelError (also DRAFT_NOT_ALIKE), EpochEnded, DeadlineExceeded.
        """
        path = await self.find(name)
        found = await self._profile(path, ranks, adapter=await self._adapter(adapter))
        if not draft:
            return found
        both = model_pb2.ModelProfile()
        both.CopyFrom(found)
        try:
            both.draft.CopyFrom(await self._profile(await self.find(draft), 0, path))
        except NotFound as error:
            both.fetches_draft = error.metadata.get("fetchable") == "yes"
        return both

    async def _adapter(self, name: str) -> Path | None:
        """The folder of an adapter. Raises as `find`, but NotFound with ADAPTER_NOT_FOUND."""
        try:
            return await self.find(name) if name else None
        except NotFound as error:
            raise NotFound(
                f"there is no adapter {name[:200]}",
                hint="put its folder into the nodes' model folders, and name it as they do",
                reason="ADAPTER_NOT_FOUND",
                **error.metadata,
            ) from None

    async def _profile(
        self, path: Path, ranks: int, model: Path | None = None, adapter: Path | None = None
    ) -> model_pb2.ModelProfile:
        """The profile of a folder, tuned by an adapter if one is given; of a draft model for that at `model`,
        if one is given."""
        folders = (path, model, adapter)
        states = [await asyncio.to_thread(FolderState.read, one) for one in folders if one is not None]
        key = (tuple(states), ranks)
        if key in self._profiles:
            return self._profiles[key]

        def measure(engine: EngineProcess) -> Coroutine[Any, Any, model_pb2.ModelProfile]:
            draft, tuned = str(path) if model is not None else "", str(adapter) if adapter is not None else ""
            return engine.profile(str(model or path), ranks, draft, tuned)

        profile = await self.shielded(self._measure(measure))
        note = await asyncio.to_thread(note_of, path)
        profile.commit = commit_of(path, note)
        profile.hub_files = await asyncio.to_thread(hub_files_of, path, note)
        self._profiles[key] = profile
        if len(self._profiles) > _MAX_PROFILES:
            self._profiles.popitem(last=False)
        return profile

    async def for_stage(
        self,
        name: str,
        layers: tuple[int, int] | None,
        commit: str = "",
        hub_files: str = "",
        progress: Callable[[Reached], None] = lambda reached: None,
    ) -> Path:
        """A folder with the parts of a model that `layers` need; None needs the whole model.

        Missing parts are fetched if the owner allows it: from the hub at `commit`, or at the commit of the
        parts that are here, if its `hub_files` are the same. `progress` hears how far that is.

        Raises as `find`, what `Fetcher.fetch` raises, and what measuring raises.
        """
        needs = None if layers is None else partial(self._ranges, *layers)
        try:
            path = await self.find(name)
        except NotFound as error:
            if error.metadata.get("fetchable") != "yes":
                raise
        else:
            own = self._fetcher.place(name)  # parts that the owner's folder lacks may have been fetched there
            for place in (path, own) if own != path and own.is_dir() else (path,):
                note = await asyncio.to_thread(note_of, place)
                here = commit_of(place, note)
                if here and hub_files and hub_files == await asyncio.to_thread(hub_files_of, place, note):
                    commit = here
                check_commit(name, here, commit)
                if note is None or not note.is_part or (needs is not None and note.holds(await needs(place))):
                    return place
        return await self._fetcher.fetch(name, needs, commit, progress)

    async def _ranges(self, lo: int, hi: int, path: Path) -> list[tuple[str, int, int]]:
        return await self.shielded(self._measure(lambda engine: engine.ranges(str(path), lo, hi)))

    async def find(self, name: str) -> Path:
        """A model's folder.

        Raises NotFound (MODEL_NOT_FOUND, MODEL_FOLDER_UNREADABLE), InvalidInput (BAD_MODEL_NAME), and
        Unavailable (MODEL_FOLDER_UNREADABLE) for a path. The metadata `fetchable` of NotFound says that the
        node would fetch the model.
        """
        if not name or len(name) > _MAX_NAME:
            raise InvalidInput("a model's name is empty or too long", reason="BAD_MODEL_NAME", param="model")
        try:
            path = await asyncio.to_thread(self._find, name)
            if path is not None:
                return path
            missing = not_found(name, f"fetch it: sealring model pull {name}, or copy it to the node")
        except NotFound as error:
            missing = error
        if self._fetcher.allowed and not name.startswith("/"):
            missing.metadata["fetchable"] = "yes"
        raise missing

    def _find(self, name: str) -> Path | None:
        path = local_model(name, self._folders)
        if path is not None and self._fetcher.leaves(path):
            raise not_found(name, "it is being removed: try again")
        return path

    async def stop(self) -> None:
        """Ends all engines and all work with them."""
        self._keep_spare_no_more()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(place.end() for place in (self._spare, *self._seats)))
        if self._ending:
            await asyncio.wait(self._ending)

    async def _measure(self, ask: Callable[[EngineProcess], Coroutine[Any, Any, T]]) -> T:
        """Asks an engine without weights: in one that serves, rows would wait."""
        if any(seat.stage is not None for seat in self._seats):
            return await self._measure_apart(ask)
        async with self._turn:
            engine = await self._any_spare()
            self._keep_spare_a_while()
        try:
            return await ask(engine)
        except DeadlineExceeded:
            engine.kill()  # it would stay busy with that folder
            raise

    async def _measure_apart(self, ask: Callable[[EngineProcess], Coroutine[Any, Any, T]]) -> T:
        """Asks an engine that leaves the GPU to the engines that serve."""
        async with self._profiling:
            engine = await self._start(cpu=True)
            try:
                return await ask(engine)
            finally:
                await engine.stop()

    async def take(self) -> EngineProcess:
        """An engine without weights for a seat that will load some: the spare one, or a new one.

        Raises EpochEnded, DeadlineExceeded, OSError.
        """
        async with self._turn:
            self._keep_spare_no_more()
            engine = await self._any_spare()
            self._spare.process = None
            return engine

    async def load(self, engine: EngineProcess, stage: StageKey, progress: Callable[[Reached], None]) -> None:
        """Has an engine load a stage, unless it has; its cost table is that of all starts.

        Raises ModelError, ResourceExhausted, EpochEnded, DeadlineExceeded.
        """
        if engine.loaded is not None:
            return
        loaded = await engine.load(stage, progress)
        async with self._taking:
            device = engine.computes_on, engine.memory_limit
            await asyncio.to_thread(self._tables.take, stage, device, loaded)

    async def vacated(self) -> None:
        """Waits until stopping engines have freed their memory."""
        while self._ending:
            await asyncio.wait(self._ending)

    def ending(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs `work`, which ends an engine. No engine loads weights until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _any_spare(self) -> EngineProcess:
        engine = self._spare.process
        if engine is None or not engine.alive:
            await self._spare.end()
            engine = self._spare.process = await self._start()
            self._meter.set_device(engine.memory_limit, engine.overhead, engine.longest_chunk)
            self._meter.computes_on = engine.computes_on
        return engine

    async def _start(self, *, cpu: bool = False) -> EngineProcess:
        offline = {"HF_HUB_OFFLINE": "1"}
        return await EngineProcess.start(
            on_end=self._ended, environment=offline, cpu=cpu or self._on_cpu, spawn=self._spawn
        )

    def _ended(self, engine: EngineProcess) -> None:
        for place in (self._spare, *self._seats):
            place.ended(engine)
        self.ending(engine.stop())

    def _keep_spare_a_while(self) -> None:
        """Keeps the spare engine for the deployment that often follows a profile."""
        self._keep_spare_no_more()
        loop = asyncio.get_running_loop()
        self._spare_over = loop.call_later(_SPARE_SECONDS, lambda: self._go(self.drop_spare()))

    def _keep_spare_no_more(self) -> None:
        if self._spare_over is not None:
            self._spare_over.cancel()
            self._spare_over = None

    async def drop_spare(self) -> None:
        """Ends the spare engine."""
        async with self._turn:
            if self._spare.process is not None:
                log.info("spare_engine_ended")
                await self._spare.end()

    async def shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which goes on when its caller is cancelled."""
        return await asyncio.shield(self._go(work))

    def _go(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as read: the caller may have been cancelled


class _Place:
    """A slot for one engine process."""

    def __init__(self) -> None:
        self.process: EngineProcess | None = None

    async def end(self) -> None:
        """Ends the engine."""
        engine = self.process
        if engine is not None:
            await engine.stop()
            if self.process is engine:  # kept until it has ended, so that `stop` waits for it
                self.process = None

    def ended(self, engine: EngineProcess) -> None:
        """Empties the slot if its process has ended by itself."""
        if engine is self.process:
            self.process = None


class SeatEngine(_Place):
    """The engine of one seat; never two with weights at once. Work goes on when its caller is cancelled."""

    def __init__(self, keeper: EngineKeeper) -> None:
        super().__init__()
        self._keeper = keeper
        self._turn = asyncio.Lock()
        self._wanted: StageKey | None = None

    @property
    def stage(self) -> StageKey | None:
        """The stage that the engine has loaded, or loads."""
        engine = self.process
        return engine.stage if engine is not None and engine.alive else None

    async def with_stage(self, stage: StageKey, progress: Callable[[Reached], None]) -> EngineProcess:
        """The engine with `stage` loaded.

        Raises NotFound, ModelError, ResourceExhausted, EpochEnded, DeadlineExceeded.
        """
        self._wanted = stage  # at once: a drop may come before the work begins
        return await self._keeper.shielded(self._with_stage(stage, progress))

    async def drop(self) -> None:
        """Ends the engine and frees its memory, also in the middle of a load."""
        self._wanted = None
        if self.process is not None and self.process.loaded is None:
            self.process.kill()
        async with self._turn:
            await self.end()

    async def _with_stage(self, stage: StageKey, progress: Callable[[Reached], None]) -> EngineProcess:
        if self.process is not None and self.process.stage not in (None, stage):
            self.process.kill()
        await self._keeper.vacated()
        async with self._turn:
            if self.process is None or not self.process.alive:
                await self.end()
                self.process = await self._keeper.take()
            engine = self.process
            if self._wanted != stage:
                await self.end()
                raise EpochEnded("the stage is not wanted any more", reason="EPOCH_ENDED")
            try:
                await self._keeper.load(engine, stage, progress)
            except BaseException:
                await self.end()
                raise
            return engine


def _held(engine: EngineProcess | None) -> int:
    """Bytes that an engine holds, as far as it has reported them."""
    if engine is None or not engine.alive:
        return 0
    return max(engine.figures.memory, engine.loaded.weight_bytes if engine.loaded else 0)
