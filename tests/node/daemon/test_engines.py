from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from enginekeeping import keeper_of
from patience import until

from sealring.mesh.errors import DeadlineExceeded, EpochEnded, InvalidInput, NotFound
from sealring.node.daemon import engines as daemon_engines
from sealring.node.daemon import seat as daemon_seat
from sealring.node.daemon.engines import USABLE_SHARE, EngineKeeper, MemoryMeter
from sealring.node.daemon.seat import Seat
from sealring.v1 import control_pb2, engine_pb2, model_pb2


class ScriptedEngine:
    """An engine's process as its keeper has it, which profiles and loads; `PlayedEngine` is an epoch's."""

    started: ClassVar[list[ScriptedEngine]] = []

    def __init__(self) -> None:
        self.alive = True
        self.memory_limit = self.overhead = self.longest_chunk = 0
        self.computes_on = "CPU"
        self.stage: str | None = None
        self.profiled: list[str] = []
        self.hangs = self.cpu = False
        self.takes = 10
        self.killed = asyncio.Event()
        self.figures: Any = None
        self.loaded: Any = None
        self.ends = asyncio.Event()
        self.ends.set()
        self.started.append(self)

    async def profile(self, path: str, ranks: int, draft: str, adapter: str) -> model_pb2.ModelProfile:
        self.profiled.append(" ".join(filter(None, (path, draft, adapter))))
        if self.hangs:
            raise DeadlineExceeded("the profile of a model took longer than 120 s")
        return model_pb2.ModelProfile(digest="profile")

    async def load(self, stage: Any, progress: Any) -> engine_pb2.StageLoaded:
        self.stage = stage
        if stage == "for ever":
            await self.killed.wait()
            raise EpochEnded("the engine process ended", reason="CHILD_ENDED")
        step = control_pb2.StepTime(rows=1, tokens=1, microseconds=self.takes)
        self.loaded = engine_pb2.StageLoaded(weight_bytes=9, times=[step])
        return self.loaded

    def kill(self) -> None:
        self.alive = False
        self.killed.set()

    async def stop(self) -> None:
        self.alive = False
        await self.ends.wait()


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineKeeper:
    async def start(*, cpu: bool, **_: object) -> ScriptedEngine:
        engine = ScriptedEngine()
        engine.cpu = cpu
        return engine

    ScriptedEngine.started.clear()
    monkeypatch.setattr(daemon_engines.EngineProcess, "start", start)
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return keeper_of(tmp_path, [tmp_path])


async def test_a_model_is_measured_by_an_engine_that_serves_nothing(keeper: EngineKeeper) -> None:
    await keeper.profile("one")
    (spare,) = ScriptedEngine.started
    await keeper.profile("two")
    assert len(spare.profiled) == 2
    assert len(ScriptedEngine.started) == 1
    seat = keeper.seat()
    assert await seat.with_stage("layers", print) is spare  # type: ignore[arg-type,comparison-overlap]
    await keeper.profile("three")
    _, other = ScriptedEngine.started
    assert len(other.profiled) == 1
    assert (spare.alive, other.alive) == (True, False)
    assert (spare.cpu, other.cpu) == (False, True), "the GPU is the one's that serves"
    await keeper.stop()


async def test_a_node_that_is_to_compute_on_the_cpu_keeps_every_engine_there(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    meter = MemoryMeter(None, "CPU")
    assert meter.computes_on == "CPU", "before an engine has said so"
    own = keeper_of(tmp_path, [tmp_path], on_cpu=True)
    await own.profile("one")
    await own.seat().with_stage("layers", print)  # type: ignore[arg-type]
    await own.profile("two")
    assert [engine.cpu for engine in ScriptedEngine.started] == [True, True]
    await own.stop()


async def test_a_stage_has_the_least_times_of_all_starts(keeper: EngineKeeper) -> None:
    seat: Any = keeper.seat()
    taken = []
    for takes in (20, 10, 30):
        await keeper.profile("one")  # starts an engine
        ScriptedEngine.started[-1].takes = takes
        engine = await seat.with_stage("layers", print)
        assert await seat.with_stage("layers", print) is engine, "the next epoch has the same engine"
        taken += [one.microseconds for one in engine.loaded.times]
        await seat.drop()
    assert taken == [20, 10, 10]
    await keeper.stop()


async def test_an_engine_that_a_model_keeps_busy_is_ended(keeper: EngineKeeper) -> None:
    await keeper.profile("one")
    (spare,) = ScriptedEngine.started
    spare.hangs = True
    with pytest.raises(DeadlineExceeded):
        await keeper.profile("two")
    assert not spare.alive
    await keeper.stop()


async def test_who_stops_all_engines_waits_for_one_that_is_being_dropped(keeper: EngineKeeper) -> None:
    seat: Any = keeper.seat()
    await seat.with_stage("layers", print)
    (engine,) = ScriptedEngine.started
    engine.ends.clear()
    keeper.ending(seat.drop())
    await until(lambda: not engine.alive)
    stopping = asyncio.create_task(keeper.stop())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not stopping.done()
    engine.ends.set()
    await stopping


async def test_what_was_measured_is_known_until_it_changes_and_so_many_are(
    keeper: EngineKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_engines, "_MAX_PROFILES", 2)

    async def measured(name: str) -> int:
        assert (await keeper.profile(name)).digest == "profile"
        return len(ScriptedEngine.started[0].profiled)

    assert [await measured(name) for name in ("one", "one", "two", "one", "three", "two", "three")] == [
        *(1, 1, 2, 2, 3, 3, 3)
    ]
    assert await measured("one") == 4, "the oldest went first"
    (tmp_path / "one" / "config.json").write_text('{"changed": true}')
    assert await measured("one") == 5
    await keeper.stop()


async def test_a_draft_model_is_measured_with_the_model_for_which_it_guesses(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    both = await keeper.profile("one", draft="two")
    assert (both.digest, both.draft.digest, both.fetches_draft) == ("profile", "profile", False)
    (spare,) = ScriptedEngine.started
    assert spare.profiled == [str(tmp_path / "one"), f"{tmp_path / 'one'} {tmp_path / 'two'}"]
    lacking = await keeper.profile("one", draft="four")
    assert not lacking.HasField("draft")
    assert not (await keeper.profile("one")).HasField("draft")
    assert len(spare.profiled) == 2
    await keeper.stop()


async def test_a_tuned_model_is_measured_with_its_adapter(keeper: EngineKeeper, tmp_path: Path) -> None:
    for _ in range(2):
        await keeper.profile("one", adapter="two")
    await keeper.profile("one")
    (spare,) = ScriptedEngine.started
    assert spare.profiled == [f"{tmp_path / 'one'} {tmp_path / 'two'}", str(tmp_path / "one")]
    with pytest.raises(NotFound) as caught:
        await keeper.profile("one", adapter="four")
    assert caught.value.reason == "ADAPTER_NOT_FOUND"
    await keeper.stop()


@pytest.mark.parametrize(("name", "reason"), [("", "BAD_MODEL_NAME"), ("x" * 1025, "BAD_MODEL_NAME")])
async def test_a_model_has_a_name(keeper: EngineKeeper, name: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        await keeper.find(name)
    assert (raised.value.reason, raised.value.metadata["param"]) == (reason, "model")
    with pytest.raises(NotFound):
        await keeper.find("x" * 1024)


async def test_what_the_engine_holds_is_told_while_it_lives(keeper: EngineKeeper) -> None:
    assert keeper.memory_used == 0
    await keeper.profile("one")
    (engine,) = ScriptedEngine.started
    engine.figures = SimpleNamespace(memory=5)
    assert keeper.memory_used == 5
    seats: Any = [keeper.seat(), keeper.seat()]
    assert [seat.stage for seat in seats] == [None, None]
    for number, seat in enumerate(seats):
        made = await seat.with_stage(f"layers {number}", print)
        made.figures = SimpleNamespace(memory=5)
    assert [seat.stage for seat in seats] == ["layers 0", "layers 1"]
    assert keeper.memory_used == 9 + 9
    engine.figures.memory = 11
    assert keeper.memory_used == 11 + 9
    engine.alive = False
    assert (keeper.memory_used, seats[0].stage) == (9, None)
    await keeper.stop()


async def test_nothing_is_loaded_before_what_is_to_end_has_ended(keeper: EngineKeeper) -> None:
    """The memory of both may be more than there is. What is still loading is not waited for."""
    leaving, coming = keeper.seat(), keeper.seat()
    stages: Any = ["for ever", "layers"]
    loading = asyncio.create_task(leaving.with_stage(stages[0], print))
    await until(lambda: leaving.stage is not None)
    (first,) = ScriptedEngine.started
    first.ends.clear()
    dropping = keeper.ending(leaving.drop())
    other = asyncio.create_task(coming.with_stage(stages[1], print))
    await until(lambda: not first.alive)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (coming.stage, dropping.done()) == (None, False)
    first.ends.set()
    await dropping
    with pytest.raises(EpochEnded):
        await loading
    assert (await other, leaving.stage) == (ScriptedEngine.started[1], None)
    await keeper.stop()


async def test_a_stage_that_is_dropped_while_it_waits_for_memory_is_not_loaded(keeper: EngineKeeper) -> None:
    leaving, coming = keeper.seat(), keeper.seat()
    stages: Any = ["layers", "others"]
    await leaving.with_stage(stages[0], print)
    (first,) = ScriptedEngine.started
    first.ends.clear()
    dropping = keeper.ending(leaving.drop())
    await until(lambda: not first.alive)
    loading = asyncio.create_task(coming.with_stage(stages[1], print))
    await asyncio.sleep(0)
    await coming.drop()
    first.ends.set()
    await dropping
    with pytest.raises(EpochEnded):
        await loading
    assert coming.stage is None
    await keeper.stop()


async def test_an_epoch_that_does_not_close_holds_up_no_other_seat(
    keeper: EngineKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is frozen, say. The weights go all the same, and the seat once nothing is left behind."""
    monkeypatch.setattr(daemon_seat, "_CLOSE_SECONDS", 0.001)
    closed = asyncio.Event()
    seat: Any = Seat("demo-0", SimpleNamespace(engines=keeper))  # type: ignore[arg-type]
    seat.epoch = epoch = SimpleNamespace(closed=closed.wait)
    plan: Any = SimpleNamespace(
        draft=None,
        adapter="",
        mtp=False,
        vision=False,
        **{
            "model": "one",
            "commit": "",
            "hub_files": "",
            "model_digest": "",
            "layers": (0, 2),
            "prompts": (0, 0),
            "taps": (),
        },
        **{"size": 1, "backend": "", "context": 1, "kv_bits": 0, "prefill_chunk": 1, "max_rows": 1},
    )
    await seat.engine(plan, print)
    (frozen,) = ScriptedEngine.started
    going = asyncio.create_task(seat.vacate(epoch))
    other: Any = keeper.seat()
    await asyncio.sleep(0)
    await other.with_stage("other layers", print)
    assert (frozen.alive, seat.stage, going.done(), seat.epoch) == (False, None, False, epoch)
    closed.set()
    await going
    assert seat.epoch is None
    await keeper.stop()


async def test_an_engine_without_weights_is_kept_for_a_while_and_one_with_them_stays(
    keeper: EngineKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as soon:
        soon.setattr(daemon_engines, "_SPARE_SECONDS", 0.001)
        await keeper.profile("one")
        (spare,) = ScriptedEngine.started
        await until(lambda: not spare.alive)
    await keeper.profile("two")
    second = ScriptedEngine.started[1]
    seat: Any = keeper.seat()
    await seat.with_stage("layers", print)
    await keeper.drop_spare()
    assert second.alive
    await keeper.stop()
    assert not second.alive


async def test_shielded_work_goes_on_without_its_caller(keeper: EngineKeeper) -> None:
    go, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        done.set()

    waiting = asyncio.create_task(keeper.shielded(work()))
    await asyncio.sleep(0)
    waiting.cancel()
    go.set()
    async with asyncio.timeout(200):
        await done.wait()


def test_the_lowest_limit_counts() -> None:
    meter = MemoryMeter(None)
    by_default = meter.usable
    assert by_default == int(meter.total * USABLE_SHARE)
    meter.set_device(1 << 30, 5, 512)
    assert (meter.usable, meter.overhead, meter.longest_chunk) == (1 << 30, 5, 512)
    meter.set_device(0, 5, 512)
    assert meter.usable == by_default
    configured = MemoryMeter(1 << 28)
    configured.set_device(1 << 30, 5, 512)
    assert configured.usable == 1 << 28


def test_an_owner_who_lets_the_gpu_wire_more_gets_more() -> None:
    """`sysctl iogpu.wired_limit_mb` raises what Metal reports; macOS itself keeps some all the same."""
    meter = MemoryMeter(None)
    meter.total = 512 << 30
    meter.set_device(int(meter.total * 0.9), 0, 512)
    assert meter.usable == int(meter.total * 0.9)
    meter.set_device(meter.total, 0, 512)
    assert USABLE_SHARE * meter.total < meter.usable < meter.total
    meter.total = 8 << 30
    meter.set_device(int(meter.total * 0.9), 0, 512)
    assert meter.usable == int(meter.total * USABLE_SHARE), "of a small one the system needs a quarter"
