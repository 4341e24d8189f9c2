"""Parts of a serving ring that stop without a word, and one that is only slow."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from ringtest import MODEL, Reply, Ring, chat, serving

from cli.cluster import LocalCluster
from sealring.v1 import admin_pb2, inference_pb2_grpc, membership_pb2

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("integration"),
    pytest.mark.asyncio(loop_scope="module"),
]
SUPPORT = Path(__file__).parents[1] / "support"
QUESTION = "What is the capital of France?"
FOUND_SECONDS = 15.0
"""Within which it is found; four to six where the machine has time for its processes."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ring]:
    async with serving(tmp_path_factory.mktemp("frozen") / "state", 2) as ring:
        yield ring


async def status(ring: Ring) -> Any:
    answer = await ring.cluster.admin.call("ListDeployments", admin_pb2.ListDeploymentsRequest())
    return answer.deployments[0].rings[0]


async def replied(ring: Ring) -> Reply:
    async with asyncio.timeout(90):
        while True:
            try:
                return await ring.ask(chat(QUESTION), 40)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND):
                    raise
                await asyncio.sleep(0.5)


def part(ring: Ring, node: str, word: str) -> psutil.Process:
    daemon = psutil.Process(ring.cluster.processes[node])
    if word == "daemon":
        return daemon
    return next(one for one in daemon.children(recursive=True) if word in " ".join(one.cmdline()))


@pytest.mark.parametrize("node", ["node-0", "node-1"])
@pytest.mark.parametrize("word", ["node.carrier.main", "node.engine.main", "daemon"])
async def test_what_is_frozen_is_found(pair: Ring, word: str, node: str) -> None:
    """While a request is under way: its epoch ends soon, and the next one answers the same."""
    expected = await replied(pair)
    before = (await status(pair)).epoch
    frozen = part(pair, node, word)
    frozen.send_signal(signal.SIGSTOP)
    try:
        answer = asyncio.create_task(replied(pair))
        async with asyncio.timeout(FOUND_SECONDS):
            while (now := await status(pair)).epoch == before:
                if now.phase != membership_pb2.RING_PHASE_SERVING:
                    break
                await asyncio.sleep(0.1)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            frozen.send_signal(signal.SIGCONT)
    assert await answer == expected


class SlowCluster(LocalCluster):
    """One node's engine takes many times as long for a step as a lost record is waited for."""

    slow = "node-0"

    async def start_node(self, name: str) -> None:
        genuine = self._children._command
        if name == self.slow:
            self._children._command = (sys.executable, str(SUPPORT / "slow_node.py"))
        starting = asyncio.create_task(super().start_node(name))
        await asyncio.sleep(0)
        self._children._command = genuine
        await starting


@pytest.mark.parametrize("node", ["node-0", "node-1"])
async def test_an_engine_that_is_slow_is_waited_for(tmp_path: Path, node: str) -> None:
    async with SlowCluster(tmp_path / "state", MODEL, nodes=2, name="demo") as cluster:
        cluster.slow = node
        await cluster.start()
        deployment = await cluster.deploy(stages=2)
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            ring = Ring(cluster, deployment, inference_pb2_grpc.InferenceStub(channel))
            begun = asyncio.get_running_loop().time()
            assert (await ring.ask(chat(QUESTION), 40)).completion_tokens > 1
            assert asyncio.get_running_loop().time() - begun > 15, "it was not slow"
            assert (await status(ring)).epoch == 1
