"""Nodes with a sick part, as real processes: a folder that is closed, a dead address, a slow tool."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

from macs_tools import BOOT
from patience import until
from ringtest import CLUSTER, LIMIT_SECONDS

from sealring.cli.local.cluster import LocalCluster
from sealring.coordinator.store import StoredMember
from sealring.mesh.pki import Role

from .conftest import QUESTION, Sick

pytestmark = CLUSTER
SLOW = "/bin/sleep 6"
"""Longer than a tool had before a protection was unknown, and shorter than the time for a challenge."""


def challenged_at(cluster: LocalCluster) -> list[int]:
    """When each node proved itself last, by the coordinator's clock in whole seconds."""
    file = cluster.state_dir / "coordinator" / "coordinator.db"
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as store:
        found = store.execute("SELECT message FROM messages WHERE kind = 'member'").fetchall()
    members = [StoredMember.FromString(message) for (message,) in found]
    return [one.challenged_at for one in members if one.role == Role.MEMBER]


async def test_nodes_with_sick_parts_serve(sick: Sick) -> None:
    """system_profiler takes 6 s once; keys of links are renewed nevertheless."""
    ring, tools, cluster = sick.ring, sick.tools, sick.ring.cluster
    epoch = (await ring.serving()).epoch
    assert "Paris" in (await ring.ask(QUESTION, 20)).text

    def said(node: str, event: str) -> int:
        return cluster.logs[node].read_text(errors="replace").count(event)

    for node in cluster.node_names:
        async with asyncio.timeout(LIMIT_SECONDS):
            while said(node, "link_keys_renewed") <= 2:  # in a ring at rest keys wait for the next step
                assert "Paris" in (await ring.ask(QUESTION, 20)).text
                await asyncio.sleep(0.2)  # keys are renewed once a second
        assert said(node, "model_folder_unreadable") == 1
    assert (await ring.status()).epoch == epoch

    await until(lambda: tools.asked(BOOT) >= 2, pause=0.2)
    since = max(challenged_at(cluster))
    await until(lambda: min(challenged_at(cluster)) > since, pause=0.2)
    assert said("coordinator", "challenge_failed") == 0
    tools.once(BOOT, SLOW)
    asked = tools.asked(BOOT)
    await cluster.children.kill_one("node-0")
    await cluster.start_one("node-0")
    await until(lambda: tools.asked(BOOT) > asked, pause=0.2)
    since = max(challenged_at(cluster))
    await until(lambda: min(challenged_at(cluster)) > since + 1, pause=0.2)
    await ring.serving()
    assert "Paris" in (await ring.reply(QUESTION, 20)).text
    assert said("coordinator", "member_failed_challenge") == 0
