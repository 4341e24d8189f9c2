import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import structlog
from patience import PATIENCE_SECONDS, until

from sealring.mesh.errors import DeadlineExceeded, EpochEnded
from sealring.node.daemon import supervisor
from sealring.node.daemon.supervisor import (
    MAX_FRAME,
    Child,
    Frames,
    Liveness,
    finish,
    stopped_at,
    within,
)
from sealring.node.wire.frames import LENGTH
from sealring.v1 import control_pb2, engine_pb2

SCRIPT = str(Path(__file__).with_name("scripted_child.py"))


class Family:
    """Children that end with the test, and what they said."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[engine_pb2.EngineEvent] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.children: list[Child] = []

    async def spawn(self, *arguments: str) -> Child:
        child = await Child.spawn(
            "scripted",
            [SCRIPT, *arguments],
            on_message=lambda body: self.events.put_nowait(engine_pb2.EngineEvent.FromString(body)),
            on_end=self.ended.set,
        )
        self.children.append(child)
        return child


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_TERM_GRACE_SECONDS", 0.2), ("LOOK_SECONDS", 0.02)):
        monkeypatch.setattr(supervisor, name, seconds)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Processor seconds as the system shows them: of a stopped process, and of any."""
    shown = SimpleNamespace(stopped_at=stopped_at, cpu_seconds=supervisor.cpu_seconds)
    for name in vars(shown):
        monkeypatch.setattr(supervisor, name, lambda pid, name=name: getattr(shown, name)(pid))
    return shown


@pytest.fixture
async def family():
    before = psutil.Process().num_fds()
    family = Family()
    yield family
    for child in family.children:
        await child.stop()
        assert not psutil.pid_exists(child.pid)
    await until(lambda: psutil.Process().num_fds() <= before)


def ping(sequence: int) -> bytes:
    return engine_pb2.EngineCommand(ping=control_pb2.Ping(sequence=sequence)).SerializeToString()


def order(what: str) -> bytes:
    return engine_pb2.EngineCommand(profile=engine_pb2.ProfileModel(path=what)).SerializeToString()


async def test_frames_go_both_ways(family: Family) -> None:
    child = await family.spawn()
    ready = await family.events.get()
    assert ready.ready.memory_limit <= 5  # standard streams, its control socket, and the listing itself
    for sequence in range(200):
        child.send(ping(sequence))
    answers = [(await family.events.get()).pong.sequence for _ in range(200)]
    assert answers == list(range(200))
    farewell = engine_pb2.EngineCommand(shutdown=engine_pb2.Shutdown()).SerializeToString()
    assert await child.stop(farewell, grace=PATIENCE_SECONDS) == 0
    with pytest.raises(EpochEnded):
        child.send(ping(1))


async def test_a_child_that_ignores_everything_is_killed(family: Family) -> None:
    child = await family.spawn("--stubborn")
    await family.events.get()
    assert await child.stop(grace=0.1) == -signal.SIGKILL


@pytest.mark.usefixtures("family")
async def test_a_child_that_cannot_be_started_leaves_nothing_open() -> None:
    with pytest.raises(ValueError, match="null byte"):
        await Child.spawn("scripted", ["a\0b"], on_message=print, on_end=print)


@pytest.mark.parametrize("how", ["crash", "garbage"])
async def test_the_end_of_a_child_is_told_once(family: Family, how: str) -> None:
    child = await family.spawn()
    await family.events.get()
    child.send(order(how))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await family.ended.wait()
    assert child.ended
    status = await child.stop()
    assert status in (3, -signal.SIGTERM, -signal.SIGKILL)


async def test_a_child_is_left_time_to_end_by_itself(family: Family) -> None:
    child = await family.spawn()
    await family.events.get()
    assert await child.stop(grace=PATIENCE_SECONDS) == 0, "its socket has ended"


async def test_what_a_child_started_ends_with_it(family: Family) -> None:
    child = await family.spawn()
    await family.events.get()
    child.send(order("grandchild"))
    grandchild = (await family.events.get()).loaded.weight_bytes
    child.kill()
    await child.stop()
    await until(lambda: gone(grandchild))


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_stop_survives_cancellation(family: Family) -> None:
    child = await family.spawn("--stubborn")
    await family.events.get()
    first = asyncio.create_task(child.stop(grace=0.1))
    await asyncio.sleep(0)
    first.cancel()
    assert await child.stop() == -signal.SIGKILL


async def test_whoever_stops_watching_or_begins_anew_leaves_nothing_running() -> None:
    nothing = dict.fromkeys(("send", "cpu_seconds", "stopped_at"), lambda *_: None)
    child: Any = SimpleNamespace(ended=False, last_heard=0.0, **nothing)
    liveness = Liveness(child, lambda number: b"", lambda: None)
    before = asyncio.all_tasks()
    counts = []
    for begin in (lambda: liveness.watch(interval=1000.0, deadline=1000.0), liveness.look, liveness.stop):
        begin()
        for _ in range(5):
            await asyncio.sleep(0)
        counts.append(len(asyncio.all_tasks() - before))
    assert counts == [2, 1, 0]


async def test_a_frozen_child_is_found(family: Family, shown: Any) -> None:
    """By its silence alone."""
    shown.stopped_at = lambda pid: None
    child = await family.spawn()
    await family.events.get()
    frozen = asyncio.Event()
    liveness = Liveness(child, ping, frozen.set)
    liveness.watch(interval=0.02, deadline=PATIENCE_SECONDS)
    for sequence in range(1, 6):
        assert (await family.events.get()).pong.sequence == sequence
    assert not frozen.is_set()
    os.kill(child.pid, signal.SIGSTOP)
    liveness.watch(interval=0.02, deadline=0.3)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await frozen.wait()
    liveness.stop()


@pytest.mark.parametrize("works", [False, True])
async def test_a_silent_child_that_does_not_work_is_found_sooner(
    family: Family, shown: Any, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """However it is held: nothing is known of it but its processor time."""
    monkeypatch.setattr(supervisor, "IDLE_SHARE", 1e-9)
    looks: list[int] = []
    shown.stopped_at = lambda pid: None
    shown.cpu_seconds = lambda pid: looks.append(pid) or len(looks) * works
    child = await family.spawn()
    await family.events.get()
    os.kill(child.pid, signal.SIGSTOP)
    frozen = asyncio.Event()
    liveness = Liveness(child, ping, frozen.set)
    liveness.watch(interval=0.02, deadline=1000.0)
    if works:
        await until(lambda: len(looks) > 5)
        assert not frozen.is_set()
        liveness.stop()
    else:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await frozen.wait()


async def test_the_processor_time_of_a_child_is_known_unless_it_waits_for_a_processor(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await family.spawn()
    await family.events.get()
    os.kill(child.pid, signal.SIGSTOP)
    await until(lambda: supervisor.stopped_at(child.pid) is not None)
    assert supervisor.cpu_seconds(child.pid) == supervisor.stopped_at(child.pid) != 0
    monkeypatch.setattr(supervisor.psutil.Process, "status", lambda self: psutil.STATUS_RUNNING)
    for system, known in (("linux", False), ("darwin", True)):  # where every process has this state
        monkeypatch.setattr(supervisor.sys, "platform", system)
        assert (supervisor.cpu_seconds(child.pid) is not None) == known
    monkeypatch.undo()
    await child.stop()
    assert supervisor.cpu_seconds(child.pid) is supervisor.stopped_at(child.pid) is None


async def test_a_stopped_child_is_found_by_its_state(family: Family, shown: Any) -> None:
    looks: list[int] = []
    shown.stopped_at = lambda pid: looks.append(pid) or stopped_at(pid)
    child = await family.spawn()
    await family.events.get()
    frozen, before = asyncio.Event(), asyncio.all_tasks()
    liveness = Liveness(child, ping, frozen.set)
    liveness.watch(interval=500.0, deadline=1000.0)
    await until(lambda: len(looks) > 8)
    assert not frozen.is_set(), "it only has nothing to say"
    os.kill(child.pid, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await frozen.wait()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_child_that_is_slowed_down_is_not_frozen(family: Family, shown: Any) -> None:
    """Held at every look, but it has worked in between: whoever limits its share of a core does so."""
    worked: list[float] = []
    shown.stopped_at = lambda pid: worked.append(len(worked)) or worked[-1]
    child = await family.spawn()
    await family.events.get()
    frozen = asyncio.Event()
    liveness = Liveness(child, ping, frozen.set)
    liveness.watch(interval=500.0, deadline=1000.0)
    await until(lambda: len(worked) > 8)
    assert not frozen.is_set()
    liveness.stop()


async def test_a_child_that_does_not_read_pushes_back(family: Family) -> None:
    child = await family.spawn()
    await family.events.get()
    os.kill(child.pid, signal.SIGSTOP)
    for _ in range(64):
        child.send(order("x" * 100_000))
    waiting = asyncio.create_task(child.drained())
    await asyncio.sleep(0)
    assert not waiting.done()
    os.kill(child.pid, signal.SIGCONT)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await waiting


async def test_logs_hold_event_names_only(family: Family) -> None:
    with structlog.testing.capture_logs() as logs:
        child = await family.spawn()
        await family.events.get()
        child.send(order("log"))
        child.send(ping(1))
        await family.events.get()
        await child.stop(grace=PATIENCE_SECONDS)
    said = [entry.get("said") for entry in logs if entry["event"] == "child_log"]
    assert said == [
        "hello there",
        "broke",
        "odd",
        'File "x.py", line 3, in main',
        "ValueError",
        "[ring] connecting to 127.0.0.1",
    ]
    assert "secret" not in str(logs)
    broke = next(entry for entry in logs if entry.get("said") == "broke")
    assert (broke["error"], broke["exception"]) == ("KeyError", ["KeyError", "  /x/y.py:3 main"])
    assert any(entry.get("lines") == 3 for entry in logs)


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", "x")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = supervisor.child_environment({"TMPDIR": "/somewhere"})
    assert environment["TMPDIR"] == "/somewhere"
    assert not {"SEALRING_SECRET", "PYTHONPATH"} & set(environment)
    assert sys.executable


class Transport(asyncio.Transport):
    """Keeps what is written; `held` bytes of it cannot go out."""

    def __init__(self, held: int = 0) -> None:
        super().__init__()
        self.written, self.ends, self.held = b"", [], held

    def writelines(self, parts) -> None:
        self.written += b"".join(parts)

    def get_write_buffer_size(self) -> int:
        return self.held

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.ends.append("aborted")


class Connection:
    """Frames over such a transport, and what they hand on; `refuse` is a message that cannot be handled."""

    def __init__(self, held: int = 0, refuse: bytes = b"bad") -> None:
        self.heard: list[bytes] = []
        self.refuse, self.ended = refuse, 0
        self.frames = Frames(self._hear, self._end)
        self.transport = Transport(held)
        self.frames.connection_made(self.transport)

    def _hear(self, body: bytes) -> None:
        if body == self.refuse:
            raise ValueError("no")
        self.heard.append(body)

    def _end(self) -> None:
        self.ended += 1


def framed(*bodies: bytes) -> bytes:
    return b"".join(LENGTH.pack(len(body)) + body for body in bodies)


async def test_frames_are_found_however_they_come() -> None:
    bodies = [b"", b"one", b"x" * 300]
    for size in (1, 3, 5, 7, 1000):
        connection = Connection()
        data = framed(*bodies, *bodies)
        for start in range(0, len(data), size):
            connection.frames.data_received(data[start : start + size])
        assert connection.heard == bodies * 2
        assert not connection.frames.buffer
    connection.frames.send(b"back")
    assert connection.transport.written == framed(b"back")


async def test_what_is_no_frame_or_cannot_be_handled_ends_the_connection() -> None:
    for data in (framed(b"bad", b"next"), LENGTH.pack(MAX_FRAME + 1)):
        connection = Connection()
        connection.frames.data_received(framed(b"first") + data)
        assert (connection.heard, connection.transport.ends) == ([b"first"], ["aborted"])
        assert connection.frames.closed
        assert not connection.frames.buffer
    largest = Connection()
    largest.frames.data_received(LENGTH.pack(MAX_FRAME))
    assert largest.transport.ends == []


async def test_nothing_is_sent_before_or_after_a_connection() -> None:
    early = Frames(lambda body: None, lambda: None)
    early.send(b"early")
    early.close()
    connection = Connection()
    connection.frames.pause_writing()
    assert not connection.frames.writable.is_set()
    connection.frames.resume_writing()
    assert connection.frames.writable.is_set()
    connection.frames.pause_writing()
    connection.frames.connection_lost(None)
    connection.frames.send(b"late")
    assert (connection.ended, connection.transport.written) == (1, b"")
    assert connection.frames.writable.is_set(), "nobody waits for a child that is gone"


async def test_a_child_that_does_not_read_its_last_frames_is_cut_off() -> None:
    for held, ends in ((0, ["closed"]), (1, ["closed", "aborted"])):
        connection = Connection(held)
        connection.frames.pause_writing()
        connection.frames.close()
        assert connection.frames.writable.is_set()
        assert connection.frames.closed
        await until(lambda: connection.transport.ends == ends)  # noqa: B023


async def test_a_cancellation_that_comes_with_the_answer_is_not_lost() -> None:
    """The answer is there, and whoever asked has not seen it yet."""
    answer = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(within(answer, 200.0, "a question", "X"))
    await asyncio.sleep(0)
    answer.set_result("yes")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_an_answer_that_does_not_come_is_named() -> None:
    with pytest.raises(DeadlineExceeded, match="a question took longer than 0 s") as caught:
        await within(asyncio.get_running_loop().create_future(), 0.0, "a question", "LATE")
    assert caught.value.reason == "LATE"


async def test_who_holds_a_pipe_open_does_not_hold_up_an_end() -> None:
    endless = asyncio.create_task(asyncio.Event().wait())
    await finish(endless)
    assert endless.cancelled()
