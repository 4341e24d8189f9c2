"""The losses of a chat template are found before anybody asks, and no conversation loses a part silently.

The templates are small ones of each kind that models have."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text.marked import ASKED, DETAILS, THOUGHTS, TOOLS, refuse_lost, shape_of
from sealring.node.engine.text.shapes import Shape
from sealring.node.engine.text.template import ChatTemplate
from sealring.v1 import inference_pb2 as inference

TOLD = "{% for tool in tools or [] %}[tool]{{ tool.function | tojson }}{% endfor %}"
CALLS = (
    "{% for call in message.tool_calls or [] %}[call]{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}"
)
EACH = "{% for message in messages %}[{{ message.role }}]"
PLAIN = TOLD + EACH + "{{ message.content }}{{ message.reasoning_content }}" + CALLS + "{% endfor %}"
SILENT = TOLD + EACH + "{{ message.content }}{% endfor %}"
TURNS = (
    "{% set turn = namespace(n=0) %}{% for message in messages %}"
    "{% if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}"
    "{% if (message.role == 'user') != (turn.n % 2 == 0) %}{{ raise_exception('in turns') }}{% endif %}"
    "{% set turn.n = turn.n + 1 %}{% endif %}{% endfor %}"
)
TEMPLATES: Mapping[str, tuple[str, list[str]]] = {
    "takes all": (PLAIN, []),
    "DeepSeek R1, V3": (
        EACH + "{% if message.role == 'assistant' and message.content is none %}"
        "{% for call in message.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}",
        ["null", "texts", "beside=apart", "tools=system"],
    ),
    "DeepSeek V3.1": (
        EACH + "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
        "{{ call.function.name + '\n' + call.function.arguments }}{% endfor %}{% endfor %}",
        ["texts", "tools=system"],
    ),
    "Mistral Nemo": (
        TURNS
        + TOLD
        + "{% for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}"
        "{% if call.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "{{ call.function | tojson }}{{ call.id }}{% endfor %}{% elif message.role == 'system' %}"
        "{% elif loop.last and message.role == 'user' and messages[0].role == 'system' %}"
        "{{ messages[0].content + message.content }}{% else %}{{ message.content }}{% endif %}{% endfor %}",
        ["short_ids", "beside=apart", "bridged", "opened", "in_user"],
    ),
    "Ministral 3 Reasoning": (
        TURNS + TOLD + EACH + "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{{ part[part.type] }}{% endfor %}{% endif %}"
        + CALLS
        + "{% endfor %}",
        ["thoughts=part", "bridged", "opened"],
    ),
    "Llama 3": (
        TOLD + EACH + "{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}"
        "{{ raise_exception('one') }}{% endif %}{{ message.tool_calls[0].function | tojson }}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}",
        ["singly", "beside=apart"],
    ),
    "Granite 3.3, LFM2": (SILENT, ["told"]),
    "SmolLM 3": (SILENT.replace("in tools", "in xml_tools"), ["told", "tools=xml_tools"]),
    "Command R7B": (
        TOLD
        + EACH
        + "{% if message.tool_calls %}{{ message.tool_plan }}"
        + CALLS
        + "{% else %}{{ message.content }}{% endif %}{% endfor %}",
        ["beside=tool_plan"],
    ),
    "Seed-OSS": (
        PLAIN.replace(
            "{{ tool.function",
            "{% for key in tool.function.parameters.properties.keys() %}{% endfor %}{{ tool.function",
        ),
        ["filled"],
    ),
    "Solar": (
        TOLD + EACH + "{{ message.content }}{{ message.reasoning }}" + CALLS + "{% endfor %}",
        ["thoughts=reasoning"],
    ),
    "Gemma 2": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('in turns') }}{% endif %}{{ message.content }}{% endfor %}",
        ["joined", "opened", "in_user"],
    ),
    "GLM": (
        TOLD + EACH + "{{ message.content }}{{ message.reasoning_content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
        "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>"
        "<arg_value>{{ value }}</arg_value>{% endfor %}{% endfor %}{% endfor %}",
        [],
    ),
    "writes structures": (
        TOLD + EACH + "{{ message.content }}" + CALLS + "{% endfor %}",
        [],
    ),
}


def rendering(source: str) -> Any:
    template = ChatTemplate(source, {})

    def render(chats: Sequence[Mapping[str, Any]]) -> list[str | None]:
        found: list[str | None] = []
        for chat in chats:
            try:
                found.append(template.render(**chat))
            except InvalidInput:
                found.append(None)
        return found

    return render


@functools.cache
def asked(name: str) -> tuple[Any, Shape]:
    render = rendering(TEMPLATES[name][0])
    return render, shape_of(render)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_shape_is_the_least_change_that_loses_nothing(name: str) -> None:
    _, shape = asked(name)
    assert shape.changes == TEMPLATES[name][1]
    shown = name != "Gemma 2"
    assert (TOOLS not in shape.lost) is shown
    assert not shown or set(shape.lost) <= {THOUGHTS, DETAILS}


def test_a_template_that_takes_all_gets_what_openai_has() -> None:
    """Nothing is changed that need not be: its prompts stay as they were."""
    chat = inference.Chat(messages=[message("user", "a")], tools=[inference.Tool(name="f")])
    chat.messages.append(message("assistant", "b", tool_calls=[call("c1")]))
    chat.messages.append(message("tool", "r", tool_call_id="c1"))
    chat.messages.append(message("user", "more"))
    told, tools, variables = Shape().chat(chat.messages, chat.tools)
    assert variables == {}
    assert told[1:] == [
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "c1",
                    "function": {"name": "zqlookc1", "arguments": {"at": "zqatc1"}},
                }
            ],
        },
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
        {"role": "user", "content": "more"},
    ]
    assert tools[0]["function"] == {"name": "f", "description": "", "parameters": {}}


def test_it_costs_little_to_find_out() -> None:
    """However much a template refuses."""
    shown = 0

    def render(chats: Sequence[Mapping[str, Any]]) -> list[str | None]:
        nonlocal shown
        shown += len(chats)
        return [None] * len(chats)

    shape = shape_of(render)
    assert shown < 150
    assert set(shape.lost) == {each.kind for each in ASKED}


def message(role: str, content: str = "", **fields: Any) -> inference.ChatMessage:
    return inference.ChatMessage(role=role, content=content, **fields)


def call(name: str) -> inference.ToolCall:
    return inference.ToolCall(id=name, name=f"zqlook{name}", arguments=json.dumps({"at": f"zqat{name}"}))


@st.composite
def conversations(draw: st.DrawFn) -> inference.Chat:
    """Turns in any order, systems anywhere, calls with all of their results or none."""
    chat, number = inference.Chat(), 0
    for kind in draw(
        st.lists(st.sampled_from(("system", "user", "assistant", "calls")), min_size=1, max_size=6)
    ):
        number += 1
        if kind != "calls":
            chat.messages.append(message(kind, f"zq{kind}{number}z"))
            continue
        names = [f"{number}n{each}" for each in range(draw(st.integers(1, 2)))]
        text = draw(st.sampled_from(("", f"zqbeside{number}z")))
        chat.messages.append(message("assistant", text, tool_calls=[call(name) for name in names]))
        if draw(st.booleans()):
            for name in draw(st.permutations(names)):
                chat.messages.append(message("tool", f"zqresult{name}", tool_call_id=name))
    chat.tools.extend(
        draw(
            st.lists(
                st.sampled_from(
                    (
                        inference.Tool(name="zqbare"),
                        inference.Tool(name="zqopen", parameters='{"type": "object"}'),
                        inference.Tool(
                            name="zqfull", description="zqlooks", parameters='{"properties": {"zqp": {}}}'
                        ),
                    )
                ),
                unique_by=lambda tool: tool.name,
            )
        )
    )
    return chat


@pytest.mark.parametrize("name", TEMPLATES)
@given(chat=conversations())
def test_no_conversation_loses_anything_silently(name: str, chat: inference.Chat) -> None:
    render, shape = asked(name)
    try:
        refuse_lost(chat, shape)
    except InvalidInput:
        assert name == "Gemma 2"
        return
    messages, tools, variables = shape.chat(chat.messages, chat.tools)
    (prompt,) = render([{"messages": messages, "tools": tools, "arguments": variables}])
    assert prompt is not None, "refused without saying why"
    wanted = re.findall(r"zq\w+", str(chat))
    assert [mark for mark in wanted if mark not in prompt] == []


def test_what_would_be_lost_is_named() -> None:
    _, shape = asked("Gemma 2")
    chat = inference.Chat(messages=[message("user", "x")], tools=[inference.Tool(name="f")])
    with pytest.raises(InvalidInput, match="does not show tools \\(") as caught:
        refuse_lost(chat, shape)
    assert caught.value.reason == "CHAT_TEMPLATE_LOSES"
    assert caught.value.metadata["param"] == "tools"
    refuse_lost(inference.Chat(messages=[message("system", "s"), message("user", "x")]), shape)
