"""Nodes and coordinator are updated one after the other, while requests are answered."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import updated
from ringtest import CLUSTER, LIMIT_SECONDS, Reply, Ring, chat

from sealring.v1 import admin_pb2

pytestmark = CLUSTER
QUESTION = chat("What is the capital of France?")


async def node_called(ring: Ring, name: str) -> Any:
    answer = await ring.cluster.admin.call("ListNodes", wait_for_ready=True)
    return next(one for one in answer.nodes if one.name == name)


async def update_coordinator(ring: Ring) -> None:
    await ring.cluster.children.stop_one("coordinator")
    await ring.cluster.start_one("coordinator")


async def update_node(ring: Ring, name: str, *, meanwhile: Any = None) -> None:
    """As docs/operators.md says: drain, stop, start, undo."""
    admin, node = ring.cluster.admin, await node_called(ring, name)
    await admin.call("DrainNode", id=node.id)
    if meanwhile is not None:
        await meanwhile
    while (await node_called(ring, name)).rings:
        await asyncio.sleep(0.1)
    await ring.cluster.children.stop_one(name)
    await ring.cluster.start_one(name)
    while (await node_called(ring, name)).manifest != updated.MANIFEST.hex():
        await asyncio.sleep(0.1)
    await admin.call("DrainNode", id=node.id, undo=True)


async def test_everything_is_updated_and_no_request_fails(broken: Ring) -> None:
    """The coordinator in the middle of a node's drain."""
    await broken.serving()
    expected = await broken.ask(QUESTION, 200)
    done, replied = asyncio.Event(), asyncio.Event()
    replies: list[Reply] = []

    async def ask_all_the_time() -> None:
        while not done.is_set():
            replies.append(await broken.ask(QUESTION, 200))
            replied.set()
            await asyncio.sleep(1)  # what is updated needs the processor more

    async def one_more() -> None:
        """Returns once a request was answered from now on."""
        replied.clear()
        await replied.wait()

    genuine = broken.cluster.children.command
    broken.cluster.children.command = (sys.executable, updated.__file__)
    try:
        async with asyncio.timeout(3 * LIMIT_SECONDS), asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(ask_all_the_time())
            await update_node(broken, "node-0")
            await one_more()
            await update_node(broken, "node-1", meanwhile=update_coordinator(broken))
            await one_more()
            await update_node(broken, "node-2")
            await one_more()
            done.set()
        assert all(reply == expected for reply in replies)
        answer = await broken.cluster.admin.call("ListNodes")
        assert {(one.state, one.level, one.trust, one.trouble) for one in answer.nodes} == {
            (admin_pb2.NODE_STATE_ONLINE, "software", 10, "")
        }
        assert not answer.revoked
        audit = await broken.cluster.admin.call("ListAuditLog", newest=True)
        assert [one.action for one in audit.entries].count("reattest_node") == 3
    finally:
        broken.cluster.children.command = genuine
