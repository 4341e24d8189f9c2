"""A cluster of the release before, state and processes, is updated one machine after the other."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import former
import hasty
import httpx
import pytest
import pytest_asyncio
from ringtest import CLUSTER, HASTY, LIMIT_SECONDS, MODEL, Ring, chat, started

from sealring.cli.local.cluster import LocalCluster

pytestmark = CLUSTER
QUESTION = chat("What is the capital of France?")
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(loop_scope="session")
async def older(tmp_path: Path) -> AsyncIterator[Ring]:
    """A ring of two, all of the release before."""
    command = former.unpack(tmp_path / "files")
    async with LocalCluster(tmp_path / "state", MODEL, nodes=2, name="demo", settings=HASTY) as cluster:
        cluster.children.command = command
        cluster.choose_ports()
        cluster.write_configs()
        made = await asyncio.create_subprocess_exec(
            *command, *cluster.config_of("coordinator"), "coordinator", "init", "--cluster", "demo"
        )
        assert await made.wait() == 0
        async with started(cluster, stages=2) as ring:
            yield ring


async def answers(ring: Ring) -> tuple[object, ...]:
    """To a question in clear and to a sealed one, and what is shown of the model."""
    await ring.serving()
    clear = await ring.reply(QUESTION, 20)
    async with ring.sealing() as client:
        sealed = await client.chat(CHAT, max_tokens=20, logprobs=1)
    async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=LIMIT_SECONDS) as http:
        (shown,) = (await http.get("/api/tags")).json()["models"]
    assert shown["details"]["quantization_level"]
    logged = [(one.token, round(one.logprob, 3)) for one in sealed.logprobs]
    signed = [(one.HasField("head"), one.HasField("tail")) for one in sealed.receipts]
    return clear, sealed.text, logged, signed, shown["size"], shown["details"]


def updated(ring: Ring) -> set[str]:
    """The nodes whose engines run with `--form`, as those of the release before do not."""
    engines = {node: ring.part(node, "engine.main").cmdline() for node in ring.cluster.node_names}
    return {node for node, command in engines.items() if "--form" in command}


@pytest.mark.parametrize(
    "order",
    [
        ("node-1", "coordinator", "node-0", "gateway"),
        pytest.param(("gateway", "coordinator", "node-0", "node-1"), marks=pytest.mark.sweep),
        pytest.param(("coordinator", "gateway", "node-1", "node-0"), marks=pytest.mark.sweep),
    ],
)
async def test_a_ring_answers_after_each_machine_that_is_updated(older: Ring, order: tuple[str, ...]) -> None:
    expected = await answers(older)
    done: set[str] = set()
    assert updated(older) == done
    nodes = (await older.cluster.admin.call("ListNodes")).nodes
    assert all(one.heartbeat.memory_usable for one in nodes), "by a coordinator of the release before"
    cluster = older.cluster
    cluster.children.command = (sys.executable, hasty.__file__)
    for machine in order:
        await cluster.children.stop_one(machine)
        await cluster.start_one(machine)
        await cluster.wait_for_coordinator()
        assert await answers(older) == expected, machine
        done |= {machine} & set(cluster.node_names)
        assert updated(older) == done
