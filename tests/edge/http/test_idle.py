"""Clients that keep a connection and do nothing with it (`python -m bench clients` has thousands of them)."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import tracemalloc

import httpx
import psutil
from patience import until

from bench.clients import LOOK, connected

COUNT = 100
KIB_EACH = 32
"""The bound of Python's memory for both ends of a connection; measured: 9."""


async def test_idle_connections_cost_little_and_leave_nothing(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as client:
        assert (await client.get("/health/live")).status_code == 200
        process = psutil.Process()
        files = process.num_fds()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            held = await connected(port, LOOK, COUNT, answered=True)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert len(held) == COUNT
        assert grown < COUNT * KIB_EACH << 10
        assert (await client.get("/v1/models")).json()["data"], "others are served beside them"
        for one in held:
            one.close()
        await until(lambda: process.num_fds() <= files)


async def test_a_client_that_vanished_without_a_word_is_asked_for_a_sign(port: int) -> None:
    """It may wait for a whole answer, of which nothing is sent to it before."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    own = writer.get_extra_info("sockname")
    async with asyncio.timeout(200):
        while not (asked := kept_alive(own)):
            await asyncio.sleep(0.01)
    assert all(asked)
    writer.close()


def kept_alive(address: tuple[str, int]) -> list[int]:
    """SO_KEEPALIVE of this process's ends of connections from an address."""
    found = []
    for one in psutil.Process().net_connections("tcp"):
        if one.raddr == address:
            with socket.socket(fileno=os.dup(one.fd)) as copy:
                found.append(copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
    return found
