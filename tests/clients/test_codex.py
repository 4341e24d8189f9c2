"""What Codex needs of `/v1/responses`, one case each: what public reports of servers that fail it name."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from sealring.mesh.errors import EpochEnded, SealringError
from sealring.node.engine.text import in_turns
from sealring.v1 import inference_pb2 as inference

ASK: dict[str, Any] = {"model": "demo", "input": "hello", "stream": True, "store": False}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "*** Begin Patch" LF\n%import common.LF\n',
    },
}
DONE = [{"type": "input_text", "text": "Done"}]
SPACE = {"type": "namespace", "name": "mcp__fs", "tools": [{"type": "function", "name": "read"}]}


class Edge:
    """Asks, and keeps what the backend was asked."""

    def __init__(self, port: int, backend: Any) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/responses"
        self.backend = backend

    async def post(self, path: str = "", **change: Any) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            return await http.post(self.url + path, json={**ASK, **change})

    async def events(self, **change: Any) -> list[dict[str, Any]]:
        answer = await self.post(**change)
        assert answer.status_code == 200, answer.text
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]

    async def output(self, **change: Any) -> list[dict[str, Any]]:
        """The items of the last event, which are those that were streamed."""
        seen = await self.events(**change)
        done = [one["item"] for one in seen if one["type"] == "response.output_item.done"]
        assert seen[-1]["type"] == "response.completed"
        assert seen[-1]["response"]["output"] == done
        return done

    async def replayed(self, *items: dict[str, Any], **change: Any) -> inference.Chat:
        """The conversation that reaches the model."""
        await self.events(input=[{"role": "user", "content": "hello"}, *items], **change)
        chat: inference.Chat = self.backend.requests[-1].envelope.clear.chat
        return chat

    def calls(self, *calls: inference.ToolCall, text: str = "", reasoning: str = "") -> None:
        self.backend.texts = [text]
        self.backend.parsed = [inference.Parsed(tool_calls=calls, reasoning=reasoning)]


@pytest.fixture
def edge(port: int, backend: Any) -> Edge:
    return Edge(port, backend)


def call(name: str, **arguments: Any) -> inference.ToolCall:
    return inference.ToolCall(name=name, arguments=json.dumps(arguments))


async def basic(edge: Edge) -> None:
    answer = (await edge.post(stream=False)).json()
    assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("completed", "Hello – ☃")


async def stream_lifecycle(edge: Edge) -> None:
    seen = await edge.events()
    assert [one["type"] for one in seen[:2]] == ["response.created", "response.in_progress"]
    assert [one["sequence_number"] for one in seen] == list(range(len(seen)))
    assert len({one["response"]["id"] for one in seen if "response" in one}) == 1


async def stream_items_equal_final(edge: Edge) -> None:
    edge.calls(call("shell"), text="I look.", reasoning="hm")
    items = await edge.output(tools=[SHELL])
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert [item["id"].partition("_")[0] for item in items] == ["rs", "msg", "fc"]
    assert len({item["id"] for item in items}) == 3


async def usage(edge: Edge) -> None:
    seen = (await edge.events())[-1]["response"]["usage"]
    assert seen["input_tokens"] + seen["output_tokens"] == seen["total_tokens"]
    assert {"cached_tokens"} <= set(seen["input_tokens_details"])
    assert {"reasoning_tokens"} <= set(seen["output_tokens_details"])


async def function_call(edge: Edge) -> None:
    edge.calls(call("shell", command="ls"))
    (item,) = await edge.output(tools=[SHELL])
    assert (item["type"], item["name"], json.loads(item["arguments"])) == (
        "function_call",
        "shell",
        {"command": "ls"},
    )
    assert item["call_id"]


async def function_call_arguments_done(edge: Edge) -> None:
    edge.calls(call("shell", command="ls"))
    seen = {one["type"]: one for one in await edge.events(tools=[SHELL])}
    done = seen["response.function_call_arguments.done"]
    assert done["arguments"] == seen["response.output_item.done"]["item"]["arguments"]
    assert done["item_id"] == seen["response.output_item.added"]["item"]["id"]


async def tool_roundtrip(edge: Edge) -> None:
    chat = await edge.replayed(
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        tools=[SHELL],
    )
    assert [one.role for one in chat.messages] == ["user", "assistant", "tool"]
    assert chat.messages[2].tool_call_id == chat.messages[1].tool_calls[0].id == "c1"


async def parallel_tool_calls(edge: Edge) -> None:
    edge.calls(call("shell", n=1), call("shell", n=2))
    first, second = await edge.output(tools=[SHELL], parallel_tool_calls=True)
    assert first["call_id"] != second["call_id"]
    assert first["id"] != second["id"]


async def parallel_tool_roundtrip(edge: Edge) -> None:
    made = [{"type": "function_call", "call_id": f"c{n}", "name": "shell", "arguments": "{}"} for n in (1, 2)]
    results = [{"type": "function_call_output", "call_id": f"c{n}", "output": str(n)} for n in (1, 2)]
    chat = await edge.replayed(*made, *results, tools=[SHELL])
    assert [one.role for one in chat.messages] == ["user", "assistant", "tool", "tool"]
    assert len(chat.messages[1].tool_calls) == 2


async def parallel_tool_calls_off(edge: Edge) -> None:
    assert (await edge.replayed(tools=[SHELL], parallel_tool_calls=False)).one_call


async def message_between_call_and_output(edge: Edge) -> None:
    chat = await edge.replayed(
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    )
    assert [(one.role, one.content) for one in chat.messages[1:]] == [("assistant", "wait"), ("tool", "ok")]


async def tool_choice_required(edge: Edge) -> None:
    assert (await edge.replayed(tools=[SHELL], tool_choice="required")).call_required


async def tool_choice_named(edge: Edge) -> None:
    chat = await edge.replayed(tools=[SHELL, PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    assert [tool.name for tool in chat.tools] == ["apply_patch"]
    assert chat.call_required


async def custom_tool_call(edge: Edge) -> None:
    edge.calls(call("apply_patch", input="*** Begin Patch\n"))
    seen = await edge.events(tools=[PATCH])
    (item,) = seen[-1]["response"]["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin Patch\n")
    assert "response.custom_tool_call_input.done" in {one["type"] for one in seen}


async def custom_tool_roundtrip(edge: Edge) -> None:
    chat = await edge.replayed(
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "Done"}],
        },
        tools=[PATCH],
    )
    assert chat.messages[1].tool_calls[0].arguments == '{"input": "*** Begin"}'
    assert chat.messages[2].content == "Done"
    (tool,) = chat.tools
    held = json.loads(tool.parameters)["properties"]["input"]["pattern"]
    assert tool.strict
    assert "%import common.LF" in tool.description
    assert re.fullmatch(held, "*** Begin Patch\n")
    assert not re.fullmatch(held, "*** Begin")


async def namespace_tools(edge: Edge) -> None:
    edge.calls(call("mcp__fs__read", path="x"))
    (item,) = await edge.output(tools=[SPACE])
    assert (item["namespace"], item["name"]) == ("mcp__fs", "read")


async def namespace_roundtrip(edge: Edge) -> None:
    replayed = {
        "type": "function_call",
        "call_id": "c",
        "namespace": "mcp__fs",
        "name": "read",
        "arguments": "{}",
    }
    chat = await edge.replayed(
        replayed, {"type": "function_call_output", "call_id": "c", "output": "x"}, tools=[SPACE]
    )
    assert chat.messages[1].tool_calls[0].name == chat.tools[0].name == "mcp__fs__read"


async def additional_tools(edge: Edge) -> None:
    chat = await edge.replayed({"type": "additional_tools", "role": "developer", "tools": [SHELL]})
    assert [tool.name for tool in chat.tools] == ["shell"]


async def tool_search(edge: Edge) -> None:
    chat = await edge.replayed(
        {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "files"}, "execution": "client"},
        {"type": "tool_search_output", "call_id": "c", "tools": [SPACE], "execution": "client"},
        tools=[{"type": "tool_search"}],
    )
    assert [(tool.name, tool.in_conversation) for tool in chat.tools] == [("mcp__fs__read", True)]
    assert [one.role for one in chat.messages] == ["user", "assistant", "tool"]
    assert '"name": "mcp__fs__read"' in chat.messages[2].content


async def local_shell_call(edge: Edge) -> None:
    chat = await edge.replayed(
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c", "output": "a.py"},
    )
    assert json.loads(chat.messages[1].tool_calls[0].arguments)["command"] == ["ls"]
    assert chat.messages[2].content == "a.py"


async def hosted_tools(edge: Edge) -> None:
    searched = {"type": "web_search_call", "status": "completed", "action": {"type": "search"}}
    chat = await edge.replayed(searched, tools=[SHELL, {"type": "web_search"}])
    assert [tool.name for tool in chat.tools] == ["shell"]
    assert [one.role for one in chat.messages] == ["user"]


async def agent_message(edge: Edge) -> None:
    said = [{"type": "input_text", "text": "it is done"}]
    chat = await edge.replayed({"type": "agent_message", "author": "a", "recipient": "b", "content": said})
    assert chat.messages[-1].content == "it is done"


async def reasoning_replay(edge: Edge) -> None:
    thought = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": "x",
    }
    spoken = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "on it"}]}
    chat = await edge.replayed(thought, spoken, reasoning={"effort": "max", "summary": "auto"})
    assert (chat.messages[1].reasoning, chat.messages[1].content) == ("hm", "on it")


async def developer_after_user(edge: Edge) -> None:
    later = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]}
    chat = await edge.replayed(later, instructions="You are Codex.")
    assert [one.role for one in in_turns(chat.messages)] == ["system", "user"]


async def model_catalogue(edge: Edge) -> None:
    async with httpx.AsyncClient() as http:
        seen = (await http.get(edge.url.replace("/responses", "/models?client_version=0.162.1"))).json()
    assert {"data", "models"} <= set(seen)


async def failure_in_mid_stream(edge: Edge) -> None:
    edge.backend.error, edge.backend.error_after = EpochEnded("lost"), 1
    last = (await edge.events())[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"]


async def context_too_long(edge: Edge) -> None:
    edge.backend.error = SealringError("too long", reason="CONTEXT_TOO_LONG")
    assert (await edge.post()).json()["error"]["code"] == "context_length_exceeded"


async def compaction_replay(edge: Edge) -> None:
    """Codex itself asks for it only where its provider is OpenAI's, and writes the summary otherwise."""
    made = (await edge.post("/compact", stream=None, tools=[SHELL], parallel_tool_calls=True)).json()
    (item,) = made["output"]
    chat = await edge.replayed(item, {"role": "user", "content": "go on"})
    assert [one.role for one in chat.messages] == ["user", "user", "user"]
    assert chat.messages[1].content.endswith("\n\nHello – ☃")
    changed = {**item, "encrypted_content": item["encrypted_content"][:-4] + "AAA="}
    refused = (await edge.post(input=[changed])).json()["error"]
    assert (refused["code"], refused["param"]) == ("compaction_not_opened", "input[0].encrypted_content")


CASES = [
    each
    for name, each in dict(globals()).items()
    if callable(each)
    and each.__module__ == __name__
    and getattr(each, "__code__", None)
    and name not in ("edge", "call")
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_what_codex_needs(case: Any, edge: Edge) -> None:
    await case(edge)
