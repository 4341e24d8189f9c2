"""A coordinator that is killed and comes back."""

from __future__ import annotations

import asyncio

from ringtest import CLUSTER, LIMIT_SECONDS, Ring, chat

from sealring.mesh.errors import SealringError
from sealring.v1 import admin_pb2

pytestmark = CLUSTER
QUESTION = chat("What is the capital of France?")


async def online(ring: Ring) -> int:
    """How many nodes are connected; none while there is no coordinator."""
    try:
        answer = await ring.cluster.admin.call("ListNodes")
    except SealringError:
        return 0
    return sum(one.state == admin_pb2.NODE_STATE_ONLINE and one.memory_usable > 0 for one in answer.nodes)


async def test_answers_go_on_while_it_is_away_and_when_it_is_back(broken: Ring) -> None:
    before = await broken.serving()
    expected = await broken.ask(QUESTION, 200)
    back = asyncio.Event()
    begun = asyncio.Queue[None]()

    async def ask_all_the_time() -> None:
        while not back.is_set():
            begun.put_nowait(None)
            assert await broken.ask(QUESTION, 200) == expected
            await asyncio.sleep(0.5)  # who starts needs the processor more

    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(ask_all_the_time())
            await begun.get()
        await broken.cluster.children.kill_one("coordinator")
        await broken.cluster.start_one("coordinator")
        while await online(broken) < 3:
            await asyncio.sleep(0.1)
        back.set()
    assert (await broken.status()).epoch == before.epoch
