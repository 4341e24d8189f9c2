"""The openai package's own classes over prompts that are sealed in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from sealring.mesh.errors import InvalidInput, SealringError
from sealring.mesh.system.paths import state_root_of
from sealring.openai import AsyncOpenAI, OpenAI
from sealring.testing import ScriptedGateway
from sealring.testing.gateway import PIECES
from sealring.v1 import inference_pb2 as inference

MARK = "lambent ocelot"
ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": MARK}]}


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Environment variables that would lead prompts elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-else")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-of-somebody-else")


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[AsyncOpenAI]:
    async with made(gateway) as client:
        yield client


def made(gateway: ScriptedGateway, **options: Any) -> AsyncOpenAI:
    given = {"root_sha256": gateway.cluster.pin, "max_retries": 0, **options}
    return AsyncOpenAI(gateway=gateway.address, **given)


async def test_answers_are_sealed_whole_and_streamed(
    gateway: ScriptedGateway, client: AsyncOpenAI, tmp_path: Path
) -> None:
    whole = await client.chat.completions.create(**ASK)
    assert whole.choices[0].message.content == "".join(PIECES)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 7
    stream = await client.with_options(timeout=100).chat.completions.create(**ASK, stream=True)
    pieces = [piece.choices[0].delta.content or "" async for piece in stream]
    assert [piece for piece in pieces if piece] == list(PIECES)
    response = await client.responses.create(model="demo", input=MARK)
    assert response.output_text == "".join(PIECES)
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert len(gateway.requests) == 3
    for request in gateway.requests:
        sent = request.SerializeToString()
        assert MARK.encode() not in sent
        assert b"somebody-else" not in sent
        opened = gateway.open(request)[0]
        assert (opened.prompt.chat.messages[0].content, opened.choices) == (MARK, 1)
    assert len(list(state_root_of(tmp_path).glob("client/*.roster"))) == 1


async def test_an_answer_that_ends_well_leaves_no_fault_behind(client: AsyncOpenAI) -> None:
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    stream = await client.chat.completions.create(**ASK, stream=True)
    assert [piece async for piece in stream]
    await client.models.retrieve("demo")
    await asyncio.sleep(0)
    assert faults == []


async def test_the_same_for_who_waits(gateway: ScriptedGateway) -> None:
    def work() -> tuple[str | None, list[str | None]]:
        with OpenAI(gateway=gateway.address, root_sha256=gateway.cluster.pin) as client:
            whole = client.chat.completions.create(**ASK).choices[0].message.content
            stream = client.copy(max_retries=1).chat.completions.create(**ASK, stream=True)
            with client.chat.completions.create(**ASK, stream=True) as left:
                next(iter(left))
            return whole, [piece.choices[0].delta.content for piece in stream]

    whole, pieces = await asyncio.to_thread(work)
    assert whole == "".join(piece or "" for piece in pieces) == "".join(PIECES)


async def test_what_is_not_believed_gets_nothing(gateway: ScriptedGateway) -> None:
    async with made(gateway, root_sha256="ab" * 32) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**ASK)
    assert str(caught.value.code).startswith("root_")
    async with made(gateway, min_trust=30) as client:
        with pytest.raises(openai.UnprocessableEntityError, match="trust"):
            await client.chat.completions.create(**ASK)
    assert gateway.requests == []


async def test_a_forged_answer_is_an_error(gateway: ScriptedGateway, client: AsyncOpenAI) -> None:
    async def script(gateway: ScriptedGateway, request: Any) -> AsyncIterator[inference.GenerateResponse]:
        yield gateway.reply(request)[0]
        yield inference.GenerateResponse(delta=inference.Delta(text="forged", tokens=1))

    gateway.script = script
    with pytest.raises(openai.APIError) as caught:
        await client.chat.completions.create(**ASK)
    assert caught.value.code == "plaintext_reply"


async def test_time_that_was_given_ends_the_request(gateway: ScriptedGateway, client: AsyncOpenAI) -> None:
    """Also once the answer has begun, for which a slow machine needs more time."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def script(gateway: ScriptedGateway, request: Any) -> AsyncIterator[inference.GenerateResponse]:
        begun.set()
        try:
            yield gateway.reply(request)[0]
            await asyncio.Event().wait()
        finally:
            ended.set()

    gateway.script = script
    seconds = 0.5
    while not begun.is_set():
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**ASK, timeout=seconds)
        seconds *= 2
    async with asyncio.timeout(100):
        await ended.wait()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "gateway"),
        ({"gateway": "127.0.0.1:1"}, "root_sha256"),
        ({"gateway": "127.0.0.1:1", "root_sha256": "short"}, "root_sha256"),
        ({"base_url": "https://example.com"}, "base_url"),
        ({"http_client": httpx2.Client()}, "http_client"),
        ({"websocket_base_url": "ws://example.com"}, "websocket_base_url"),
        ({"gateway": "127.0.0.1:1", "root_sha256": "ab" * 32, "min_trust": 99}, "min_trust"),
    ],
)
def test_what_is_refused_is_named(options: dict[str, Any], param: str) -> None:
    for kind in (OpenAI, AsyncOpenAI):
        with pytest.raises(SealringError) as caught:
            kind(**options)
        assert caught.value.metadata["param"] == param


def copies(client: Any) -> Iterator[Any]:
    for change in (
        {"base_url": "https://example.com/v1"},
        {"http_client": httpx2.AsyncClient()},
        {"websocket_base_url": "ws://example.com"},
        {"data_residency": "eu"},
    ):
        yield lambda change=change: client.copy(**change)
    yield lambda: client.realtime
    yield lambda: client.live


async def test_copies_lead_nowhere_else(gateway: ScriptedGateway, client: AsyncOpenAI) -> None:
    for attempt in copies(client):
        with pytest.raises(InvalidInput, match="not supported"):
            attempt()
    with pytest.raises(openai.NotFoundError, match="/v1/moderations"):
        await client.moderations.create(model="demo", input=MARK)
    assert gateway.requests == []
