"""The daemon's side of an engine, whose process is a script: answers, deadlines, faults, pings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from patience import until

from sealring.mesh.errors import DeadlineExceeded, EpochEnded, ModelError, SealringError
from sealring.mesh.rpc import to_problem
from sealring.mesh.system.pace import Reached
from sealring.mesh.system.starting import Starts
from sealring.node.daemon import engine_process
from sealring.node.daemon.engine_process import DraftKey, EngineFigures, EngineProcess, StageKey
from sealring.v1 import control_pb2, engine_pb2

STAGE = StageKey("/models/a", "d", 0, 4, 256, draft=DraftKey("/models/small", "e", 8, 128))
BUSY, QUIET, LOADING = (1.0, 8.0), (5.0, 8.0), (10.0, 120.0)


class Script:
    """An engine's process and its liveness: keeps commands and pings, and sends a test's events."""

    pid = 7
    ended = False

    def __init__(self) -> None:
        self.commands: list[engine_pb2.EngineCommand] = []
        self.pings: list[Any] = []
        self.killed = False
        self.end: Any = None
        self.frozen: Any = None
        self.hear: Any = None

    async def spawn(self, name: str, arguments: Any, *, on_message: Any, on_end: Any, **more: Any) -> Any:
        self.hear, self.end = on_message, on_end
        self.says(ready=engine_pb2.EngineReady(memory_limit=6, overhead=2, longest_chunk=9))
        return self

    def liveness(self, child: Any, ping: Any, on_frozen: Any) -> Any:
        self.frozen = on_frozen
        return self

    def says(self, **event: Any) -> None:
        self.hear(engine_pb2.EngineEvent(**event).SerializeToString())

    def send(self, command: bytes) -> None:
        self.commands.append(engine_pb2.EngineCommand.FromString(command))

    def watch(self, *, interval: float, deadline: float) -> None:
        self.pings.append((interval, deadline))

    def look(self) -> None:
        self.pings.append("only looks")

    def kill(self) -> None:
        self.killed = True

    async def drained(self) -> None: ...

    def stop(self, *_: object, **__: object) -> Any:
        """As the process, whose end is awaited, and as its liveness, which ends at once."""
        return asyncio.ensure_future(self.drained())


class Sink:
    """An epoch that keeps the events that it gets."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def row_event(self, event: bytes) -> None:
        self.told.append(event)

    def engine_fault(self, error: SealringError) -> None:
        self.told.append(error.reason)


class Bench:
    """An engine over a script."""

    def __init__(self) -> None:
        self.ended: list[EngineProcess] = []
        self.engine: Any = None
        self.script, self.sink = Script(), Sink()

    async def start(self) -> None:
        self.engine = await EngineProcess.start(
            on_end=self.ended.append, spawn=self.script.spawn, watch=self.script.liveness
        )
        self.script.pings.clear()

    def says(self, **event: Any) -> None:
        self.script.says(**event)

    async def asked(self, work: Any) -> tuple[asyncio.Task[Any], engine_pb2.EngineCommand]:
        """The work, begun, and the command that it sent."""
        task = asyncio.create_task(work)
        before = len(self.script.commands)
        await until(lambda: len(self.script.commands) != before)
        return task, self.script.commands[-1]

    async def open(self) -> engine_pb2.OpenEngineEpoch:
        """Opens an epoch of a ring of one."""
        work = self.engine.open_epoch(engine_pb2.OpenEngineEpoch(epoch=3), (), self.sink)
        task, command = await self.asked(work)
        self.says(epoch_opened=engine_pb2.EpochOpened(id=command.open_epoch.id))
        await task
        return command.open_epoch


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.start()
    yield bench
    bench.script.end()


async def test_answers_go_to_who_asked(bench: Bench) -> None:
    first, one = await bench.asked(bench.engine.profile("/a", 2))
    second, two = await bench.asked(bench.engine.ranges("/b", 1, 3))
    assert (one.profile.path, one.profile.ranks, one.profile.hi) == ("/a", 2, 0)
    assert (two.profile.path, two.profile.lo, two.profile.hi) == ("/b", 1, 3)
    assert one.profile.id != two.profile.id
    ranges = [engine_pb2.FileRange(name="f", first=5, end=9)]
    bench.says(profiled=engine_pb2.ModelProfiled(id=two.profile.id, ranges=ranges))
    assert await second == [("f", 5, 9)]
    assert not first.done()
    bench.says(
        problem=engine_pb2.EngineProblem(id=one.profile.id, problem=to_problem(ModelError("bad", reason="B")))
    )
    with pytest.raises(SealringError) as refused:
        await first
    assert refused.value.reason == "B"
    bench.says(profiled=engine_pb2.ModelProfiled(id=99))


async def test_a_stage_is_loaded_once_for_all_who_wait_and_no_other_after_it(bench: Bench) -> None:
    told: list[Reached] = []
    first, command = await bench.asked(bench.engine.load(STAGE, told.append))
    assert (command.load.path, command.load.digest, command.load.hi) == ("/models/a", "d", 4)
    draft = command.load.draft
    assert (draft.path, draft.digest, draft.kv_bits, draft.context) == ("/models/small", "e", 8, 128)
    assert bench.script.pings == [LOADING]
    bench.says(progress=engine_pb2.LoadProgress(what="loading", done=1, total=2))
    first.cancel()
    await asyncio.wait((first,))
    second = asyncio.create_task(bench.engine.load(STAGE, told.append))
    await asyncio.sleep(0)
    assert len(bench.script.commands) == 1, "who gave up left the load running"
    with pytest.raises(ValueError, match="one stage"):
        await bench.engine.load(StageKey("/models/b", "d", 0, 4, 256), told.append)
    bench.says(loaded=engine_pb2.StageLoaded(id=command.load.id, weight_bytes=5))
    assert (await second).weight_bytes == 5
    assert bench.engine.loaded == await second
    assert bench.script.pings == [LOADING, "only looks"]
    bench.says(progress=engine_pb2.LoadProgress(what="loading", done=2, total=2))
    assert told == [Reached("loading", 1, 2)], "nobody waits any more"


async def test_an_epoch_hears_of_its_rows_until_it_is_closed(bench: Bench) -> None:
    bench.says(pong=engine_pb2.EnginePong(steps=9, memory=5, step_us=4, drafted=3, accepted=2))
    assert bench.engine.figures == EngineFigures(9, 5, 4, 3, 2)
    await bench.open()
    assert bench.engine.figures == EngineFigures(memory=5), "steps are those of this epoch"
    row = engine_pb2.EngineEvent(done=control_pb2.StepDone(step=1)).SerializeToString()
    bench.script.hear(row)
    assert bench.sink.told == [row]
    closing, command = await bench.asked(bench.engine.close_epoch())
    bench.script.hear(row)
    assert bench.sink.told == [row], "it is over"
    bench.says(epoch_closed=engine_pb2.EpochClosed(id=command.close_epoch.id))
    await closing


async def test_pings_come_often_while_there_is_work(bench: Bench) -> None:
    await bench.open()
    assert bench.script.pings == [QUIET]
    for _ in range(2):
        bench.engine.send_work(b"")
    assert bench.script.pings == [QUIET, BUSY]
    bench.says(pong=engine_pb2.EnginePong())
    assert bench.script.pings == [QUIET, BUSY], "there was work since the ping before"
    bench.says(pong=engine_pb2.EnginePong())
    assert bench.script.pings == [QUIET, BUSY, QUIET]
    bench.says(pong=engine_pb2.EnginePong())
    assert len(bench.script.pings) == 3


async def test_while_a_group_forms_an_engine_need_not_answer_pings(bench: Bench) -> None:
    joining, command = await bench.asked(bench.engine.join_group(engine_pb2.JoinGroup(), 30.0))
    assert bench.script.pings == [(1.0, 60.0)]
    bench.says(joined=engine_pb2.GroupJoined(id=command.join.id))
    await joining
    assert bench.script.pings == [(1.0, 60.0), QUIET]


@pytest.mark.parametrize(
    ("how", "reason", "killed"), [("frozen", "ENGINE_FROZEN", True), ("end", "CHILD_ENDED", False)]
)
async def test_an_end_is_told_to_the_epoch_once_and_to_all_who_wait(
    bench: Bench, how: str, reason: str, killed: bool
) -> None:
    await bench.open()
    waiting, _ = await bench.asked(bench.engine.trace(0))
    getattr(bench.script, how)()
    assert (bench.sink.told, bench.script.killed) == ([reason], killed)
    if killed:
        bench.script.end()  # as its child reports then
    with pytest.raises(EpochEnded) as ended:
        await waiting
    assert ended.value.reason == "CHILD_ENDED"
    assert (bench.sink.told, bench.ended) == ([reason], [bench.engine])


async def test_the_first_engine_of_a_daemon_may_take_longer_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then are the libraries new to macOS."""
    silent = Script()
    monkeypatch.setattr(silent, "says", lambda **_: None)
    starts = {usual: Starts("engine", usual) for usual in (0.0, 200.0)}
    for script, usual, first in ((silent, 200.0, 0.0), (Script(), 0.0, 200.0), (silent, 0.0, 200.0)):
        monkeypatch.setattr(engine_process, "_STARTS", starts[usual])
        monkeypatch.setattr("sealring.mesh.system.starting.FIRST_SECONDS", first)
        starting = EngineProcess.start(on_end=lambda _: None, spawn=script.spawn, watch=script.liveness)
        if script is silent:
            with pytest.raises(DeadlineExceeded, match="took longer than 0 s"):
                await starting
        else:
            await (await starting).stop()


async def test_a_fault_of_an_epoch_is_the_engines_own_word(bench: Bench) -> None:
    await bench.open()
    for _ in range(2):
        bench.says(fault=engine_pb2.EngineFault(problem=to_problem(EpochEnded("x", reason="LINK_LOST"))))
    assert bench.sink.told == ["LINK_LOST"]


async def test_an_answer_that_does_not_come_is_named_and_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_TRACE_SECONDS", 0.0)
    with pytest.raises(DeadlineExceeded) as late:
        await bench.engine.trace(0)
    assert late.value.reason == "ENGINE_TIMEOUT"
    await asyncio.sleep(0)
    bench.says(trace=engine_pb2.TraceTaken(id=bench.script.commands[-1].trace.id))


async def refuses_an_epoch(engine: EngineProcess) -> None:
    with open(os.devnull) as descriptor, pytest.raises(EpochEnded) as raised:
        await engine.open_epoch(engine_pb2.OpenEngineEpoch(epoch=1), (descriptor.fileno(),), None)  # type: ignore[arg-type]
    assert raised.value.reason == "CHILD_ENDED"


async def test_an_engine_that_ends_between_load_and_epoch_is_named(bench: Bench) -> None:
    """The script has not taken its end of the socket for descriptors, as a process that has ended."""
    await refuses_an_epoch(bench.engine)


async def test_an_engine_that_did_not_start_takes_no_orders() -> None:
    engine = EngineProcess(lambda ended: None)
    assert (engine.alive, engine.pid) == (False, 0)
    with pytest.raises(EpochEnded):
        engine.send_work(b"")
    with pytest.raises(EpochEnded):
        await engine.profile("/a")
    await refuses_an_epoch(engine)
    await engine.drained()
    engine.kill()
    await engine.stop()


async def test_the_device_of_an_engine_is_known_once_it_has_started(bench: Bench) -> None:
    engine = bench.engine
    assert (engine.memory_limit, engine.overhead, engine.longest_chunk) == (6, 2, 9)
