"""Conversations in which every text has a mark, of what clients send in any order, and what renders them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text import ChatTemplate, Shape, refuse_lost, refused
from sealring.v1 import inference_pb2 as inference


def rendering(source: str, with_tools: str = "") -> Any:
    template = ChatTemplate(source, {"bos_token": "", "eos_token": "<EOS>"}, with_tools)

    def render(chats: Sequence[Mapping[str, Any]]) -> list[str | None]:
        found: list[str | None] = []
        for chat in chats:
            try:
                found.append(template.render(**chat))
            except InvalidInput:
                found.append(None)
        return found

    return render


def message(role: str, content: str = "", **fields: Any) -> inference.ChatMessage:
    return inference.ChatMessage(role=role, content=content, **fields)


def call(name: str) -> inference.ToolCall:
    return inference.ToolCall(id=name, name=f"zqlook{name}", arguments=json.dumps({"at": f"zqat{name}"}))


def missing(render: Any, shape: Shape, chat: inference.Chat, placeholder: str = "") -> list[str]:
    """The marks that a prompt lacks, and a placeholder where it does not have one for each image.

    Raises InvalidInput (CHAT_TEMPLATE_LOSES, CHAT_TEMPLATE_REFUSED).
    """
    refuse_lost(chat, shape)
    messages, tools, variables = shape.chat(chat.messages, chat.tools)
    (prompt,) = render([{"messages": messages, "tools": tools, "arguments": variables}])
    if prompt is None:
        raise refused()
    found = [mark for mark in re.findall(r"zq\w+", str(chat)) if mark not in prompt]
    images = sum(len(each.images) for each in chat.messages)
    return found + [placeholder] * (images > 0 and prompt.count(placeholder) != images)


def _tool(name: str, parameters: Mapping[str, Any] | None = None) -> inference.Tool:
    described = "" if parameters is None else json.dumps(parameters)
    return inference.Tool(name=name, description=f"{name}looks", parameters=described)


_INNER = {"type": "object", "properties": {"zqinner": {"type": "string", "enum": ["zqone", "zqtwo"]}}}
TOOLS = (
    inference.Tool(name="zqbare"),
    _tool("zqopen", {"type": "object"}),
    _tool("zqbroad", {"properties": {"zqa": {}}}),
    _tool("zqflat", {"type": "object", "properties": {"zqb": {"type": "integer"}}, "required": ["zqb"]}),
    _tool("zqdeep", {"type": "object", "properties": {"p": {"type": "array", "items": _INNER}}}),
    _tool("zqeither", {"type": "object", "properties": {"p": {"anyOf": [_INNER, {"type": "null"}]}}}),
    _tool(
        "zqnamed",
        {"type": "object", "properties": {"p": {"$ref": "#/$defs/zqdef"}}, "$defs": {"zqdef": _INNER}},
    ),
    _tool("zqfixed", {"type": "object", "properties": {"p": {"const": "zqvalue"}}}),
)


@st.composite
def conversations(draw: st.DrawFn, images: bool = False) -> inference.Chat:
    """Turns in any order, systems anywhere, calls with all of their results or none. With `images` users and
    tools show some."""
    chat, number = inference.Chat(), 0

    def shown() -> list[inference.Image]:
        return [inference.Image()] * draw(st.integers(0, 2)) if images else []

    for kind in draw(
        st.lists(st.sampled_from(("system", "user", "assistant", "calls")), min_size=1, max_size=6)
    ):
        number += 1
        if kind != "calls":
            seen = shown() if kind == "user" else []
            chat.messages.append(message(kind, f"zq{kind}{number}z", images=seen))
            continue
        names = [f"{number}n{each}" for each in range(draw(st.integers(1, 2)))]
        text = draw(st.sampled_from(("", f"zqbeside{number}z")))
        chat.messages.append(message("assistant", text, tool_calls=[call(name) for name in names]))
        if draw(st.booleans()):
            for name in draw(st.permutations(names)):
                chat.messages.append(message("tool", f"zqresult{name}", tool_call_id=name, images=shown()))
    chat.tools.extend(draw(st.lists(st.sampled_from(TOOLS), unique_by=lambda tool: tool.name, max_size=3)))
    return chat
