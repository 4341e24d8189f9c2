"""A ring whose parts are killed or frozen forms a new epoch and serves again."""

import asyncio
import os
import signal

import grpc
import psutil
import pytest
from ringtest import chat, serving

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.xdist_group("integration")]


def children(pid: int, word: str) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children(recursive=True) if word in " ".join(one.cmdline())]


async def eventually(ring, seconds: float = 60.0):
    """The first reply that the ring gives again."""
    for _ in range(int(seconds)):
        try:
            return await ring.ask(chat("What is the capital of France?"), 20)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND):
                raise
            await asyncio.sleep(1)
    raise AssertionError("the ring does not serve again")


async def test_the_ring_serves_again_after_each_fault(tmp_path):
    async with serving(tmp_path / "state", 3) as ring:
        before = await ring.ask(chat("What is the capital of France?"), 20)
        node = ring.cluster.processes["node-1"]
        engine = children(node, "node.engine.main")[0].pid

        children(node, "node.carrier.main")[0].kill()
        assert await eventually(ring) == before
        assert children(node, "node.engine.main")[0].pid == engine, (
            "the weights were dropped with the carrier"
        )

        os.kill(children(node, "node.carrier.main")[0].pid, signal.SIGSTOP)
        assert await eventually(ring) == before

        children(node, "node.engine.main")[0].kill()
        assert await eventually(ring) == before
    assert psutil.Process().children(recursive=True) == []
