"""A coordinator that nobody reaches any more, its standby, and the coordinator when it is reached again."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import psutil
from following import follow
from patience import until
from ringtest import CLUSTER, LIMIT_SECONDS, Ring, chat

from sealring.cli.calls.operator import read_bundle
from sealring.coordinator.standby.follow import promote
from sealring.v1 import admin_pb2, membership_pb2

from .conftest import Sick

pytestmark = CLUSTER
QUESTION = chat("What is the capital of France?")


async def ring_of(admin: Any) -> Any:
    """The ring, once both of its nodes are online there."""
    while True:
        nodes = (await admin.call("ListNodes", wait_for_ready=True)).nodes
        rings = (await admin.call("ListDeployments")).deployments[0].rings
        online = [
            one for one in nodes if one.state == admin_pb2.NODE_STATE_ONLINE and one.heartbeat.memory_usable
        ]
        if len(online) == 2 and rings[0].phase == membership_pb2.RING_PHASE_SERVING:
            return rings[0]
        await asyncio.sleep(0.1)


async def test_the_standby_of_a_coordinator_that_is_cut_off_takes_over(sick: Sick) -> None:
    """Afterwards it is the cluster's coordinator."""
    async with asyncio.timeout(3 * LIMIT_SECONDS):
        await take_over(sick.ring, sick.standby)


async def take_over(ring: Ring, listen: str) -> None:
    cluster = ring.cluster
    before = await ring.serving()
    expected = await ring.ask(QUESTION, 200)
    standby = await follow(cluster, listen)
    process = cluster.children.expect_end("coordinator")
    deposed = psutil.Process(process.pid)
    deposed.send_signal(signal.SIGSTOP)  # as silent as one behind a cable that is cut
    answered = asyncio.create_task(ring.ask(QUESTION, 200))
    promote(standby)
    bundle = standby.state_dir / "operator"
    await until(lambda: read_bundle(bundle).coordinator == listen, pause=0.1)
    await cluster.administer(bundle)
    assert (await ring_of(cluster.admin)).epoch == before.epoch
    assert await answered == expected
    deposed.send_signal(signal.SIGCONT)
    assert await process.wait() != 0
    assert "DEPOSED" in cluster.logs["coordinator"].read_text()
    assert (await ring_of(cluster.admin)).epoch == before.epoch
    assert await ring.ask(QUESTION, 200) == expected
