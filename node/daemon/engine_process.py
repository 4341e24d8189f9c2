"""The daemon's side of an engine process: commands with answers, and row events of an epoch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import structlog

from sealring.mesh.clock import awake_clock
from sealring.mesh.errors import EpochEnded, SealringError
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.system.pace import Pace, Reached
from sealring.mesh.system.starting import Starts
from sealring.node.daemon.supervisor import Child, Liveness, Spawn, child_ended, within
from sealring.node.wire.frames import ENGINE_FORM, socket_pair
from sealring.v1 import control_pb2, engine_pb2, model_pb2, trace_pb2

log = structlog.get_logger()

ENGINE_MODULE = "sealring.node.engine.main"

_TIMEOUT = "ENGINE_TIMEOUT"
_STARTS = Starts("engine", 60.0)
_PROFILE_SECONDS = 120.0
_LOAD_SECONDS = 1800.0
_EPOCH_SECONDS = 30.0
_CLOSE_SECONDS = 30.0
_STOP_SECONDS = 2.0
_REAP_SECONDS = 10.0
_TRACE_SECONDS = 5.0

_BUSY = (1.0, 8.0)  # ping interval and deadline in seconds, while steps are coming
_QUIET = (5.0, 8.0)
_LOADING = (10.0, 120.0)

_ROW_EVENTS = frozenset({0x32, 0x3A, 0x42, 0x7A})
"""First bytes of an EngineEvent that holds opened (6), refused (7), done (8) or recalled (15)."""


@dataclass(frozen=True)
class DraftKey:
    """A draft model that the head's engine has loaded, or will load, beside its stage; with `taps`, the
    drafter at the tail."""

    path: str
    digest: str
    kv_bits: int
    context: int


@dataclass(frozen=True)
class StageKey:
    """A stage that an engine has loaded, or will load."""

    path: str
    digest: str
    lo: int
    hi: int
    context: int
    kv_bits: int = 0
    prefill_chunk: int = 0
    max_rows: int = 0
    rank: int = 0
    ranks: int = 0
    """The number of ranks: above 1 in a tensor ring, where each loads its share of every layer."""
    draft: DraftKey | None = None
    mtp: bool = False
    """Whether the ring's tail guesses by the model's MTP head."""
    taps: tuple[int, ...] = ()
    """The layers of the model whose hidden states a drafter at the ring's tail reads."""
    vision: bool = False
    """Whether it is a head with memory for the model's vision tower."""
    adapter: str = ""
    """The folder of an adapter by which the model is tuned."""
    prompt_lo: int = 0
    prompt_hi: int = 0
    """With others than [lo, hi), the layers that compute prompts."""


@dataclass(frozen=True)
class EngineFigures:
    """Newest figures of an engine: steps executed in its epoch, active bytes, microseconds per step, drafts
    made and accepted, and what its node stores of prefixes."""

    steps: int = 0
    memory: int = 0
    step_us: int = 0
    drafted: int = 0
    accepted: int = 0
    stored: engine_pb2.StoredFigures | None = None


class EngineSink(Protocol):
    """The epoch that an engine serves."""

    def row_event(self, event: bytes) -> None:
        """A serialized EngineEvent that holds RowOpened, RowRefused or StepDone."""

    def row_digests(self, digests: engine_pb2.RowDigests) -> None:
        """What is to be signed for a row that has ended."""

    def bring(self, asked: engine_pb2.BringBlocks) -> None:
        """A recall waits for what other members have of its blocks, until `EngineProcess.brought`."""

    def engine_fault(self, error: SealringError) -> None:
        """Ends the epoch."""


class EngineProcess:
    """One engine process. It loads at most one stage in its life."""

    def __init__(self, on_end: Callable[[EngineProcess], None]) -> None:
        self.memory_limit = self.overhead = self.longest_chunk = 0
        self.computes_on = ""
        self.figures = EngineFigures()
        self.stage: StageKey | None = None
        self.loaded: engine_pb2.StageLoaded | None = None
        self._on_end = on_end
        self._sink: EngineSink | None = None
        self._waiting: dict[int, asyncio.Future[engine_pb2.EngineEvent]] = {}
        self._next_id = 0
        self._busy = False
        self._worked = False
        self._progress: Callable[[Reached], None] | None = None
        self._pace = Pace(awake_clock)
        self._load: asyncio.Task[engine_pb2.StageLoaded] | None = None
        self._ready = asyncio.get_running_loop().create_future()
        self._child: Child | None = None
        self._handoff: socket.socket | None = None
        self._liveness: Liveness | None = None

    @classmethod
    async def start(
        cls,
        *,
        on_end: Callable[[EngineProcess], None],
        environment: Mapping[str, str] | None = None,
        cpu: bool = False,
        spawn: Spawn = Child.spawn,
        watch: Callable[..., Liveness] = Liveness,
    ) -> EngineProcess:
        """Spawns an engine and waits until it is ready. With `cpu` it leaves the GPU alone.

        Raises EpochEnded, DeadlineExceeded, OSError.
        """
        engine = cls(on_end)
        ours, theirs = socket_pair()
        more = ["--cpu"] if cpu else []
        engine._handoff = ours
        try:
            with theirs:
                engine._child = await spawn(
                    "engine",
                    ["-m", ENGINE_MODULE, "--form", ENGINE_FORM, "--handoff-fd", str(theirs.fileno()), *more],
                    on_message=engine._message,
                    on_end=engine._ended,
                    descriptors=(theirs.fileno(),),
                    environment=environment,
                )
            engine._liveness = watch(engine._child, _ping, engine._frozen)
            engine._liveness.look()
            await within(engine._ready, _STARTS.allowed(), "the start of an engine", _TIMEOUT)
            _STARTS.ready()
        except BaseException:
            await engine.stop()
            raise
        log.info("engine_ready", pid=engine._child.pid, memory_limit=engine.memory_limit)
        return engine

    @property
    def alive(self) -> bool:
        return self._child is not None and not self._child.ended

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None else 0

    async def profile(
        self, path: str, ranks: int = 0, draft: str = "", adapter: str = ""
    ) -> model_pb2.ModelProfile:
        """Measures a model folder, with the adapter in the folder `adapter` if one is named. With `draft` it
        measures that folder instead, once it may guess for the first one. Raises ModelError, NotFound,
        EpochEnded, DeadlineExceeded."""
        number = self._number()
        asked = engine_pb2.ProfileModel(id=number, path=path, ranks=ranks, draft=draft, adapter=adapter)
        command = engine_pb2.EngineCommand(profile=asked)
        event = await self._ask(number, command, _PROFILE_SECONDS, "the profile of a model")
        return event.profiled.profile

    async def ranges(self, path: str, lo: int, hi: int) -> list[tuple[str, int, int]]:
        """The bytes [first, end) of a folder's files that layers need. Raises as `profile` does."""
        number = self._number()
        command = engine_pb2.EngineCommand(
            profile=engine_pb2.ProfileModel(id=number, path=path, lo=lo, hi=hi)
        )
        event = await self._ask(number, command, _PROFILE_SECONDS, "the ranges of a stage")
        return [(one.name, one.first, one.end) for one in event.profiled.ranges]

    async def load(self, stage: StageKey, progress: Callable[[Reached], None]) -> engine_pb2.StageLoaded:
        """Loads a stage, or joins the load of the same stage that is under way.

        The load goes on when its caller is cancelled: the next epoch wants it. Raises ModelError,
        ResourceExhausted, EpochEnded, DeadlineExceeded; after an error the engine cannot be used.
        """
        if self.stage not in (None, stage):
            raise ValueError("an engine loads one stage in its life")
        self._progress = progress
        if self._load is None:
            self.stage = stage
            self._load = asyncio.get_running_loop().create_task(self._do_load(stage))
        return await asyncio.shield(self._load)

    async def open_epoch(
        self, command: engine_pb2.OpenEngineEpoch, descriptors: tuple[int, ...], sink: EngineSink
    ) -> engine_pb2.EpochOpened:
        """Opens an epoch; `descriptors` are the engine's ends of its data channel, empty in a ring of one.

        The answer has the prefixes that the engine has kept from earlier epochs of the ring. The caller
        closes its own copies of the descriptors. Raises EpochEnded, DeadlineExceeded, or the engine's error.
        """
        command.id = self._number()
        self.figures = EngineFigures(memory=self.figures.memory)
        if descriptors:
            self._hand_over(command.epoch, descriptors)
        self._sink = sink
        opening = engine_pb2.EngineCommand(open_epoch=command)
        event = await self._ask(command.id, opening, _EPOCH_SECONDS, "the opening of an epoch")
        self._set_busy(False)
        return event.epoch_opened

    async def join_group(self, command: engine_pb2.JoinGroup, seconds: float) -> None:
        """Forms the group of a tensor ring. The engine cannot answer pings meanwhile.

        Raises EpochEnded, DeadlineExceeded.
        """
        command.id = self._number()
        if self._liveness is not None:
            self._liveness.watch(interval=_BUSY[0], deadline=2 * seconds)
        joining = engine_pb2.EngineCommand(join=command)
        await self._ask(command.id, joining, seconds, "the forming of a group")
        self._set_busy(False)

    def use_disk(self, command: engine_pb2.UseDisk) -> None:
        """Has prefixes of the open epoch stored. Raises EpochEnded (CHILD_ENDED)."""
        self._send(engine_pb2.EngineCommand(use_disk=command).SerializeToString())

    def seal_rows(self, key: bytes) -> None:
        """Gives the open epoch's key for parameters of rows. Raises EpochEnded (CHILD_ENDED)."""
        self._send(engine_pb2.EngineCommand(seal_rows=engine_pb2.SealRows(key=key)).SerializeToString())

    def brought(self, number: int) -> None:
        """All that other members have of a recall's blocks is stored. Raises EpochEnded (CHILD_ENDED)."""
        told = engine_pb2.BlocksBrought(number=number)
        self._send(engine_pb2.EngineCommand(brought=told).SerializeToString())

    async def close_epoch(self) -> None:
        """Ends the open epoch and keeps the weights. Raises EpochEnded, DeadlineExceeded."""
        self._sink = None
        self._busy = False
        if self._liveness is not None:  # finds a frozen engine, which would delay the next epoch
            self._liveness.watch(interval=_BUSY[0], deadline=_CLOSE_SECONDS)
        number = self._number()
        command = engine_pb2.EngineCommand(close_epoch=engine_pb2.CloseEngineEpoch(id=number))
        await self._ask(number, command, _CLOSE_SECONDS, "the close of an epoch")

    async def trace(self, since: int) -> trace_pb2.ProcessTrace:
        """The engine's activities since `since` (monotonic ns). Raises EpochEnded, DeadlineExceeded."""
        number = self._number()
        command = engine_pb2.EngineCommand(trace=engine_pb2.TakeTrace(id=number, since=since))
        event = await self._ask(number, command, _TRACE_SECONDS, "the trace of an engine")
        return event.trace.trace

    def send_work(self, command: bytes) -> None:
        """Queues one serialized EngineCommand of the open epoch. Raises EpochEnded (CHILD_ENDED)."""
        self._send(command)
        self._worked = True
        if not self._busy:
            self._set_busy(True)

    async def drained(self) -> None:
        if self._child is not None:
            await self._child.drained()

    async def stop(self) -> None:
        """Ends the process and frees everything; safe to call again.

        A process that cannot die (in a driver, in a frozen control group) is left behind.
        """
        if self._liveness is not None:
            self._liveness.stop()
        self._sink = None
        try:
            if self._child is not None:
                farewell = engine_pb2.EngineCommand(shutdown=engine_pb2.Shutdown()).SerializeToString()
                async with asyncio.timeout(_REAP_SECONDS):
                    await self._child.stop(farewell, grace=_STOP_SECONDS)
        except TimeoutError:
            log.error("engine_left_behind", pid=self.pid, memory=self.figures.memory)
        finally:  # the child's own `stop` task goes on
            self._release()

    def kill(self) -> None:
        """Ends the process at once; `stop` reaps it."""
        if self._child is not None:
            self._child.kill()

    def _send(self, command: bytes) -> None:
        if self._child is None:
            raise child_ended("engine")
        self._child.send(command)

    def _set_busy(self, busy: bool) -> None:
        """Pings every second while the engine has work, every 5 s while it has none."""
        self._busy = busy
        if self._liveness is not None:
            interval, deadline = _BUSY if busy else _QUIET
            self._liveness.watch(interval=interval, deadline=deadline)

    async def _do_load(self, stage: StageKey) -> engine_pb2.StageLoaded:
        number = self._number()
        load = engine_pb2.LoadStage(id=number, **(vars(stage) | {"draft": None}))
        if stage.draft is not None:
            load.draft.CopyFrom(engine_pb2.DraftModel(**vars(stage.draft)))
        if self._liveness is not None:
            self._liveness.watch(interval=_LOADING[0], deadline=_LOADING[1])
        try:
            event = await self._ask(
                number, engine_pb2.EngineCommand(load=load), _LOAD_SECONDS, "the loading of a stage"
            )
        finally:
            self._progress = None
            if self._liveness is not None:
                self._liveness.look()
        self.loaded = event.loaded
        return event.loaded

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id

    def _ask(
        self, number: int, command: engine_pb2.EngineCommand, seconds: float, what: str
    ) -> asyncio.Future[engine_pb2.EngineEvent]:
        """Sends a command at once. Await the result for its answer, with a deadline."""
        future: asyncio.Future[engine_pb2.EngineEvent] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        try:
            self._send(command.SerializeToString())
        except EpochEnded as error:
            future.set_exception(error)
        return asyncio.ensure_future(within(future, seconds, what, _TIMEOUT))

    def _hand_over(self, epoch: int, descriptors: tuple[int, ...]) -> None:
        """Sends descriptors to the engine. Raises EpochEnded (CHILD_ENDED)."""
        if self._handoff is None:
            raise child_ended("engine")
        try:
            socket.send_fds(self._handoff, [str(epoch).encode("ascii")], list(descriptors))
        except ConnectionError:
            raise child_ended("engine") from None

    def _message(self, body: bytes) -> None:
        if body and body[0] in _ROW_EVENTS:
            if self._sink is not None:
                self._sink.row_event(body)
            return
        event = engine_pb2.EngineEvent.FromString(body)
        kind = event.WhichOneof("event")
        if kind == "pong":
            self._pong(event.pong)
        elif kind == "ready":
            self.memory_limit, self.overhead = event.ready.memory_limit, event.ready.overhead
            self.longest_chunk, self.computes_on = event.ready.longest_chunk, event.ready.computes_on
            if not self._ready.done():
                self._ready.set_result(None)
        elif kind == "progress":
            if self._progress is not None:
                told = event.progress
                self._progress(self._pace.at(told.what, told.done, told.total))
        elif kind == "digests":
            if self._sink is not None:
                self._sink.row_digests(event.digests)
        elif kind == "bring":
            if self._sink is not None:
                self._sink.bring(event.bring)
        elif kind == "fault":
            self._fault(from_problem(event.fault.problem))
        elif kind in ("profiled", "loaded", "problem", "epoch_opened", "epoch_closed", "trace", "joined"):
            self._answer(kind, event)

    def _pong(self, pong: engine_pb2.EnginePong) -> None:
        stored = pong.stored if pong.HasField("stored") else None
        figures = pong.steps, pong.memory, pong.step_us, pong.drafted, pong.accepted
        self.figures = EngineFigures(*figures, stored)
        if self._busy and not self._worked:
            self._set_busy(False)
        self._worked = False

    def _answer(self, kind: str, event: engine_pb2.EngineEvent) -> None:
        future = self._waiting.get(getattr(event, kind).id)
        if future is None or future.done():
            return
        if kind == "problem":
            future.set_exception(from_problem(event.problem.problem))
        else:
            future.set_result(event)

    def _fault(self, error: SealringError) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.engine_fault(error)

    def _frozen(self) -> None:
        self._fault(
            EpochEnded(
                "the engine process does not answer",
                hint="see the node's log; the ring is formed anew",
                reason="ENGINE_FROZEN",
            )
        )
        self.kill()

    def _ended(self) -> None:
        error = child_ended("engine")
        for future in [*self._waiting.values(), cast("asyncio.Future[engine_pb2.EngineEvent]", self._ready)]:
            if not future.done():
                future.set_exception(error)
        self._fault(error)
        self._release()
        self._on_end(self)

    def _release(self) -> None:
        if self._handoff is not None:
            self._handoff.close()
            self._handoff = None


def _ping(sequence: int) -> bytes:
    return engine_pb2.EngineCommand(ping=control_pb2.Ping(sequence=sequence)).SerializeToString()
