"""Real nodes that are challenged while they serve: honest ones go on, one whose model changes is out."""

import asyncio
import shutil

import pytest
from ringtest import MODEL

from cli.cluster import LocalCluster
from sealring.v1 import admin_pb2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.xdist_group("integration")]


async def log_of(cluster, event: str) -> list[str]:
    text = await asyncio.to_thread(cluster.logs["coordinator"].read_text)
    return [line for line in text.splitlines() if f'"{event}"' in line]


async def test_serving_nodes_answer_and_a_changed_model_is_found(tmp_path):
    model = tmp_path / "models" / "demo"
    shutil.copytree(MODEL, model)
    settings = {"coordinator": {"challenge_interval": 1.0, "challenge_timeout": 10.0}}
    async with LocalCluster(tmp_path / "state", model, nodes=2, settings=settings) as cluster:
        await cluster.start()
        await cluster.deploy(stages=2)
        await asyncio.sleep(4)
        assert not await log_of(cluster, "challenge_failed")
        assert not await log_of(cluster, "member_failed_challenge")
        answer = await cluster.admin.call("ListNodes", admin_pb2.ListNodesRequest())
        assert {(node.level, node.trust) for node in answer.nodes} == {("software", 10)}

        config = model / "config.json"
        config.write_text(config.read_text() + "\n")
        async with asyncio.timeout(30):
            while not await log_of(cluster, "member_failed_challenge"):
                await asyncio.sleep(0.2)
        (first, *_) = await log_of(cluster, "member_failed_challenge")
        assert "MANIFEST_CHANGED" in first
