"""A head that sends its gateway whatever it likes: the gateway, which serves other rings too, goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
from ringtest import CLUSTER, LIMIT_SECONDS, Ring, chat

pytestmark = CLUSTER
BOUND = 128 << 20
"""Bytes that any one member may cost its gateway."""

LOOKS = 8
"""How often the gateway is looked at, once the ring is lost where it has to be; a flood of 100 MiB takes less
than one."""


@pytest.mark.parametrize(
    ("attack", "ends"),
    [("flood", True), ("small", True), ("fields", True), ("guests", False), ("pongs", False)],
)
async def test_a_flood_costs_the_gateway_little(victim: Ring, flood: Path, attack: str, ends: bool) -> None:
    """Neither of memory nor of its answers to others, while clients of the ring do not read. An attack that
    no honest head can be taken for `ends` the epoch."""
    await victim.serving()
    await victim.reply(chat("warm"), 8)
    gateway = psutil.Process(victim.cluster.processes["gateway"])
    log = victim.cluster.logs["gateway"]
    heard = log.stat().st_size
    before = most = gateway.memory_info().rss
    slowest = 0.0
    left = LOOKS
    async with (
        flooding(flood, attack),
        asyncio.timeout(LIMIT_SECONDS),
        httpx.AsyncClient(base_url=victim.cluster.http_url, timeout=LIMIT_SECONDS) as http,
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
    assert (await victim.reply(chat("still there"), 8)).completion_tokens == 8


@contextlib.asynccontextmanager
async def flooding(flood: Path, attack: str) -> AsyncIterator[None]:
    """While the ring's head attacks."""
    flood.write_text(attack, encoding="utf-8")
    try:
        yield
    finally:
        flood.write_text("", encoding="utf-8")


async def _begin(http: httpx.AsyncClient, attack: str) -> None:
    """A client that asks, and reads nothing of the answer. Its prompt is new: the gateway refuses one that an
    earlier attack let end five epochs."""
    body = {"model": "demo", "messages": [{"role": "user", "content": f"count {attack}"}], "max_tokens": 64}
    with contextlib.suppress(httpx.HTTPError):
        async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}):
            await asyncio.Event().wait()
