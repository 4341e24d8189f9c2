"""What Ollama's own client makes of `/api`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from sealring.mesh.errors import EpochEnded

ollama = pytest.importorskip("ollama")

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
async def client(port: int) -> AsyncIterator[Any]:
    made = ollama.AsyncClient(host=f"http://127.0.0.1:{port}")
    yield made
    await made._client.aclose()


async def test_chats_and_prompts_whole_and_streamed(client: Any, backend: Any) -> None:
    options = {"num_predict": 7, "num_ctx": 4096, "temperature": 0.5, "stop": ["\n"]}
    whole = await client.chat(model="demo:latest", messages=MESSAGES, options=options)
    assert (whole.message.content, whole.done, whole.done_reason) == ("Hello – ☃", True, "stop")
    assert (whole.prompt_eval_count, whole.eval_count) == (5, 3)
    pieces = [piece async for piece in await client.chat(model="demo", messages=MESSAGES, stream=True)]
    assert "".join(piece.message.content or "" for piece in pieces) == "Hello – ☃"
    assert [piece.done for piece in pieces] == [False, False, False, True]
    for last in (whole, pieces[-1]):
        assert last.total_duration == last.prompt_eval_duration + last.eval_duration > 0
    made = await client.generate(model="demo", prompt="once", system="s", think=False)
    assert made.response == "Hello – ☃"
    first, _, third = (request.envelope.clear for request in backend.requests)
    assert (backend.requests[0].max_tokens, first.sampling.temperature, list(first.stop)) == (7, 0.5, ["\n"])
    assert [one.role for one in third.chat.messages] == ["system", "user"]
    assert third.chat.template_arguments == '{"enable_thinking": false}'


async def test_thinking_and_tools_go_there_and_back(client: Any, calling: Any) -> None:
    answer = await client.chat(model="demo", messages=MESSAGES, tools=TOOLS)
    assert (answer.message.thinking, answer.message.content) == ("hm", "Let me see.")
    called = [(call.function.name, dict(call.function.arguments)) for call in answer.message.tool_calls]
    assert called == [("look", {"at": 1}), ("look", {})]
    result = {"role": "tool", "tool_name": "look", "content": "ok"}
    await client.chat(model="demo", messages=[*MESSAGES, answer.message, result], tools=TOOLS)
    chat = calling.requests[-1].envelope.clear.chat
    assert [(one.role, one.reasoning, one.name) for one in chat.messages] == [
        ("user", "", ""),
        ("assistant", "hm", ""),
        ("tool", "", "look"),
    ]


async def test_what_is_served_is_told(client: Any, port: int) -> None:
    assert [model.model for model in (await client.list()).models] == ["demo"]
    assert [model.model for model in (await client.ps()).models] == ["demo"]
    shown = await client.show("demo")
    assert "tools" in (shown.capabilities or [])
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        assert "version" in (await http.get("/api/version")).json()
        assert (await http.head("/")).status_code == 200


async def test_errors_have_ollamas_form(client: Any, backend: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="not supported") as caught:
        await client.chat(model="demo", messages=MESSAGES, options={"mirostat": 1})
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="no model"):
        await client.show("other")
    backend.error, backend.error_after = EpochEnded("lost"), 1
    with pytest.raises(ollama.ResponseError, match="lost"):
        async for _ in await client.chat(model="demo", messages=MESSAGES, stream=True):
            pass
