"""A ring that is planned anew goes on from what its members had computed before, wherever the layers are now.

The tests share a cluster of three nodes; each has a deployment of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import patient
import pytest
import pytest_asyncio
import sharing
from capture import paths_in
from kernels import share_kernels
from patience import until
from ringtest import CLUSTER, HASTY, LIMIT_SECONDS, MODEL, Ring
from sharing import Answered, ask

from bench.models import Shape, random_model
from sealring.cli.calls.waiting import wait_until_serving
from sealring.cli.local.cluster import LocalCluster
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.mesh.errors import FailedPrecondition
from sealring.mesh.ring import OPENING, STORED_BLOCK
from sealring.v1 import inference_pb2_grpc

pytestmark = CLUSTER

WORDS = ("river", "stone", "garden", "winter", "market", "silver", "window", "bridge", "letter", "candle")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    state = tmp_path_factory.mktemp("moved") / "state"
    async with LocalCluster(state, MODEL, nodes=3, settings=HASTY) as made:
        made.children.command = (sys.executable, patient.__file__)
        share_kernels(made.state_dir)
        await made.start()
        yield made


@dataclasses.dataclass
class Moving:
    """A deployment that is planned anew, over named nodes with a number of layers each."""

    cluster: LocalCluster
    name: str
    ring: Ring
    ids: list[str]
    spec: dict[str, Any]

    async def over(self, *layers: int) -> None:
        """Has each node hold its number of layers, in order; nodes with none are in no ring."""
        if self.ring.deployment is not None:
            await self.cluster.admin.call("DeleteDeployment", name=self.name)
        members = [member for member, count in zip(self.ids, layers, strict=True) if count]
        split = [count for count in layers if count]
        spec = self.spec | {"name": self.name, "members": members, "split": split}
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:  # a node that was started again may still be offline
                with suppress(FailedPrecondition):
                    await self.cluster.admin.call("CreateDeployment", spec=spec, seconds=LIMIT_SECONDS)
                    break
                await asyncio.sleep(0.2)
        self.ring.deployment = await wait_until_serving(self.cluster.admin, self.name, seconds=LIMIT_SECONDS)
        await self.ring.serving()

    def blocks(self, node: str) -> int:
        return sum(path.suffix == ".block" for path in paths_in(self.cluster.state_dir / node / "prefixes"))

    async def stored(self, messages: list[dict[str, Any]], nodes: list[str]) -> Answered:
        """Asks, and waits until these nodes have a block more for each 256 new tokens."""
        before = {node: self.blocks(node) for node in nodes}
        answer = await ask(self.ring, messages)
        more = answer.prompt_tokens // 256 - answer.cached // 256
        await until(lambda: all(self.blocks(node) >= had + more for node, had in before.items()), pause=0.1)
        return answer

    async def anew(self, messages: list[dict[str, Any]]) -> str:
        """The answer to a client of which nothing is kept."""
        key, _ = KeyFile(self.cluster.state_dir / "gateway").create([Scope.INFERENCE])
        answer = await ask(self.ring, messages, key=key)
        assert not answer.cached
        return answer.text


@asynccontextmanager
async def moving(cluster: LocalCluster, name: str, *layers: int, **spec: Any) -> AsyncIterator[Moving]:
    key, _ = KeyFile(cluster.state_dir / "gateway").create([Scope.INFERENCE, Scope.READ])
    nodes = {each.name: each.id for each in (await cluster.admin.call("ListNodes")).nodes}
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        ring = Ring(cluster, None, inference_pb2_grpc.InferenceStub(channel), key)
        ids = [nodes[one] for one in cluster.node_names]
        made = Moving(cluster, name, ring, ids, {"model": str(MODEL)} | spec)
        await made.over(*layers)
        yield made
        await cluster.admin.call("DeleteDeployment", name=name)


def conversation(turns: int, words: int = 130) -> list[dict[str, Any]]:
    """Messages of a number of turns, the first of which are those of fewer turns."""
    chosen, messages = random.Random(words), list[dict[str, Any]]()
    for turn in range(turns):
        text = " ".join(chosen.choice(WORDS) for _ in range(words))
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": f"Turn {turn}."}]
    return [*messages, {"role": "user", "content": "Go on."}]


async def test_a_ring_of_two_becomes_one_of_three_and_goes_back(cluster: LocalCluster) -> None:
    one, two, three = cluster.node_names
    async with moving(cluster, "grows", 5, 4, 0) as ring:
        first = await ring.stored(conversation(4), [one, two])
        assert (first.cached, first.prompt_tokens > 1000) == (0, True), first
        await ring.over(3, 3, 3)
        grown = await ring.stored(conversation(5), [one, two, three])
        assert grown.prompt_tokens - grown.cached < 600, "what the turns have in common is not computed again"
        assert grown.text == await ring.anew(conversation(5))
        await ring.over(4, 5, 0)
        back = await ring.stored(conversation(6), [one, two])
        assert back.prompt_tokens - back.cached < 600
        assert back.text == await ring.anew(conversation(6))


async def test_another_head_goes_on_by_the_names_of_the_head_before(cluster: LocalCluster) -> None:
    one, two, three = cluster.node_names
    async with moving(cluster, "heads", 5, 4, 0) as ring:
        first = await ring.stored(conversation(4), [one, two])
        await ring.over(0, 3, 6)
        moved = await ring.stored(conversation(5), [two, three])
        assert moved.prompt_tokens - moved.cached < 600, "what the turns have in common is not computed again"
        assert moved.cached > first.prompt_tokens - 256 - 50
        assert moved.text == await ring.anew(conversation(5))
        await cluster.children.kill_one("coordinator")
        await cluster.start_one("coordinator")
        await cluster.wait_for_coordinator()
        await ring.over(4, 5, 0)
        back = await ring.stored(conversation(6), [one, two])
        assert back.prompt_tokens - back.cached < 600
        assert back.text == await ring.anew(conversation(6))


@pytest.mark.sweep
@pytest.mark.timeout(3600)
async def test_of_30000_tokens_those_behind_the_last_block_are_computed_again(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forth and back, also with another head."""
    monkeypatch.setattr(sharing, "LIMIT_SECONDS", 3000.0)
    shape = Shape(layers=4, hidden=32, intermediate=64, heads=1, kv_heads=1, context=65_536)
    spec = {"model": str(random_model(shape)), "context": 40_960, "max_rows": 2, "prefill_chunk": 512}
    one, two, _ = cluster.node_names
    async with moving(cluster, "long", 3, 1, 0, **spec) as ring:
        first = await ring.stored(conversation(2, words=5900), [one, two])
        assert first.prompt_tokens > 29_000
        for layers in (2, 1, 1), (2, 2, 0), (2, 1, 1), (0, 1, 3), (3, 1, 0):
            await ring.over(*layers)
            again = await ask(ring.ring, conversation(2, words=5900))
            assert again.prompt_tokens - again.cached < STORED_BLOCK + OPENING
            assert again.text == first.text


async def test_who_had_the_layers_may_be_gone_or_have_lost_them(cluster: LocalCluster) -> None:
    one, two, three = cluster.node_names
    async with moving(cluster, "gone", 5, 4, 0) as ring:
        first = await ring.stored(conversation(3), [one, two])
        for path in paths_in(cluster.state_dir / two / "prefixes"):
            if path.suffix == ".block" and path.stat().st_size > 1 << 16:
                path.write_bytes(path.read_bytes()[:-1] + b"?")
        await ring.over(5, 0, 4)
        damaged = await ask(ring.ring, conversation(3))
        assert (damaged.cached, damaged.text) == (0, first.text)
        await until(lambda: ring.blocks(three), pause=0.1)
        await ring.over(4, 0, 5)
        await cluster.children.kill_one(two)
        try:
            again = await ask(ring.ring, conversation(3))
            assert (again.cached >= 256, again.text) == (True, first.text), "whom it came from is not asked"
        finally:
            await cluster.start_one(two)


async def test_the_giver_is_killed_and_the_prompt_is_computed(cluster: LocalCluster) -> None:
    one, two, _ = cluster.node_names
    async with moving(cluster, "killed", 5, 4, 0) as ring:
        first = await ring.stored(conversation(3), [one, two])
        await ring.over(5, 0, 4)
        await cluster.children.kill_one(two)
        try:
            answer = await ask(ring.ring, conversation(3))
            assert (answer.cached, answer.text) == (0, first.text)
        finally:
            await cluster.start_one(two)
