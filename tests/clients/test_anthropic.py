"""What Anthropic's own client makes of `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from sealring.mesh.errors import EpochEnded, Unauthenticated, Unavailable
from sealring.node.engine.text import in_turns
from sealring.v1 import inference_pb2 as inference

ASK: dict[str, Any] = {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object"}}
JSON = {"content-type": "application/json"}
NESTED = {"type": "object", "properties": {str(number): {} for number in range(511)}, "x": ["y" * 70_000]}


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


async def test_the_prompts_tokens_are_counted_once_whatever_was_cached(client: Any, backend: Any) -> None:
    """The start does not know what is cached, and the end replaces it: each of both adds up to the prompt."""
    backend.cached = 4
    async with client.messages.stream(**ASK) as stream:
        usages = [
            (event.message if event.type == "message_start" else event).usage
            async for event in stream
            if event.type in ("message_start", "message_delta")
        ]
        final = (await stream.get_final_message()).usage
    counted = [(one.input_tokens, one.cache_read_input_tokens) for one in (*usages, final)]
    assert counted == [(5, 0), (1, 4), (1, 4)]
    whole = (await client.messages.create(**ASK)).usage
    assert (whole.input_tokens, whole.cache_read_input_tokens) == (1, 4)


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
        assert answer.usage.output_tokens_details.thinking_tokens == 1
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
    backend.sealed = True
    assert (await client.messages.count_tokens(model="demo", messages=ASK["messages"])).input_tokens == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is"),
        ({"tool_choice": {"type": []}}, "tool_choice.type is"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice names"),
        ({"output_config": {"effort": {}}}, "output_config.effort is"),
        ({"output_config": {"format": {}}}, "output_config.format.type is"),
        ({"output_config": {"surprise": 1}}, "unknown field 'output_config.surprise'"),
        ({"stop_sequences": [1]}, "stop_sequences[0] is"),
        ({"top_k": -5}, "top_k is"),
        ({"system": "\ud800"}, "system holds"),
        ({"system": "s", "messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text"),
        ({"tools": [{**TOOL, "input_schema": 7}]}, "tools[0].input_schema is"),
        ({"tools": [{**TOOL, "strict": True, "input_schema": NESTED}]}, "tools[0].input_schema has"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] is"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content is"),
        ({"messages": 7}, "messages is"),
        ({"max_tokens": None}, "max_tokens is"),
    ],
)
async def test_what_is_refused_is_named(port: int, change: dict[str, Any], words: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        answer = await http.post("/v1/messages", content=json.dumps({**ASK, **change}), headers=JSON)
    seen = answer.json()
    assert (answer.status_code, seen["type"], seen["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert words in seen["error"]["message"]


async def test_a_thread_is_refused_so_that_a_helper_sends_the_whole_conversation(port: int) -> None:
    """Anthropic's `tool_runner` asks for a thread, and continues without it after this answer alone."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        asked = {**ASK, "thread": {"type": "create"}}
        answer = await http.post("/v1/messages", content=json.dumps(asked), headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "thread=False" in error["message"]


async def test_models_are_listed_in_anthropics_form_too(client: Any) -> None:
    listed = await client.models.list()
    (model,) = listed.data
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert model.created_at.timestamp() > 0
    assert (listed.has_more, listed.first_id, listed.last_id) == (False, "demo", "demo")
    assert (await client.models.retrieve("demo")).created_at == model.created_at


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


BOOKKEPT: dict[str, Any] = {
    "safeguards": {"dangerous_tool_use": "block"},
    "betas": ["one-2026-01-01"],
    "container": None,
    "mcp_servers": [],
    "fallbacks": [],
    "diagnostics": {"level": "full"},
    "user_profile_id": "u",
    "thinking": {"type": "adaptive", "display": "summarized"},
    "output_config": {"effort": "max", "task_budget": {"total": 9}},
    "metadata": "x",
    "context_management": {"edits": []},
}


async def test_what_claude_code_notes_for_its_makers_servers_is_taken(client: Any, backend: Any) -> None:
    await client.messages.create(**ASK, extra_body={**BOOKKEPT, "output_config": {"effort": "max"}})
    await client.messages.create(**ASK, extra_body=BOOKKEPT)
    first, second = (request.envelope.clear.chat for request in backend.requests)
    assert json.loads(first.template_arguments)["reasoning_effort"] == "xhigh"
    assert first == second


async def test_thinking_is_turned_off_or_has_a_budget(client: Any, backend: Any) -> None:
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 2048}):
        await client.messages.create(**{**ASK, "max_tokens": 4096, "thinking": thinking})
    seen = [json.loads(request.envelope.clear.chat.template_arguments) for request in backend.requests]
    assert seen == [{"enable_thinking": False}, {"enable_thinking": True, "thinking_budget": 2048}]


async def test_the_system_may_speak_after_the_user(client: Any, backend: Any) -> None:
    """As Claude Code has it: the folder, the skills and the tools to be found, in each first turn."""
    notes = {"role": "system", "content": [{"type": "text", "text": "the folder is empty"}]}
    await client.messages.create(
        **{**ASK, "messages": [*ASK["messages"], notes, {"role": "user", "content": "go"}]}
    )
    (said,) = in_turns(backend.requests[0].envelope.clear.chat.messages)
    assert (said.role, said.content) == ("user", "hello\n\nthe folder is empty\n\ngo")


FETCH = {
    "name": "fetch",
    "description": "fetches a page",
    "input_schema": {"type": "object", "properties": {"url": {"type": "string"}}},
    "defer_loading": True,
}


async def test_a_tool_whose_loading_is_deferred_is_defined_where_it_is_found(
    client: Any, backend: Any
) -> None:
    asked: dict[str, Any] = {**ASK, "tools": [TOOL, FETCH, {**FETCH, "name": "other"}]}
    await client.messages.create(**asked)
    search = {"type": "tool_use", "id": "t1", "name": "look", "input": {"query": "pages"}}
    found = [
        {"type": "tool_reference", "tool_name": "fetch"},
        {"type": "tool_reference", "tool_name": "gone"},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": found}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": [search]},
        {"role": "user", "content": [result]},
    ]
    await client.messages.create(**{**asked, "messages": messages})
    before, after = (request.envelope.clear.chat for request in backend.requests)
    assert [tool.name for tool in before.tools] == ["look"]
    assert [(tool.name, tool.in_conversation) for tool in after.tools] == [("look", False), ("fetch", True)]
    first, definition, last = after.messages[2].content.split("\n")
    assert (first, last) == ("tool fetch is loaded", "there is no tool gone")
    assert json.loads(definition)["function"]["parameters"] == FETCH["input_schema"]
    await client.messages.create(**{**asked, "tool_choice": {"type": "tool", "name": "other"}})
    (chosen,) = backend.requests[-1].envelope.clear.chat.tools
    assert (chosen.name, chosen.in_conversation) == ("other", False)


async def test_a_tool_that_failed_says_so(client: Any, backend: Any) -> None:
    content = [{"type": "tool_result", "tool_use_id": "t", "content": "boom", "is_error": True}]
    await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": content}]})
    (said,) = backend.requests[0].envelope.clear.chat.messages
    assert (said.role, said.content) == ("tool", "the tool failed:\nboom")


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


async def test_images_of_users_and_tools_are_shown_and_counted(client: Any, backend: Any) -> None:
    seen = {"type": "tool_result", "tool_use_id": "t", "content": [PNG]}
    messages = [{"role": "user", "content": [seen, PNG, {"type": "text", "text": "both?"}]}]
    await client.messages.create(**{**ASK, "messages": messages})
    await client.messages.count_tokens(model="demo", messages=messages)
    for request in backend.requests:
        result, question = request.envelope.clear.chat.messages
        assert [one.data for one in (*result.images, *question.images)] == [bytes(3)] * 2
        assert (result.role, question.content, question.images[0].at) == ("tool", "both?", 0)


async def test_documents_of_text_are_read(client: Any, backend: Any) -> None:
    seen = {"type": "tool_result", "tool_use_id": "t", "content": [PNG]}
    plain = {"type": "text", "media_type": "text/plain", "data": "once"}
    read = [
        {"type": "document", "title": "tale", "source": plain},
        {
            "type": "search_result",
            "source": "a.txt",
            "title": "b",
            "content": [{"type": "text", "text": "c"}],
        },
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
    ]
    await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": [seen, *read]}]})
    result, question = backend.requests[0].envelope.clear.chat.messages
    assert result.images
    assert question.content == "tale\nonce\nb\na.txt\nc\n[a document; this model cannot read it]"


async def test_tools_of_its_makers_servers_are_not_shown_beside_others(client: Any, backend: Any) -> None:
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "found"},
    ]
    messages = [*ASK["messages"], {"role": "assistant", "content": searched}, *ASK["messages"]]
    tools = [{"type": "web_search_20250305", "name": "web_search"}, TOOL]
    await client.messages.create(**{**ASK, "messages": messages, "tools": tools})
    chat = backend.requests[0].envelope.clear.chat
    assert [tool.name for tool in chat.tools] == ["look"]
    assert [one.content for one in chat.messages] == ["hello", "found", "hello"]


async def test_a_last_turn_of_the_assistant_is_continued(client: Any, backend: Any) -> None:
    """As Anthropic's servers do; a call is not."""
    said = [{"role": "user", "content": "Where?"}]
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    for last in ("The capital of", [{"type": "text", "text": "The"}], [call], None):
        asked = said + [{"role": "assistant", "content": last}] * (last is not None)
        await client.messages.create(**{**ASK, "messages": asked})
    assert [one.envelope.clear.chat.begun for one in backend.requests] == [True, True, False, False]
    assert backend.requests[0].envelope.clear.chat.messages[-1].content == "The capital of"
