"""What OpenAI's own client makes of `/v1/responses`, and what Codex sends there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from sealring.mesh.errors import EpochEnded
from sealring.v1 import inference_pb2 as inference

ASK: dict[str, Any] = {"model": "demo", "input": "hello"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
async def client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        api_key="none", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0
    ) as made:
        yield made


async def events(port: int, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream, as they are on the wire."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        answer = await http.post("/v1/responses", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {one['type']}" for one in found]
    return found


async def test_a_response_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(**ASK)
    async with client.responses.stream(**ASK) as stream:
        streamed = await stream.get_final_response()
    for answer in (whole, streamed):
        assert (answer.output_text, answer.status) == ("Hello – ☃", "completed")
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (5, 3, 8)


URL = "data:image/png;base64,AAAA"


async def test_images_of_the_package_are_shown(client: openai.AsyncOpenAI, backend: Any) -> None:
    shown: Any = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": URL, "detail": "low"},
    ]
    asked: Any = [{"role": "user", "content": shown}]
    await client.responses.create(model="demo", input=asked)
    shown = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    ]
    asked = [{"role": "user", "content": shown}]
    await client.chat.completions.create(model="demo", messages=asked)
    for request in backend.requests:
        (said,) = request.envelope.clear.chat.messages
        assert said == inference.ChatMessage(
            role="user", content="see", images=[inference.Image(data=bytes(3), at=3, low_detail=True)]
        )
    shown[1]["image_url"]["url"] = "https://example.com/a.png"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="demo", messages=asked)
    assert (caught.value.code, caught.value.param) == ("image_url_refused", "messages[0].content[1]")


REQUIRED: dict[str, Any] = {
    "id": str,
    "object": str,
    "created_at": int,
    "completed_at": (int, type(None)),
    "status": str,
    "incomplete_details": (dict, type(None)),
    "model": str,
    "previous_response_id": type(None),
    "instructions": (str, type(None)),
    "output": list,
    "error": (dict, type(None)),
    "tools": list,
    "tool_choice": (str, dict),
    "truncation": str,
    "parallel_tool_calls": bool,
    "text": dict,
    "top_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "top_logprobs": int,
    "temperature": (int, float),
    "reasoning": (dict, type(None)),
    "usage": (dict, type(None)),
    "max_output_tokens": (int, type(None)),
    "max_tool_calls": (int, type(None)),
    "store": bool,
    "background": bool,
    "service_tier": str,
    "metadata": dict,
    "safety_identifier": (str, type(None)),
    "prompt_cache_key": (str, type(None)),
}
"""What openresponses.org's compliance cases demand of a response."""


SHOWN: dict[str, Any] = {
    "type": "message",
    "role": "user",
    "content": [
        {"type": "input_text", "text": "What do you see in this image? Answer in one sentence."},
        {"type": "input_image", "image_url": URL},
    ],
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tools": [{"type": "function", "name": "look"}], "temperature": 0},
        {"input": [SHOWN]},
    ],
    ids=["conversation", "tool", "image"],
)
async def test_a_response_has_all_fields_of_open_responses(
    port: int, calling: Any, change: dict[str, Any]
) -> None:
    said = [
        {"type": "message", "role": "system", "content": "You are a pirate."},
        {"type": "message", "role": "user", "content": "My name is Alice."},
        {"type": "message", "role": "assistant", "content": "Hello Alice!"},
        {"type": "message", "role": "user", "content": "What is my name?"},
    ]
    body = {"model": "demo", "input": said, **change}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        whole = (await http.post("/v1/responses", json=body)).json()
    streamed = [one["response"] for one in await events(port, body) if "response" in one]
    assert [one["status"] for one in (whole, *streamed)] == ["completed", *["in_progress"] * 2, "completed"]
    for response in (whole, *streamed):
        assert set(response) == set(REQUIRED)
        for name, kinds in REQUIRED.items():
            assert isinstance(response[name], kinds), name
        for tool in response["tools"]:
            assert set(tool) == {"type", "name", "description", "parameters", "strict"}
    assert whole["completed_at"] >= whole["created_at"]
    assert whole["temperature"] == change.get("temperature", 1)
    assert {item["type"] for item in whole["output"]} >= {"message", "function_call"}


async def test_items_do_not_overlap_and_the_end_holds_what_was_streamed(port: int, calling: Any) -> None:
    seen = await events(port, {**ASK, "tools": [LOOK]})
    assert [one["sequence_number"] for one in seen] == list(range(len(seen)))
    kinds = [one["type"].removeprefix("response.") for one in seen]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    done = [one["item"] for one in seen if one["type"] == "response.output_item.done"]
    assert seen[-1]["type"] == "response.completed"
    assert seen[-1]["response"]["output"] == done
    assert seen[-1]["response"]["id"] == seen[0]["response"]["id"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["arguments"] for item in done[2:]] == ['{"at": 1}', "{}"]
    assert done[2]["call_id"] != done[3]["call_id"]
    assert seen[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert len({one["output_index"] for one in seen if "output_index" in one}) == 4


async def test_custom_tools_and_namespaces_come_back_as_they_were_declared(port: int, backend: Any) -> None:
    backend.texts = [""]
    calls = [
        inference.ToolCall(name="apply_patch", arguments='{"input": "*** Begin"}'),
        inference.ToolCall(name="mcp__read", arguments="{}"),
    ]
    backend.parsed = [inference.Parsed(tool_calls=calls)]
    tools = [
        {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
        {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "read"}]},
        {"type": "web_search"},
    ]
    seen = await events(port, {**ASK, "tools": tools})
    patch, read = seen[-1]["response"]["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    assert (read["type"], read["name"], read["namespace"]) == ("function_call", "read", "mcp")
    chat = backend.requests[0].envelope.clear.chat
    assert [tool.name for tool in chat.tools] == ["apply_patch", "mcp__read"]
    outputs = [
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "done"},
        {
            "type": "function_call_output",
            "call_id": read["call_id"],
            "output": [{"type": "input_text", "text": "r"}],
        },
    ]
    again = [{"role": "user", "content": "hello"}, patch, read, *outputs]
    await events(port, {**ASK, "tools": tools, "input": again})
    said = backend.requests[1].envelope.clear.chat.messages
    assert [(call.name, call.arguments) for call in said[1].tool_calls] == [
        ("apply_patch", '{"input": "*** Begin"}'),
        ("mcp__read", "{}"),
    ]
    assert [(one.role, one.content) for one in said[2:]] == [("tool", "done"), ("tool", "r")]


async def test_what_codex_sends_is_taken(port: int, backend: Any) -> None:
    body = {
        "model": "demo",
        "instructions": "You are Codex.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "on it"}]},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "later"}]},
            {"type": "additional_tools", "tools": [LOOK]},
        ],
        "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
        "text": {"verbosity": "low"},
        "client_metadata": {"a": "b"},
    }
    assert (await events(port, body))[-1]["type"] == "response.completed"
    request = backend.requests[0]
    chat = request.envelope.clear.chat
    assert [(one.role, one.content, one.reasoning) for one in chat.messages] == [
        ("system", "You are Codex.\nrules", ""),
        ("user", "fix it", ""),
        ("assistant", "on it", "hm"),
        ("system", "later", ""),  # whose the head makes it
    ]
    assert ([tool.name for tool in chat.tools], chat.one_call) == (["shell", "look"], True)
    assert request.prompt_cache_key == "thread-1"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        listed = (await http.get("/v1/models?client_version=0.144")).json()
    assert {"data", "models"} <= set(listed)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"conversation": "x"}, "conversation"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"max_output_tokens": 1 << 31}, "max_output_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "k"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        (
            {
                "instructions": "s",
                "input": [{"role": "developer", "content": "t"}, {"role": "user", "content": 7}],
            },
            "input[1].content",
        ),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": 7}]}, "tools[0].parameters"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": 5}, "input"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"surprise": 1}, "surprise"),
    ],
)
async def test_what_is_refused_is_named(
    client: openai.AsyncOpenAI, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**{**ASK, "extra_body": change})
    assert caught.value.param == param


async def test_a_conversation_is_compacted_and_goes_on(client: openai.AsyncOpenAI, backend: Any) -> None:
    asked: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Plums?"},
        {"role": "assistant", "content": "Three."},
    ]
    raw = await client.responses.with_raw_response.compact(
        model="demo", input=asked, instructions="Be brief."
    )
    compacted, window = raw.parse(), json.loads(raw.content)["output"]
    sent = backend.requests[-1].envelope.clear.chat.messages
    assert [one.role for one in sent] == ["system", "user", "assistant", "user"]
    assert sent[3].content.startswith("Summarize this conversation")
    assert (compacted.object, compacted.usage.output_tokens) == ("response.compaction", 3)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert b"Hello" not in raw.content
    await client.responses.create(model="demo", input=[*window, {"role": "user", "content": "More?"}])
    told = [(one.role, one.content) for one in backend.requests[-1].envelope.clear.chat.messages]
    assert told[0] == ("system", "Be kind.")
    assert told[1] == ("user", "What was said and done before, in summary:\n\nHello – ☃")
    assert told[2] == ("user", "More?")


async def test_what_cannot_be_compacted_is_refused(client: openai.AsyncOpenAI, backend: Any) -> None:
    for change, param in (
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"model": None}, "model"),
    ):
        asked: Any = {"model": "demo", "input": "hello", **change}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.compact(**asked)
        assert caught.value.param == param
    backend.texts = [" "]
    with pytest.raises(openai.InternalServerError) as failed:
        await client.responses.compact(model="demo", input="hello")
    assert failed.value.code == "no_summary"


async def test_ends_that_are_none_are_told(port: int, backend: Any) -> None:
    backend.reason = inference.FINISH_REASON_LENGTH
    last = (await events(port, ASK))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    backend.error, backend.error_after = EpochEnded("lost"), 1
    seen = await events(port, ASK)
    assert (seen[-1]["type"], seen[-1]["response"]["status"]) == ("response.failed", "failed")
    assert seen[-1]["response"]["id"] == seen[0]["response"]["id"]
