"""A real node that is challenged while it serves: an honest one goes on, one whose model changes does not."""

import asyncio
import contextlib
import shutil
import sqlite3

from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, share_kernels

from sealring.cli.local.cluster import LocalCluster

pytestmark = CLUSTER


async def log_of(cluster, event: str) -> list[str]:
    text = await asyncio.to_thread(cluster.logs["coordinator"].read_text)
    return [line for line in text.splitlines() if f'"{event}"' in line]


def challenged_at(cluster) -> list[int]:
    """When each node answered a challenge well for the last time."""
    file = cluster.state_dir / "coordinator" / "coordinator.db"
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT challenged_at FROM members WHERE role = 'member'").fetchall()
    return [at for (at,) in rows]


async def test_a_serving_node_answers_and_a_changed_model_is_found(tmp_path):
    model = tmp_path / "models" / "demo"
    shutil.copytree(MODEL, model)
    settings = {"coordinator": {"challenge_interval": 1.0, "challenge_timeout": 30.0}}
    async with LocalCluster(tmp_path / "state", model, nodes=1, settings=settings) as cluster:
        share_kernels(cluster)
        await cluster.start()
        await cluster.deploy(stages=1)
        serving_since = max(challenged_at(cluster))
        async with asyncio.timeout(LIMIT_SECONDS):
            while min(challenged_at(cluster)) < serving_since + 2:
                await asyncio.sleep(0.2)
        assert not await log_of(cluster, "challenge_failed")
        assert not await log_of(cluster, "member_failed_challenge")
        answer = await cluster.admin.call("ListNodes")
        assert {(node.level, node.trust) for node in answer.nodes} == {("software", 10)}

        config = model / "config.json"
        config.write_text(config.read_text() + "\n")
        async with asyncio.timeout(LIMIT_SECONDS):
            while not await log_of(cluster, "member_changed"):
                await asyncio.sleep(0.2)
        (node,) = (await cluster.admin.call("ListNodes")).nodes
        assert (node.level, node.trust) == ("none", 0)
        assert "changed while it ran" in node.trouble
