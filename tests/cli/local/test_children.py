from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from descriptors import Descriptors
from patience import until

from sealring.cli.local import children as module
from sealring.cli.local.children import MAX_LOG_BYTES, Children, tail
from sealring.mesh.errors import ConfigError, PermissionDenied, Unavailable

SLEEP = "exec sleep 60"
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, sorted(name for name in os.environ if name.startswith("SEALRING_")), flush=True)
time.sleep(60)
"""


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    group = Children(tmp_path, command=["/bin/sh", "-c"])
    yield group
    await group.stop()


async def read_when_written(file: Path) -> str:
    await until(lambda: file.exists() and file.read_text().endswith("\n"))
    return file.read_text()


async def test_a_component_that_ends_is_reported_with_its_last_words_and_nothing_older(
    children: Children, tmp_path: Path
) -> None:
    (tmp_path / "gateway.log").write_text("an error of yesterday\n")
    await children.start("node-0", [SLEEP])
    await children.start("gateway", ["echo first; echo the port is in use >&2; exit 1"])
    with pytest.raises(Unavailable) as caught:
        await children.failed()
    assert (caught.value.reason, caught.value.metadata["component"]) == ("COMPONENT_ENDED", "gateway")
    assert "the gateway ended by itself with status 1" in caught.value.message
    assert "  first\n  the port is in use" in caught.value.message
    assert "yesterday" not in caught.value.message
    assert set(children.pids) == {"node-0", "gateway"}


async def test_who_was_thrown_out_is_told_so_and_not_shown_a_log(children: Children) -> None:
    await children.start("node", ["echo removed_from_cluster"])
    with pytest.raises(PermissionDenied) as caught:
        await children.failed()
    assert caught.value.reason == "REMOVED"
    assert "sealring token code" in caught.value.hint


async def test_a_large_log_begins_anew_and_the_last_one_is_kept(children: Children, tmp_path: Path) -> None:
    for name, size in (("node-0", MAX_LOG_BYTES + 1), ("node-1", MAX_LOG_BYTES)):
        with (tmp_path / f"{name}.log").open("wb") as file:
            file.truncate(size)
        await children.start(name, [f"echo new; {SLEEP}"])
        await until(lambda name=name: children.logs[name].stat().st_size not in (0, MAX_LOG_BYTES))
    assert children.logs["node-0"].read_text() == "new\n"
    assert (tmp_path / "node-0.log.1").stat().st_size == MAX_LOG_BYTES + 1
    assert not (tmp_path / "node-1.log.1").exists()


async def test_work_goes_on_unless_a_component_ends_first(children: Children) -> None:
    async def work(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    async def outlast() -> None:
        os.kill(children.pids["node"], signal.SIGKILL)
        await asyncio.Event().wait()

    await children.start("node", [SLEEP])
    before = asyncio.all_tasks()
    assert await children.or_failure(work(7)) == 7
    for error in (ValueError("x"), ConfigError("x")):
        with pytest.raises(type(error), match="x"):
            await children.or_failure(work(error))
    with pytest.raises(Unavailable, match="ended by itself"):
        await children.or_failure(outlast())
    with pytest.raises(Unavailable, match="ended by itself"):
        await children.or_failure(work(ConfigError("what came of it")))
    assert asyncio.all_tasks() <= before


async def test_stopping_leaves_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TERM_SECONDS", 0.3)
    monkeypatch.setattr(module, "REAP_SECONDS", 0.3)
    monkeypatch.setenv("SEALRING_NODE_NAME", "other")
    children = Children(tmp_path, command=[sys.executable, "-c"])
    await children.start("node-0", [STUBBORN])
    pid, variables = (await read_when_written(children.logs["node-0"])).split(maxsplit=1)
    assert variables.strip() == "[]"
    await children.stop()
    gone = [children.pids["node-0"], int(pid)]
    await until(lambda: not any(map(psutil.pid_exists, gone)))


async def test_gateways_end_first_and_the_coordinator_last(children: Children, tmp_path: Path) -> None:
    order = tmp_path / "order"
    for name in ("coordinator", "node-0", "gateway"):
        await children.start(
            name, [f"trap 'echo {name} >> {order}; exit' TERM; echo up; while :; do sleep 0.01; done"]
        )
        await read_when_written(children.logs[name])
    await children.stop()
    assert order.read_text().split() == ["gateway", "node-0", "coordinator"]


async def test_a_kill_on_purpose_is_no_failure_and_a_component_can_be_started_again(
    children: Children,
) -> None:
    await children.start("node-0", [SLEEP])
    first = children.pids["node-0"]
    await children.kill_one("node-0")
    await children.kill_one("node-0")  # an ended process gets no signal: its number may be another's
    await children.start("node-0", [SLEEP])
    assert children.pids["node-0"] != first
    psutil.Process(children.pids["node-0"]).kill()
    with pytest.raises(Unavailable, match="signal 9") as caught:
        await children.failed()
    assert caught.value.metadata["component"] == "node-0"


def test_of_a_log_so_much_of_its_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == "  (nothing)"
    log.write_bytes(b"\xff\n" * 20000 + "".join(f"line {n}\n" for n in range(20)).encode())
    assert tail(log).splitlines()[-1] == "  line 19"
    assert len(tail(log).splitlines()) == 12
    log.write_bytes(b"a" + b"b" * (1 << 14))
    assert tail(log) == f"  {'b' * 400}"
    log.write_text("x" * 500 + "\nafter\n")
    assert tail(log) == f"  {'x' * 400}\n  after"
    assert tail(log, 501) == "  after"
    assert tail(log, 9999) == "  (nothing)"


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
