"""The proxy over a scripted gateway: OpenAI's forms in front, sealed envelopes behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from sealring.cli import proxy
from sealring.cli.main import app
from sealring.client.sealing import SealingBackend
from sealring.edge.http.app import create_app
from sealring.edge.metrics import Metrics
from sealring.mesh.errors import ConfigError, SealringError
from sealring.mesh.rpc import Buckets
from sealring.testing import ScriptedGateway
from sealring.v1 import inference_pb2 as inference

BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "what is the capital?"}],
    "max_tokens": 50,
}


@asynccontextmanager
async def proxied(
    gate: proxy.OwnGate | None = None, **settings: Any
) -> AsyncIterator[tuple[ScriptedGateway, httpx.AsyncClient]]:
    metrics = Metrics()
    async with ScriptedGateway() as gateway, gateway.client(**settings) as client:
        edge = create_app(SealingBackend(client, metrics), exposition=metrics.exposition, gate=gate)
        transport = httpx.ASGITransport(app=edge)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=200) as http:
            yield gateway, http


async def test_a_message_begins_with_the_prompts_length_by_the_word_of_the_head() -> None:
    """The gateway's own count is not believed."""
    async with proxied() as (_, http):
        answer = await http.post("/v1/messages", json={**BODY, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    (began,) = (event for event in events if event["type"] == "message_start")
    assert began["message"]["usage"]["input_tokens"] == 7


async def test_the_floor_of_the_proxy_and_of_the_request() -> None:
    async with proxied(min_trust=20) as (gateway, http):
        assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 422
        assert gateway.requests == []
    async with proxied() as (gateway, http):
        refused = await http.post("/v1/chat/completions", json={**BODY, "min_trust": 20})
        assert refused.json()["error"]["code"] == "trust_below_floor"
        assert gateway.requests == []


async def test_a_plaintext_reply_is_an_error_and_not_an_answer() -> None:
    async def script(gateway: ScriptedGateway, request: Any) -> AsyncIterator[inference.GenerateResponse]:
        yield gateway.reply(request)[0]
        yield inference.GenerateResponse(delta=inference.Delta(text="forged", tokens=1))

    async with proxied() as (gateway, http):
        gateway.script = script
        for stream in (False, True):
            answer = await http.post("/v1/chat/completions", json={**BODY, "stream": stream})
            assert "forged" not in answer.text
            assert answer.json()["error"]["code"] == "plaintext_reply"


async def test_an_answer_without_text() -> None:
    async def script(gateway: ScriptedGateway, request: Any) -> AsyncIterator[inference.GenerateResponse]:
        _, sealer = gateway.open(request)
        delta = inference.SealedDelta(tokens=1, finish=inference.FINISH_REASON_STOP, prompt_tokens=7)
        sealed = sealer.seal(delta.SerializeToString(), last=True)
        yield inference.GenerateResponse(started=inference.Started(ring="demo-0"))
        yield inference.GenerateResponse(delta=inference.Delta(sealed=sealed, tokens=1))
        yield inference.GenerateResponse(finished=inference.Finished(reason=inference.FINISH_REASON_STOP))

    async with proxied() as (gateway, http):
        gateway.script = script
        body = (await http.post("/v1/chat/completions", json=BODY)).json()
    assert (body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"]) == ("", 1)


async def test_a_cache_key_stays_on_this_machine() -> None:
    async with proxied() as (gateway, http):
        body = {**BODY, "prompt_cache_key": "conversation 41"}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        (request,) = gateway.requests
        inside, _ = gateway.open(request)
        refused = await http.post("/v1/chat/completions", json={**BODY, "prompt_cache_key": "x" * 10_240})
    assert not request.HasField("prompt_cache_key")
    for told in (request, inside):
        assert b"conversation 41" not in told.SerializeToString()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_cache_key")
    assert "x" * 100 not in refused.text


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/models", "/metrics", "/api/tags", "/v1/messages"]
)
async def test_other_users_of_the_machine_neither_ask_nor_learn_anything(tmp_path: Path, path: str) -> None:
    """They reach its port, could ask with its owner's key, and learn from cached tokens what was asked."""
    file = tmp_path / "state" / "proxy.key"
    key = proxy.own_key(file)
    assert file.stat().st_mode & 0o077 == 0
    body = {**BODY, "messages": BODY["messages"]}
    how: dict[str, Any] = (
        {"method": "POST", "json": body}
        if path in ("/v1/chat/completions", "/v1/messages")
        else {"method": "GET"}
    )
    gate = proxy.OwnGate(proxy.digest_of(key.text))
    gate.strangers = Buckets(1.0, 2, clock=lambda: 0.0)
    async with proxied(gate) as (gateway, http):
        for authorization in (
            {},
            {"authorization": "Bearer none"},
            {"x-api-key": key.text[:-1]},
            {"x-api-key": b"\xe9"},
        ):
            refused = await http.request(url=path, headers=authorization, **how)
            assert (refused.status_code, gateway.requests) == (401, [])
            assert "cached" not in refused.text
        assert "rings" not in (await http.get("/health")).json()
        statuses = [(await http.get("/health")).status_code for _ in range(2)]
        assert statuses[-1] == 429, "each would ask the gateway, with the owner's API key"
        assert (await http.get("/health/live")).status_code == 200
        right = f"Bearer {key.text}"
        for several in (
            [("authorization", right)],
            [("x-api-key", key.text), ("authorization", "Bearer sk-ant")],
        ):
            assert (await http.request(url=path, headers=several, **how)).status_code == 200


def test_the_key_stays_and_is_not_taken_from_a_file_that_others_may_read(tmp_path: Path) -> None:
    file = tmp_path / "proxy.key"
    key = proxy.own_key(file)
    assert proxy.own_key(file) == key
    file.chmod(0o644)
    with pytest.raises(ConfigError) as caught:
        proxy.own_key(file)
    assert caught.value.reason == "SECRET_FILE_UNSAFE"
    file.chmod(0o600)
    file.write_text("none")
    with pytest.raises(ConfigError) as caught:
        proxy.own_key(file)
    assert caught.value.reason == "BAD_API_KEY_FILE"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--root-sha256", "ab" * 32, "--listen", "0.0.0.0:8081"], "LOOPBACK_ONLY"),
        (["--root-sha256", "short"], "BAD_ROOT_HASH"),
        (["--operator", "/nowhere"], "NO_OPERATOR_BUNDLE"),
    ],
)
def test_what_does_not_start(arguments: list[str], reason: str, tmp_path: Any) -> None:
    result = CliRunner().invoke(app, ["proxy", "--state-file", str(tmp_path / "state"), *arguments])
    assert isinstance(result.exception, SealringError)
    assert result.exception.reason == reason


async def test_it_says_where_it_serves_and_who_will_see_prompts() -> None:
    said: list[str] = []
    async with ScriptedGateway() as gateway:
        serving = proxy.serve(gateway.client(), "127.0.0.1:0", "ab" * 32, say=said.append)
        task = asyncio.create_task(serving)
        while not (said and said[-1].startswith("demo is answered by ring demo-0, trust ")):
            await asyncio.sleep(0.01)
            assert not task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await task
    assert said[0].endswith(f"/v1; {gateway.address} gets sealed prompts")
    assert said[1] == "programs need its key: sealring connect NAME --write"
