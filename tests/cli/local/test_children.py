from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from descriptors import Descriptors

from sealring.cli.local import children as module
from sealring.cli.local.children import Children, tail
from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.errors import PermissionDenied, Unavailable

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, sorted(name for name in os.environ if name.startswith("SEALRING_")), flush=True)
time.sleep(60)
"""


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    group = Children(tmp_path, command=[sys.executable, "-c"])
    yield group
    await group.stop()


async def read_when_written(file: Path) -> str:
    while not (file.exists() and file.read_text().endswith("\n")):
        await asyncio.sleep(0.02)
    return file.read_text()


async def test_a_component_that_ends_is_reported_with_its_last_words(children: Children) -> None:
    await children.start("node-0", ["import time; time.sleep(60)"])
    await children.start("gateway", ["import sys; print('first'); sys.exit('the port is in use')"])
    with pytest.raises(Unavailable) as caught:
        await children.failed()
    assert caught.value.reason == "COMPONENT_ENDED"
    assert "the gateway ended by itself with status 1" in caught.value.message
    assert "  the port is in use" in caught.value.message
    assert set(children.pids) == {"node-0", "gateway"}


async def test_who_was_thrown_out_is_told_so_and_not_shown_a_log(children: Children) -> None:
    await children.start("node", ["print('removed_from_cluster')"])
    with pytest.raises(PermissionDenied) as caught:
        await children.failed()
    assert caught.value.reason == "REMOVED"
    assert "join again with a new token" in caught.value.hint


async def test_what_a_component_said_before_is_not_told_as_why_it_ended(
    children: Children, tmp_path: Path
) -> None:
    (tmp_path / "gateway.log").write_text("an error of yesterday\n")
    await children.start("gateway", ["import sys; sys.exit('the port is in use')"])
    with pytest.raises(Unavailable) as caught:
        await children.failed()
    assert "  the port is in use" in caught.value.message
    assert "yesterday" not in caught.value.message


async def test_a_large_log_begins_anew_and_the_last_one_is_kept(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.cli.local.children.MAX_LOG_BYTES", 4)
    (tmp_path / "node-0.log").write_text("large")
    (tmp_path / "node-1.log").write_text("tiny")
    for name in ("node-0", "node-1"):
        await children.start(name, ["import time; print(' new', flush=True); time.sleep(60)"])
    assert await read_when_written(children.logs["node-0"]) == " new\n"
    assert await read_when_written(children.logs["node-1"]) == "tiny new\n"
    assert (tmp_path / "node-0.log.1").read_text() == "large"


async def test_one_component_gets_an_environment_of_its_own(children: Children) -> None:
    show = "import os, time; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True); time.sleep(60)"
    await children.start("node-0", [show], {"CUDA_VISIBLE_DEVICES": "1"})
    await children.start("node-1", [show])
    assert len(children._watchers) == 2, "nobody else holds them"
    own, other = [await read_when_written(children.logs[name]) for name in ("node-0", "node-1")]
    assert own == "1\n" != other


async def test_every_node_has_a_gpu_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, dict[str, str]] = {}

    async def start(self: Children, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        given[name] = environment

    monkeypatch.setattr(Children, "start", start)
    for gpus, expected in ((2, [{"CUDA_VISIBLE_DEVICES": number} for number in "010"]), (0, [{}, {}, {}])):
        async with LocalCluster(tmp_path, "model", gpus=gpus) as cluster:
            for name in cluster.node_names:
                await cluster.start_one(name)
        assert [given[name] for name in cluster.node_names] == expected


async def test_stopping_leaves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    monkeypatch.setattr("sealring.cli.local.children.TERM_SECONDS", 0.3)
    monkeypatch.setattr("sealring.cli.local.children.REAP_SECONDS", 0.3)
    monkeypatch.setenv("SEALRING_NODE_NAME", "other")
    await children.start("node-0", [STUBBORN])
    pid, variables = (await read_when_written(children.logs["node-0"])).split(maxsplit=1)
    assert variables.strip() == "[]"
    await children.stop()
    gone = [children.pids["node-0"], int(pid)]
    while any(psutil.pid_exists(one) for one in gone):
        await asyncio.sleep(0.05)
    assert not children._future().done(), "nobody watches any more who could take the end for a failure"


async def test_a_kill_on_purpose_is_no_failure(children: Children) -> None:
    await children.start("node-0", ["import time; time.sleep(60)"])
    await children.kill_one("node-0")
    await children.start("gateway", ["raise SystemExit(3)"])
    with pytest.raises(Unavailable) as caught:
        await children.failed()
    assert caught.value.metadata["component"] == "gateway"


async def test_a_component_can_be_started_again(children: Children) -> None:
    await children.start("node-0", ["import time; time.sleep(60)"])
    first = children.pids["node-0"]
    psutil.Process(first).kill()
    with pytest.raises(Unavailable, match="signal 9"):
        await children.failed()
    await children.start("node-0", ["import time; time.sleep(60)"])
    assert children.pids["node-0"] != first


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == "  (nothing)"
    log.write_bytes(b"\xff\n" * 20000 + "".join(f"line {n}\n" for n in range(20)).encode())
    assert tail(log).splitlines()[-1] == "  line 19"
    assert len(tail(log).splitlines()) == 12


@pytest.mark.parametrize(("size", "moved"), [(10 << 20, False), ((10 << 20) + 1, True)])
def test_a_log_is_large_beyond_ten_mebibytes(tmp_path: Path, size: int, moved: bool) -> None:
    log = tmp_path / "node.log"
    with log.open("wb") as file:
        file.truncate(size)
    module._move_aside(log)
    assert (tmp_path / "node.log.1").exists() == moved
    module._move_aside(tmp_path / "none.log")


def test_of_a_log_so_much_of_its_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"a" + b"b" * (1 << 14))
    assert tail(log) == f"  {'b' * 400}"
    log.write_bytes(b"a" + b"b" * ((1 << 14) - 1))
    assert tail(log) == f"  a{'b' * 399}"


async def test_the_end_leaves_no_descriptor_open_and_closes_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = Descriptors(monkeypatch)
    group = Children(tmp_path, command=[])
    assert len(descriptors.left()) == 2
    await group.stop()
    assert descriptors.left() == []
    others = os.pipe()
    await group.stop()
    for one in others:
        os.close(one)


def test_descendants_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid
            if pid == 8:
                raise psutil.NoSuchProcess(pid)

        def children(self, *, recursive: bool) -> list[Any]:
            return [f"below {self.pid}"] * recursive

    class Stubborn:
        def __init__(self, *, gone: bool) -> None:
            self.gone = gone

        def kill(self) -> None:
            did.append("kill")
            if self.gone:
                raise psutil.NoSuchProcess(1)

    family: Any = [Stubborn(gone=True), Stubborn(gone=False)]

    def wait(processes: Any, *, timeout: float) -> Any:
        did.append((len(processes), timeout))
        return [], processes

    monkeypatch.setattr(module.psutil, "Process", Process)
    monkeypatch.setattr(module.psutil, "wait_procs", wait)
    alive: list[Any] = [
        SimpleNamespace(process=SimpleNamespace(pid=pid, returncode=None)) for pid in (7, 8, 9)
    ]
    assert module._descendants(alive) == ["below 7", "below 9"]
    module._reap(family)
    assert did == [(2, 3.0), "kill", "kill", (2, 3.0)]


def test_only_what_is_still_there_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a process that has ended may be another one's."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "signal_group", lambda *of: killed.append(of))
    group: Any = Children(tmp_path, command=[])
    for name, pid, status in (("node-0", 7, None), ("node-1", 8, 0), ("gateway", 9, -15)):
        group._children[name] = SimpleNamespace(process=SimpleNamespace(pid=pid, returncode=status))
    group.kill()
    assert killed == [(7, signal.SIGKILL)]


async def test_who_has_ended_gets_no_signal_and_neither_does_who_got_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Children(tmp_path, command=[sys.executable, "-c"])
    await group.start("node-0", ["pass"])
    with pytest.raises(Unavailable):
        await group.failed()
    touched: list[int] = []
    monkeypatch.setattr(module, "signal_group", lambda pid, number: touched.append(pid))
    monkeypatch.setattr(module.psutil, "Process", touched.append)
    await group.kill_one("node-0")
    await group.stop()
    assert touched == []


def test_gateways_end_first_and_the_coordinator_last() -> None:
    names = ["coordinator", "node-0", "gateway", "node-1", "node"]
    children: list[Any] = [SimpleNamespace(name=name) for name in names]
    waves = [[one.name for one in wave] for wave in module._waves(children)]
    assert waves == [["gateway"], ["node-0", "node-1", "node"], ["coordinator"]]


def test_a_line_of_a_log_is_shown_as_far_as_it_is_of_use(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 500 + "\nafter\n")
    assert tail(log) == f"  {'x' * 400}\n  after"
    assert tail(log, 501) == "  after"
    assert tail(log, 9999) == "  (nothing)"
