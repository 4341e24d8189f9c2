"""What Anthropic's own client makes of `/v1/messages`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from sealring.mesh.errors import EpochEnded, Unauthenticated, Unavailable
from sealring.v1 import inference_pb2 as inference

ASK: dict[str, Any] = {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object"}}


@pytest.fixture
def anthropic() -> Any:
    """Imported late: it takes a second, and all workers collect this file."""
    return pytest.importorskip("anthropic")


@pytest.fixture
async def client(port: int, anthropic: Any) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(
        api_key="none", base_url=f"http://127.0.0.1:{port}", max_retries=0
    ) as made:
        yield made


async def test_a_message_whole_and_streamed(client: Any, backend: Any) -> None:
    backend.reason = inference.FINISH_REASON_LENGTH
    whole = await client.messages.create(**ASK)
    async with client.messages.stream(**ASK) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.text for block in answer.content] == ["Hello – ☃"]
        assert answer.stop_reason == "max_tokens"
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 3)
    assert backend.requests[0].max_tokens == 50


async def test_the_stop_sequence_that_ended_an_answer_is_named(client: Any, backend: Any) -> None:
    backend.texts, backend.parsed = ["one ", ""], [None, inference.Parsed(stop="two")]
    asked = {**ASK, "stop_sequences": ["two"]}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.text for block in answer.content] == ["one "]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")
    assert list(backend.requests[0].envelope.clear.stop) == ["two"]


async def test_thinking_and_tools_go_there_and_back(client: Any, calling: Any) -> None:
    asked = {**ASK, "tools": [TOOL], "system": [{"type": "text", "text": "s", "cache_control": {}}]}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        indices = [event.index async for event in stream if event.type == "content_block_start"]
        streamed = await stream.get_final_message()
    assert indices == [0, 1, 2, 3]
    for answer in (whole, streamed):
        thought, text, first, second = answer.content
        assert (thought.thinking, text.text, answer.stop_reason) == ("hm", "Let me see.", "tool_use")
        assert (first.name, first.input, second.input) == ("look", {"at": 1}, {})
        assert first.id != second.id
    results = [
        {"type": "tool_result", "tool_use_id": first.id, "content": [{"type": "text", "text": "ok"}]},
        {"type": "text", "text": "go on"},
    ]
    passed_back = [
        *ASK["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {"role": "user", "content": results},
    ]
    await client.messages.create(**{**asked, "messages": passed_back, "tool_choice": {"type": "any"}})
    chat = calling.requests[-1].envelope.clear.chat
    said = [(one.role, one.content, one.reasoning) for one in chat.messages]
    assert said == [
        ("system", "s", ""),
        ("user", "hello", ""),
        ("assistant", "Let me see.", "hm"),
        ("tool", "ok", ""),
        ("user", "go on", ""),
    ]
    assert chat.messages[3].tool_call_id == first.id
    assert [call.arguments for call in chat.messages[2].tool_calls] == ['{"at": 1}', "{}"]
    assert chat.call_required
    assert chat.tools[0] == inference.Tool(name="look", description="looks", parameters='{"type": "object"}')


async def test_tokens_are_counted_with_tools_and_without_max_tokens(client: Any, backend: Any) -> None:
    count = await client.messages.count_tokens(model="demo", messages=ASK["messages"], tools=[TOOL])
    assert count.input_tokens == 5
    assert (len(backend.requests[0].envelope.clear.chat.tools), backend.requests[0].max_tokens) == (1, 1)
    assert backend.closed
    backend.begins_with = 0  # as a sealed answer, of which only the end tells
    assert (await client.messages.count_tokens(model="demo", messages=ASK["messages"])).input_tokens == 5


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"mcp_servers": []}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"output_config": {"effort": {}}}, "reasoning_effort"),
        ({"output_config": {"format": {}}}, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": 7}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
async def test_what_is_refused_is_named(port: int, change: dict[str, Any], param: str) -> None:
    body = {name: value for name, value in {**ASK, **change}.items() if value is not None}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        answer = await http.post("/v1/messages", json=body)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert param.partition("[")[0] in told["error"]["message"] or "content" in told["error"]["message"]


async def test_errors_have_anthropics_form_before_and_within_a_stream(
    client: Any, backend: Any, anthropic: Any
) -> None:
    for error, expected, kind in (
        (Unauthenticated("x"), anthropic.AuthenticationError, "authentication_error"),
        (Unavailable("x"), anthropic.InternalServerError, "overloaded_error"),
    ):
        backend.error = error
        with pytest.raises(expected) as caught:
            await client.messages.create(**ASK)
        assert caught.value.body["error"]["type"] == kind
    assert caught.value.response.headers["retry-after"] == "1"
    backend.error, backend.error_after = EpochEnded("lost"), 1
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(**ASK) as stream:
            await stream.get_final_message()


async def test_a_model_of_its_makers_is_the_one_that_there_is(
    client: Any, backend: Any, anthropic: Any
) -> None:
    with pytest.raises(anthropic.NotFoundError):  # the scripted backend has no default
        await client.messages.create(**{**ASK, "model": "claude-haiku-9"})
