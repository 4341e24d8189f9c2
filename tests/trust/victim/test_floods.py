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
BOUND = 160 << 20
"""Bytes that any one member may cost its gateway."""

LOOKS = 8
"""How often the gateway is looked at, once the ring is lost where it has to be; a flood of 100 MiB takes less
than one."""


@pytest.mark.parametrize(
    ("attack", "event"),
    [
        ("flood", "ring_lost"),
        ("small", "ring_lost"),
        ("fields", "ring_lost"),
        ("guests", ""),
        ("pieces", "flood_answered"),
        ("pongs", ""),
    ],
)
async def test_a_flood_costs_the_gateway_little(victim: Ring, flood: Path, attack: str, event: str) -> None:
    """Neither of memory nor of its answers to others, while clients of the ring do not read. An attack that
    no honest head can be taken for ends the epoch. It is looked at until the logs have the attack's beginning
    and the `event`."""
    await victim.serving()
    await victim.reply(chat("warm"), 8)
    gateway = psutil.Process(victim.cluster.processes["gateway"])
    logs = victim.cluster.logs.values()
    heard = [log.stat().st_size for log in logs]
    before = most = gateway.memory_info().rss
    slowest = 0.0
    left, awaited = LOOKS, [f"flood_of_{attack}", *[event] * bool(event)]
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
            told = b"".join(log.read_bytes()[size:] for log, size in zip(logs, heard, strict=True))
            left -= all(f'"{word}"'.encode() in told for word in awaited)
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
