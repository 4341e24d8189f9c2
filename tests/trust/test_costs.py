"""What one client's prompts and schemas cost: an error for itself, and nothing that others notice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from ringtest import CLUSTER, LIMIT_SECONDS, Ring, chat, serving

from sealring.mesh.errors import InvalidInput
from sealring.mesh.rpc.status import from_rpc_error
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER

MEMORY_BYTES = 256 << 20
"""By which head and tail may grow, whatever is asked."""

QUESTION, TOKENS = "What is the capital of France?", 8


def members(count: int, inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": inner(n) for n in range(count)}}


SCHEMAS = {
    "one large multiple": ({"type": "integer", "multipleOf": 100_000_007}, "SCHEMA_TOO_COSTLY"),
    "many multiples": (members(128, lambda n: {"type": "integer", "multipleOf": 9973 - n}), "BAD_GRAMMAR"),
    "many members": (members(4900, lambda n: {}), "SCHEMA_TOO_COSTLY"),
}
PROMPTS = {
    "a long text": (inference.Prompt(text="7" * 4_100_000), "CONTEXT_TOO_LONG"),
    "a long chat": (chat("<7" * 2_000_000), "CONTEXT_TOO_LONG"),
}


def attack(name: str) -> tuple[inference.Prompt, str]:
    if name in PROMPTS:
        return PROMPTS[name]
    schema, reason = SCHEMAS[name]
    prompt = chat(QUESTION)
    prompt.schema = json.dumps(schema)
    return prompt, reason


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ring]:
    """A head and a tail."""
    async with serving(tmp_path_factory.mktemp("costs") / "state", 2) as ring:
        await ring.serving()
        yield ring


class Engines:
    """Head's and tail's, and by how much they have grown at most whenever that was looked at."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._before = {engine: engine.memory_info().rss for engine in self._now()}
        self.grown = 0

    def _now(self) -> list[psutil.Process]:
        return [self._ring.part(name, "engine.main") for name in self._ring.cluster.node_names]

    async def watch(self) -> None:
        while True:
            for engine, before in self._before.items():
                self.grown = max(self.grown, engine.memory_info().rss - before)
            await asyncio.sleep(0.02)

    def same(self) -> bool:
        return set(self._now()) == set(self._before)


@pytest.mark.parametrize("sealed", [False, True], ids=["clear", "sealed"])
@pytest.mark.parametrize("name", [*SCHEMAS, *PROMPTS])
async def test_what_costs_too_much_is_refused_and_others_are_answered(
    pair: Ring, name: str, sealed: bool
) -> None:
    """Three at a time for as long as somebody else asks: each of them gets an error that says why.

    The others get what they always get, and head and tail are the same processes, of the same size.
    """
    expected = await pair.ask(chat(QUESTION), TOKENS)
    epoch, engines = (await pair.status()).epoch, Engines(pair)
    prompt, reason = attack(name)
    answered, reasons = asyncio.Event(), list[str]()

    async def hostile(client: Any) -> None:
        while not answered.is_set() or not reasons:
            await asyncio.sleep(0.01)  # a sealing client refuses at once what is too long for a prompt
            with pytest.raises((InvalidInput, grpc.aio.AioRpcError)) as caught:
                await (client.ask(prompt, max_tokens=4) if sealed else pair.ask(prompt, 4))
            error = caught.value
            reasons.append((from_rpc_error(error) if isinstance(error, grpc.RpcError) else error).reason)

    async with pair.sealing() as client, asyncio.timeout(LIMIT_SECONDS):
        attacks = [asyncio.create_task(hostile(client)) for _ in range(3)]
        watching = asyncio.create_task(engines.watch())
        for _ in range(5):
            assert await pair.ask(chat(QUESTION), TOKENS) == expected
        answered.set()
        await asyncio.gather(*attacks)
        watching.cancel()
    assert set(reasons) == {reason}
    assert engines.same()
    assert engines.grown < MEMORY_BYTES
    assert (await pair.status()).epoch == epoch


async def test_schemas_that_are_almost_too_costly_end_nothing(pair: Ring) -> None:
    """Each is new, and compiled at head and tail beside the answers of others."""
    expected = await pair.ask(chat(QUESTION), TOKENS)
    epoch, engines = (await pair.status()).epoch, Engines(pair)

    async def costly(number: int) -> None:
        names = [f"{number} {n}" for n in range(400)]
        prompt = chat(QUESTION)
        properties = {name: {"type": "string"} for name in names}
        prompt.schema = json.dumps({"type": "object", "properties": properties, "required": names})
        assert (await pair.ask(prompt, 4)).completion_tokens == 4

    async with asyncio.timeout(LIMIT_SECONDS):
        others = (pair.ask(chat(QUESTION), TOKENS) for _ in range(5))
        watching = asyncio.create_task(engines.watch())
        answers = await asyncio.gather(*others, *(costly(number) for number in range(10)))
        watching.cancel()
    assert answers[:5] == [expected] * 5
    assert engines.same()
    assert engines.grown < MEMORY_BYTES
    assert (await pair.status()).epoch == epoch
