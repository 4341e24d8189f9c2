"""What one client's prompts and schemas cost: an error for itself, and nothing that others notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
from attackertest import nodes
from ringtest import CLUSTER, LIMIT_SECONDS, Ring, chat

from sealring.mesh.errors import InvalidInput
from sealring.mesh.rpc import from_rpc_error
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


class Engines:
    """The engines of a ring, and by how much any of them has grown at most whenever that was looked at."""

    def __init__(self, engines: list[psutil.Process]) -> None:
        self._before = {engine: engine.memory_info().rss for engine in engines}
        self.grown = 0

    @classmethod
    async def of(cls, ring: Ring) -> Engines:
        serving = [name for name, node in (await nodes(ring)).items() if node.rings]
        return cls([ring.part(name, "engine.main") for name in serving])

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While their memory is looked at."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            for engine, before in self._before.items():
                with contextlib.suppress(psutil.NoSuchProcess):  # which `run` tells
                    self.grown = max(self.grown, engine.memory_info().rss - before)
            await asyncio.sleep(0.02)

    def run(self) -> bool:
        return all(engine.is_running() for engine in self._before)


SEALED = ["many multiples", "a long text"]
"""Once they are opened, the head treats all alike."""


@pytest.mark.parametrize(
    ("name", "sealed"),
    [*((name, False) for name in (*SCHEMAS, *PROMPTS)), *((name, True) for name in SEALED)],
)
async def test_what_costs_too_much_is_refused_and_others_are_answered(
    victim: Ring, name: str, sealed: bool
) -> None:
    """Two at a time for as long as somebody else asks: each of them gets an error that says why.

    The others get what they always get, and head and tail are the same processes, of the same size.
    """
    await victim.serving()
    expected = await victim.ask(chat(QUESTION), TOKENS)
    epoch, engines = (await victim.status()).epoch, await Engines.of(victim)
    prompt, reason = attack(name)
    answered, reasons = asyncio.Event(), list[str]()

    async def hostile(client: Any) -> None:
        while not answered.is_set() or not reasons:
            await asyncio.sleep(0.01)  # a sealing client refuses at once what is too long for a prompt
            with pytest.raises((InvalidInput, grpc.aio.AioRpcError)) as caught:
                await (client.ask(prompt, max_tokens=4) if sealed else victim.ask(prompt, 4))
            error = caught.value
            reasons.append((from_rpc_error(error) if isinstance(error, grpc.RpcError) else error).reason)

    async with (
        victim.sealing() as client,
        asyncio.timeout(LIMIT_SECONDS),
        engines.watched(),
        asyncio.TaskGroup() as group,
    ):
        for _ in range(2):
            group.create_task(hostile(client))
        for _ in range(3):
            assert await victim.ask(chat(QUESTION), TOKENS) == expected
        answered.set()
    assert set(reasons) == {reason}
    assert engines.run()
    assert engines.grown < MEMORY_BYTES
    assert (await victim.status()).epoch == epoch


async def test_schemas_that_are_almost_too_costly_end_nothing(victim: Ring) -> None:
    """Each is new, and compiled at head and tail beside the answers of others."""
    await victim.serving()
    expected = await victim.ask(chat(QUESTION), TOKENS)
    epoch, engines = (await victim.status()).epoch, await Engines.of(victim)

    async def costly(number: int) -> None:
        names = [f"{number} {n}" for n in range(400)]
        prompt = chat(QUESTION)
        properties = {name: {"type": "string"} for name in names}
        prompt.schema = json.dumps({"type": "object", "properties": properties, "required": names})
        assert (await victim.ask(prompt, 4)).completion_tokens == 4

    async with asyncio.timeout(LIMIT_SECONDS), engines.watched():
        others = (victim.ask(chat(QUESTION), TOKENS) for _ in range(5))
        answers = await asyncio.gather(*others, *(costly(number) for number in range(10)))
    assert answers[:5] == [expected] * 5
    assert engines.run()
    assert engines.grown < MEMORY_BYTES
    assert (await victim.status()).epoch == epoch
