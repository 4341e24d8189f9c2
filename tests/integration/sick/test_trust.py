"""A node whose model changes while it runs, which ends its ring."""

from __future__ import annotations

import asyncio

from ringtest import CLUSTER, LIMIT_SECONDS

from .conftest import Sick

pytestmark = CLUSTER


async def test_a_changed_model_costs_its_node_all_trust_until_it_is_started_again(sick: Sick) -> None:
    """Whichever machine is the coordinator. Until then nodes that are challenged keep theirs."""
    cluster = sick.ring.cluster
    answer = await cluster.admin.call("ListNodes")
    assert {(node.level, node.trust) for node in answer.nodes} == {("software", 10)}
    config = cluster.state_dir / "node-0" / "models" / "shared" / "config.json"
    genuine = config.read_text()
    config.write_text(genuine + "\n")
    async with asyncio.timeout(LIMIT_SECONDS):
        while all(node.trust for node in answer.nodes):
            await asyncio.sleep(0.2)
            answer = await cluster.admin.call("ListNodes")
    coordinators = [cluster.logs[name] for name in ("coordinator", "standby") if name in cluster.logs]
    assert any('"member_changed"' in log.read_text() for log in coordinators)
    changed = next(node for node in answer.nodes if not node.trust)
    assert changed.level == "none"
    assert "changed while it ran" in changed.trouble
    config.write_text(genuine)
    await cluster.children.kill_one("node-0")
    await cluster.start_one("node-0")
    async with asyncio.timeout(LIMIT_SECONDS):
        while not all(node.trust for node in answer.nodes):
            await asyncio.sleep(0.2)
            answer = await cluster.admin.call("ListNodes")
    await sick.ring.serving()
