"""Real engine processes, each alone. `tests/integration/arrangements/test_exact.py` has rings of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.ring import STORED_BLOCK, clear_scope
from sealring.node.engine import device, digest, main
from sealring.node.wire.frames import ENGINE_FORM, FrameSocket
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

pytestmark = pytest.mark.integration

MODEL = Path(__file__).parents[3] / "examples" / "demo_model" / "model"
LAYERS = 9
CONTEXT = 256
CHUNK = 8
QUESTIONS = [
    "What is the capital of France?",
    "hi",
    "Which element has the symbol Fe, and what is its atomic number?",
    "Tell me about the weather on the planet Neptune, please, and in some detail.",
    "How many months are there in a year?",
]


class EngineProcess:
    """An engine as its daemon sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.handoff, handoff = socket.socketpair()
        command = [
            sys.executable,
            "-P",
            "-m",
            "sealring.node.engine.main",
            "--form",
            ENGINE_FORM,
            "--control-fd",
            str(theirs.fileno()),
        ]
        with theirs, handoff:
            self.process = subprocess.Popen(
                [*command, "--handoff-fd", str(handoff.fileno())],
                pass_fds=(theirs.fileno(), handoff.fileno()),
                stderr=subprocess.PIPE,
            )
        ours.settimeout(40)
        self.frames = FrameSocket(ours)
        self._number = 0
        self._log: str | None = None
        self._events: list[engine.EngineEvent] = []
        ready = self.wait_for("ready")
        assert ready.memory_limit >= 0
        assert ready.overhead == device.overhead() >= 2 * device.CACHE_LIMIT

    def send(self, **command: Any) -> None:
        self.frames.send(engine.EngineCommand(**command))

    def wait_for(self, *kinds: str) -> Any:
        """The next event of one of these kinds; others are kept."""
        for event in self._events:
            if event.WhichOneof("event") in kinds:
                self._events.remove(event)
                return getattr(event, str(event.WhichOneof("event")))
        while True:
            received = self.frames.receive(engine.EngineEvent)
            assert received is not None, "the engine is gone"
            kind = str(received.WhichOneof("event"))
            if kind in kinds:
                return getattr(received, kind)
            self._events.append(received)

    def waiting(self, kind: str) -> int:
        """The events of a kind that were received and not waited for."""
        return sum(event.WhichOneof("event") == kind for event in self._events)

    def ask(self, answer: str, **command: Any) -> Any:
        """The answer to a command, or the problem that it met."""
        (message,) = command.values()
        self._number += 1
        message.id = self._number
        self.send(**command)
        found = self.wait_for(answer, "problem")
        assert found.id == self._number
        return found.problem if isinstance(found, engine.EngineProblem) else found

    def load(self, lo: int = 0, hi: int = LAYERS, path: Path = MODEL, digest: str = "") -> Any:
        command = engine.LoadStage(path=str(path), lo=lo, hi=hi, context=CONTEXT, digest=digest)
        return self.ask("loaded", load=command)

    def open_epoch(self, epoch: int = 1, rank: int = 0, size: int = 1) -> Any:
        command = engine.OpenEngineEpoch(
            epoch=epoch,
            rank=rank,
            size=size,
            prefill_chunk=CHUNK,
            max_rows=8,
            kv_budget=1 << 40,
        )
        return self.ask("epoch_opened", open_epoch=command)

    def close_epoch(self) -> Any:
        return self.ask("epoch_closed", close_epoch=engine.CloseEngineEpoch())

    def open_row(self, row: int, question: str) -> Any:
        chat = inference.Chat(messages=[inference.ChatMessage(role="user", content=question)])
        prompt = inference.Prompt(chat=chat)
        self.send(open_row=engine.OpenEngineRow(row=row, prompt=prompt))
        return self.wait_for("opened", "refused")

    def end(self) -> str:
        """What it wrote to its log."""
        if self._log is None:
            with contextlib.suppress(OSError):
                self.frames.socket.shutdown(socket.SHUT_RDWR)
            self.frames.close()
            self.handoff.close()
            try:
                _, log = self.process.communicate(timeout=200)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
            assert self.process.returncode == 0
            self._log = str(log.decode())
        return self._log


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> None:
    """Leaves the test process as it is: engines inherit its scheduling."""


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    made = EngineProcess()
    yield made
    made.end()


@cache
def mlx_lm_alone() -> Any:
    import mlx_lm

    return mlx_lm.load(str(MODEL))


@cache
def expected(question: str, tokens: int) -> str:
    """The first `tokens` tokens of mlx-lm's greedy answer."""
    model, tokenizer = mlx_lm_alone()
    mx = importlib.import_module("mlx.core")
    messages = [{"role": "user", "content": question}]
    prompt = mx.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    generate_step = importlib.import_module("mlx_lm.generate").generate_step
    ids = []
    for token, _ in generate_step(prompt, model, max_tokens=tokens):
        if token in tokenizer.eos_token_ids:
            break
        ids.append(token)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


class Gateway:
    """Sends steps to an engine and gathers its text."""

    def __init__(self, member: EngineProcess, lanes: int) -> None:
        self._member = member
        self._lanes = lanes
        self._number = 0
        self.texts: dict[int, str] = {}
        self.finished: dict[int, int] = {}

    def step(self, **fields: Any) -> None:
        self._number += 1
        self._member.send(step=control.Step(number=self._number, **fields))

    def gather(self) -> None:
        for output in self._member.wait_for("done").outputs:
            self.texts[output.row] = self.texts.get(output.row, "") + output.delta.text
            if output.finish:
                self.finished[output.row] = output.finish

    def prefill(self, opened: control.RowOpened) -> None:
        total = opened.prompt_tokens
        for start in range(0, total, CHUNK):
            chunk = control.Chunk(
                row=opened.row,
                start=start,
                end=min(start + CHUNK, total),
                prompt_tokens=total,
                params_bytes=0 if start else opened.params_bytes,
            )
            self.step(prefill=control.Prefill(chunks=[chunk]))
        self.gather()

    def run(self, rows: dict[int, control.RowOpened]) -> None:
        """A row comes with every round; each leaves when it has ended, some a token late."""
        waiting, lanes = list(rows), {lane: list[int]() for lane in range(self._lanes)}
        changes: dict[int, list[control.Change]] = {lane: [] for lane in lanes}
        while waiting or any(lanes.values()):
            if waiting:
                row = waiting.pop(0)
                self.prefill(rows[row])
                lane = row % self._lanes
                lanes[lane].append(row)
                changes[lane].append(control.Change(admit=control.Admit(row=row, lane=lane)))
            busy = [lane for lane in lanes if lanes[lane]]
            for _ in range(2):
                for lane in busy:
                    self.step(changes=changes[lane], decode=control.Decode(lane=lane))
                    changes[lane] = []
                for _ in busy:
                    self.gather()
            for lane in busy:
                for row in [row for row in lanes[lane] if row in self.finished]:
                    lanes[lane].remove(row)
                    changes[lane].append(control.Change(evict=control.Evict(row=row)))
        self.step(changes=[change for several in changes.values() for change in several])


def open_rows(head: EngineProcess) -> dict[int, control.RowOpened]:
    rows = {}
    for row, question in enumerate(QUESTIONS, start=1):
        opened = head.open_row(row, question)
        assert isinstance(opened, control.RowOpened)
        rows[row] = opened
    return rows


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineProcess]:
    """An engine with all layers and without an epoch, and so it is left."""
    made = EngineProcess()
    made.load()
    yield made
    made.end()


def test_commands_out_of_place_are_refused_and_shutdown_ends_it(process: EngineProcess) -> None:
    assert process.open_epoch().reason == "NO_STAGE"
    assert process.open_row(1, "hi").problem.reason == "NOT_HEAD"
    assert process.load(digest="0" * 64).reason == "MODEL_DIGEST_MISMATCH"
    assert process.load(path=MODEL / "missing").code == "FAILED_PRECONDITION"
    assert process.load(5, 99).code == "INVALID_ARGUMENT"
    process.send(load=engine.LoadStage(id=90, path=str(MODEL), lo=0, hi=LAYERS, context=CONTEXT))
    assert process.open_epoch().reason == "STAGE_LOADING"
    assert process.wait_for("loaded").id == 90
    whole = process.load()
    assert isinstance(whole, engine.StageLoaded)
    assert process.open_epoch(rank=1, size=3).reason == "BAD_RANK"
    assert isinstance(process.open_epoch(), engine.EpochOpened)
    assert process.open_epoch(2).reason == "EPOCH_OPEN"
    assert process.load(0, 3).reason == "EPOCH_OPEN"
    assert isinstance(process.close_epoch(), engine.EpochClosed)
    assert isinstance(process.close_epoch(), engine.EpochClosed)
    small = process.load(0, 3)
    assert 0 < small.weight_bytes < whole.weight_bytes, "fewer layers are another stage"
    process.send(shutdown=engine.Shutdown())
    assert process.process.wait(200) == 0


def test_a_trace_is_of_an_open_epoch(shared: EngineProcess) -> None:
    assert shared.ask("trace", trace=engine.TakeTrace()).reason == "NO_EPOCH"
    shared.open_epoch()
    found = shared.ask("trace", trace=engine.TakeTrace(since=5))
    assert (list(found.trace.spans), found.trace.since) == ([], 5)
    shared.close_epoch()
    assert shared.ask("trace", trace=engine.TakeTrace()).reason == "NO_EPOCH"


def test_a_bad_step_is_a_fault_and_later_steps_are_ignored(shared: EngineProcess) -> None:
    shared.open_epoch(7)
    shared.open_row(1, QUESTIONS[0])
    shared.send(step=control.Step(number=1, decode=control.Decode(lane=0)))
    fault = shared.wait_for("fault")
    assert (fault.epoch, fault.problem.reason) == (7, "BAD_STEP")
    shared.send(step=control.Step(number=2))
    assert shared.open_row(2, "hi").problem.reason == "NOT_HEAD"
    assert isinstance(shared.close_epoch(), engine.EpochClosed)
    assert not shared.waiting("fault")


def test_a_profile_is_measured_beside_an_epoch(shared: EngineProcess) -> None:
    shared.open_epoch()
    profile = shared.ask("profiled", profile=engine.ProfileModel(path=str(MODEL))).profile
    assert (profile.model_type, profile.layers) == ("llama", LAYERS)
    assert profile.digest == digest(MODEL)
    assert shared.ask("profiled", profile=engine.ProfileModel(path="/missing")).code == "FAILED_PRECONDITION"
    shared.close_epoch()


def policies(pid: int) -> dict[int, int]:
    return {int(task): os.sched_getscheduler(int(task)) for task in os.listdir(f"/proc/{pid}/task")}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux schedules so")
def test_what_computes_interrupts_nobody_and_what_passes_results_on_does(shared: EngineProcess) -> None:
    loaded, computing = policies(shared.process.pid), shared.process.pid
    assert loaded[computing] == os.SCHED_BATCH
    assert list(loaded.values()).count(os.SCHED_BATCH) > 1, "MLX's thread is not among them"
    assert os.SCHED_OTHER in loaded.values(), "the thread that reads commands"
    shared.open_epoch()
    opened = policies(shared.process.pid)
    assert [policy for task, policy in opened.items() if task not in loaded] == [os.SCHED_OTHER]
    shared.close_epoch()


PROMPT = inference.Prompt(tokens=inference.TokenIds(ids=[7] * (STORED_BLOCK + 1)))


def begin_with_disk(member: EngineProcess, model: Path, disk: Path, *, context: int) -> None:
    """An epoch that may hold four prefixes of a block; the engine has loaded the model with this context."""
    load = engine.LoadStage(path=str(model), hi=LAYERS, context=context)
    loaded = member.ask("loaded", load=load)
    prefix = STORED_BLOCK * loaded.kv_bytes_per_token + loaded.kv_bytes_per_row
    opening = engine.OpenEngineEpoch(
        epoch=1,
        size=1,
        prefill_chunk=CHUNK,
        max_rows=8,
        kv_budget=4 * prefix,
    )
    member.ask("epoch_opened", open_epoch=opening)
    named = engine.PrefixDisk(root=str(disk), model=str(disk / "model"), key=bytes(32))
    member.send(use_disk=engine.UseDisk(disk=named))


def open_prompt(member: EngineProcess, row: int) -> control.RowOpened:
    scope = clear_scope("key one")
    member.send(open_row=engine.OpenEngineRow(row=row, prompt=PROMPT, prefix_scope=scope))
    opened = member.wait_for("opened", "refused")
    assert isinstance(opened, control.RowOpened)
    return opened


def store_prompt(member: EngineProcess) -> bytes:
    """Has the prompt computed, kept and written behind, once it is asked again; its chain."""
    gateway = Gateway(member, lanes=1)
    open_prompt(member, 1)
    member.send(discard=control.DiscardRow(row=1))
    gateway.prefill(open_prompt(member, 2))
    keep = control.Keep(prefix=1, row=2, tokens=STORED_BLOCK)
    changes = [control.Change(keep=keep), control.Change(evict=control.Evict(row=2))]
    for change in changes:
        gateway.step(changes=[change])
    for row in range(3, 400):
        if stored := open_prompt(member, row).stored:
            return stored
        member.send(discard=control.DiscardRow(row=row))
        time.sleep(0.05)
    raise AssertionError("nothing was stored")


def test_recalls_beyond_the_memory_of_the_plan_end_the_epoch(process: EngineProcess, tmp_path: Path) -> None:
    """Recalled blocks count beside kept prefixes, whether or not they are restored."""
    begin_with_disk(process, MODEL, tmp_path, context=4 * STORED_BLOCK)
    chain = store_prompt(process)
    for row in range(1001, 1006):
        open_prompt(process, row)
        process.send(recall=control.Recall(number=row, chain=chain, row=row))
        if row < 1005:
            assert process.wait_for("recalled").tokens == STORED_BLOCK
    assert process.wait_for("fault").problem.reason == "KV_BUDGET"


def test_caches_of_other_weights_under_the_same_names_are_a_miss(
    process: EngineProcess, tmp_path: Path
) -> None:
    """The model's digest does not cover the contents of weights."""
    model = tmp_path / "copy"
    shutil.copytree(MODEL, model)
    begin_with_disk(process, model, tmp_path, context=4 * STORED_BLOCK)
    store_prompt(process)
    process.close_epoch()
    begin_with_disk(process, model, tmp_path, context=5 * STORED_BLOCK)
    assert open_prompt(process, 1).stored, "another context changes no cache"
    process.close_epoch()
    for file in model.glob("*.safetensors"):
        os.utime(file, (0, 0))
    begin_with_disk(process, model, tmp_path, context=6 * STORED_BLOCK)
    assert not open_prompt(process, 1).stored


def test_a_ring_of_one_answers_as_mlx_lm_and_logs_nothing_of_it(shared: EngineProcess) -> None:
    """The last that uses this engine, for its log is whole once it has ended."""
    loaded = shared.load(digest=digest(MODEL))
    assert loaded.weight_bytes > 1 << 20
    assert loaded.kv_bytes_per_token > 0
    assert isinstance(shared.open_epoch(), engine.EpochOpened)
    gateway = Gateway(shared, lanes=2)
    gateway.run(open_rows(shared))
    for row, question in enumerate(QUESTIONS, start=1):
        assert gateway.texts[row] == expected(question, CONTEXT), question
    shared.send(ping=control.Ping(sequence=9))
    pong = shared.wait_for("pong")
    assert pong.sequence == 9
    assert pong.steps > 20
    assert pong.memory > loaded.weight_bytes
    assert isinstance(shared.close_epoch(), engine.EpochClosed)
    log = shared.end()
    for question in QUESTIONS:
        assert len(question) < 5 or question not in log
        assert expected(question, CONTEXT) not in log


def test_an_engine_hangs_in_a_prompt_or_when_its_device_does_not_answer() -> None:
    waited = [4.0]
    loaded: Any = SimpleNamespace(front=None, patience=4.0)
    epoch: Any = SimpleNamespace(device_seconds=lambda: waited[0])
    assert main.hung(loaded, None) is None
    assert main.hung(loaded, epoch) is None
    waited[0] = 4.1
    assert main.hung(loaded, epoch) == "device_stuck"
    loaded.front = SimpleNamespace(reader=SimpleNamespace(stuck=True))
    assert main.hung(loaded, None) == "prompt_unreadable"


def test_an_engine_without_work_gives_memory_back_once() -> None:
    tasks, given, done = SimpleQueue[Any](), SimpleQueue[None](), SimpleQueue[None]()

    def run() -> None:
        with contextlib.suppress(SystemExit):
            main.compute(tasks, idle=partial(given.put, None), after=0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with pytest.raises(Empty):  # nothing was computed yet
            given.get(timeout=0.1)
        for _ in range(2):
            tasks.put(partial(done.put, None))
            done.get(timeout=200)
            given.get(timeout=200)
            with pytest.raises(Empty):
                given.get(timeout=0.1)
    finally:
        tasks.put(sys.exit)
        thread.join(200)
    assert not thread.is_alive()


def test_an_epoch_wires_weights_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[int] = []
    monkeypatch.setattr(device, "wire", wired.append)
    spec = SimpleNamespace(is_head=True, is_tail=True)
    loaded: Any = SimpleNamespace(
        weight_bytes=1000,
        stage=SimpleNamespace(spec=spec),
        front=None,
        sources=SimpleNamespace(memory=70, tail=None),
        tower=None,
        kv_bytes=(1, 1),
        prefixes=SimpleNamespace(turn_over=lambda ring: {}),
    )
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(FrameSocket(theirs)) as frames:
        command = engine.OpenEngineEpoch(id=1, epoch=1, rank=0, size=1, kv_budget=500)
        main.Engine(frames, None, loaded).dispatch(engine.EngineCommand(open_epoch=command))
    assert wired == [1570]


@pytest.mark.parametrize("gone", [False, True])
def test_an_epoch_whose_channel_does_not_come_is_refused(gone: bool) -> None:
    """Its daemon is too busy, or has ended."""
    stage = SimpleNamespace(spec=SimpleNamespace(is_head=True, is_tail=False))
    loaded: Any = SimpleNamespace(weight_bytes=0, stage=stage, sources=SimpleNamespace(memory=0), tower=None)
    command = engine.OpenEngineEpoch(id=1, epoch=3, rank=0, size=2)
    (ours, theirs), (daemon, handoff) = socket.socketpair(), socket.socketpair()
    with (
        daemon,
        handoff,
        contextlib.closing(FrameSocket(theirs)) as out,
        contextlib.closing(FrameSocket(ours)) as frames,
    ):
        handoff.settimeout(0.01)
        if gone:
            daemon.close()
        main.Engine(out, handoff, loaded).dispatch(engine.EngineCommand(open_epoch=command))
        refused = frames.receive(engine.EngineEvent)
    assert refused is not None
    assert (refused.problem.id, refused.problem.problem.reason) == (1, "NO_CHANNEL")


def test_the_end_of_the_pipe_ends_the_process() -> None:
    other = EngineProcess()
    other.send(load=engine.LoadStage(id=1, path=str(MODEL), lo=0, hi=LAYERS, context=CONTEXT))
    other.frames.socket.shutdown(socket.SHUT_WR)
    assert other.process.wait(200) == 0
    other.end()


@pytest.mark.parametrize("named", [[], ["--form", "12"], ["--form", "14"]])
def test_an_engine_of_another_release_than_its_daemon_does_not_start(named: list[str]) -> None:
    """A daemon of protocol 12 names no form."""
    command = [sys.executable, "-m", "sealring.node.engine.main", "--control-fd", "0", *named]
    ended = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True, check=False)
    assert (ended.returncode, "--form" in ended.stderr) == (2, True)
