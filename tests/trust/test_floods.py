"""A head that sends its gateway whatever it likes: the gateway, which serves other rings too, goes on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
from ringtest import CLUSTER, HASTY, LIMIT_SECONDS, MODEL, Ring, chat, started

from sealring.cli.local.cluster import LocalCluster

pytestmark = CLUSTER
FLOODING = Path(__file__).with_name("flooding_node.py")
BOUND = 128 << 20
"""Bytes that any one member may cost its gateway."""

LOOKS = 20
"""How often the gateway is looked at, once the ring is lost where it has to be; a flood of 100 MiB takes less
than one."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def attacked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Ring, Path]]:
    """A ring whose head is malicious once its file names an attack."""
    folder = tmp_path_factory.mktemp("floods")
    attack = folder / "attack"
    attack.touch()
    async with LocalCluster(folder / "state", MODEL, nodes=2, name="demo", settings=HASTY) as cluster:
        cluster.children.command = (sys.executable, str(FLOODING), str(attack))
        async with started(cluster, stages=2) as ring:
            yield ring, attack


@pytest.mark.parametrize(
    ("attack", "ends"),
    [("flood", True), ("small", True), ("fields", True), ("guests", False), ("pongs", False)],
)
async def test_a_flood_costs_the_gateway_little(attacked: tuple[Ring, Path], attack: str, ends: bool) -> None:
    """Neither of memory nor of its answers to others, while clients of the ring do not read. An attack that
    no honest head can be taken for `ends` the epoch."""
    ring, file = attacked
    file.write_text("", encoding="utf-8")
    await ring.reply(chat("warm"), 8)
    gateway = psutil.Process(ring.cluster.processes["gateway"])
    log = ring.cluster.logs["gateway"]
    heard = log.stat().st_size
    before = most = gateway.memory_info().rss
    slowest = 0.0
    file.write_text(attack, encoding="utf-8")
    left = LOOKS
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=LIMIT_SECONDS) as http,
        asyncio.TaskGroup() as group,
    ):
        readers = [group.create_task(_begin(http, attack)) for _ in range(4)]
        while left:
            asked = time.monotonic()
            assert (await http.get("/health/live")).status_code == 200
            slowest = max(slowest, time.monotonic() - asked)
            most = max(most, gateway.memory_info().rss)
            left -= not ends or b'"ring_lost"' in log.read_bytes()[heard:]
            await asyncio.sleep(0.1)
        for reader in readers:
            reader.cancel()
    print(f"{attack}: {(most - before) >> 20} MiB more, liveness after {slowest:.3f} s at most")  # noqa: T201
    assert most - before <= BOUND
    assert gateway.is_running()
    file.write_text("", encoding="utf-8")
    assert (await ring.reply(chat("still there"), 8)).completion_tokens == 8


async def _begin(http: httpx.AsyncClient, attack: str) -> None:
    """A client that asks, and reads nothing of the answer. Its prompt is new: the gateway refuses one that an
    earlier attack let end five epochs."""
    body = {"model": "demo", "messages": [{"role": "user", "content": f"count {attack}"}], "max_tokens": 64}
    with contextlib.suppress(httpx.HTTPError):
        async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}):
            await asyncio.Event().wait()
