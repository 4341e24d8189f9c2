"""`Idempotency-Key`: the same request again gets the same answer."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from usagekit import nothing_used

from sealring.edge.access.gate import Gate
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.edge.http.app import create_app
from sealring.edge.inference.service import InferenceService
from sealring.mesh.errors import FailedPrecondition, Unavailable
from sealring.v1 import inference_pb2 as inference

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def http(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as client:
        yield client


async def ask(http: httpx.AsyncClient, key: str, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=CHAT | fields, headers={"idempotency-key": key})


async def test_who_asks_again_is_told_the_same_answer_once_computed(
    http: httpx.AsyncClient, backend: Any
) -> None:
    first, again, other = await ask(http, "a"), await ask(http, "a"), await ask(http, "b")
    assert first.json()["id"] == again.json()["id"] != other.json()["id"]
    assert first.json()["choices"] == again.json()["choices"]
    assert len(backend.requests) == 2
    reused = await ask(http, "a", max_tokens=3)
    assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert (await ask(http, "x" * 255)).status_code == 200
    assert (await ask(http, "x" * 256)).status_code == 400


async def test_who_asks_again_over_grpc_is_told_the_same_answer(backend: Any) -> None:
    """The metadata of its call has the key."""
    service = InferenceService(backend, lambda: b"", nothing_used)
    prompt = inference.Envelope(clear=inference.Prompt(text="x"))
    request = inference.GenerateRequest(model="demo", envelope=prompt)

    async def call(key: str) -> list[inference.GenerateResponse]:
        context: Any = SimpleNamespace(
            invocation_metadata=lambda: (("idempotency-key", key),),
            peer=lambda: secrets.token_hex(2),
            set_trailing_metadata=lambda _: None,
        )
        return [event async for event in service.Generate(request, context)]

    assert await call("a") == await call("a")
    assert await call("b")
    assert len(backend.requests) == 2
    request.max_tokens = 3
    with pytest.raises(FailedPrecondition):
        await call("a")


async def test_an_answer_goes_on_for_a_client_that_comes_back(http: httpx.AsyncClient, backend: Any) -> None:
    backend.held = asyncio.Event()
    with pytest.raises(httpx.ReadTimeout):
        await http.post(
            "/v1/chat/completions",
            json=CHAT,
            headers={"idempotency-key": "a"},
            timeout=httpx.Timeout(200, read=0.2),
        )
    again = asyncio.create_task(ask(http, "a"))
    await asyncio.sleep(0.05)
    assert backend.closed == []
    backend.held.set()
    assert (await again).json()["choices"][0]["message"]["content"] == "Hello – ☃"
    assert len(backend.requests) == 1


async def test_what_failed_is_asked_anew(http: httpx.AsyncClient, backend: Any) -> None:
    backend.error = Unavailable("no ring", reason="RING_DOWN")
    assert (await ask(http, "a")).status_code == 503
    backend.error = None
    assert (await ask(http, "a")).status_code == 200


async def test_no_caller_is_told_what_another_one_asked(tmp_path: Path, backend: Any) -> None:
    """A key for repeating is known to whoever guesses it; what it stands for belongs to an API key."""
    keys = KeyFile(tmp_path)
    callers = [keys.create([Scope.INFERENCE])[0] for _ in range(2)]
    app = create_app(backend, exposition=lambda: b"", gate=Gate(keys))
    transport = httpx.ASGITransport(app)
    answers = []
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for caller in (*callers, *callers):
            headers = {"idempotency-key": "a", "authorization": f"Bearer {caller}"}
            asked = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            answers.append(asked.json()["id"])
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]
    assert len(backend.requests) == 2
