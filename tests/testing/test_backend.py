"""A scripted backend, seen through the edge's HTTP server."""

from __future__ import annotations

import asyncio

import pytest
from patience import until

from sealring.mesh.errors import InvalidInput, NotFound, Unavailable
from sealring.testing import ScriptedBackend
from sealring.v1 import inference_pb2 as inference

PROMPT = inference.Envelope(clear=inference.Prompt(text="x"))
REQUEST = inference.GenerateRequest(model="demo", request_id="one", envelope=PROMPT)


async def texts(
    backend: ScriptedBackend, into: list[str], request: inference.GenerateRequest = REQUEST
) -> None:
    async for event in backend.generate(request, key="me"):
        if event.WhichOneof("event") == "delta":
            into.append(event.delta.text)


async def test_it_takes_only_what_a_gateway_takes() -> None:
    backend = ScriptedBackend()
    with pytest.raises(NotFound) as missing:
        await texts(backend, [], inference.GenerateRequest(model="other", envelope=PROMPT))
    assert missing.value.reason == "MODEL_NOT_FOUND"
    with pytest.raises(InvalidInput):
        await texts(backend, [], inference.GenerateRequest(model="demo"))
    assert backend.requests == []


@pytest.mark.parametrize(("after", "told"), [(None, []), (0, []), (2, ["a", "b"])])
async def test_it_fails_where_it_is_told_to(after: int | None, told: list[str]) -> None:
    backend = ScriptedBackend(texts=["a", "b", "c"], error=Unavailable("down"), error_after=after)
    heard: list[str] = []
    with pytest.raises(Unavailable):
        await texts(backend, heard)
    assert (heard, backend.closed, backend.keys) == (told, ["one"], ["me"])


async def test_it_is_held_and_sees_clients_leave() -> None:
    backend = ScriptedBackend(held=asyncio.Event())
    asking = asyncio.create_task(texts(backend, heard := []))
    await until(lambda: backend.requests)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (heard, backend.closed) == ([], ["one"])
