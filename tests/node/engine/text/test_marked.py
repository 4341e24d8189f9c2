"""The losses of a chat template are found before anybody asks, and no conversation loses a part silently.

The templates are small ones of each kind that models have."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from markedchats import call, conversations, message, missing, rendering

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text import (
    DETAILS,
    MESSAGES,
    THOUGHTS,
    TOOLS,
    Shape,
    in_short,
    refuse_lost,
    shape_of,
    with_images,
)
from sealring.node.engine.text.marked import ASKED
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
    "GigaChat, gpt-oss, Gemma 4": (
        "{% for tool in tools or [] %}[tool]{{ tool.function.name }}{{ tool.function.description }}"
        "{% if tool.function.parameters.type == 'object' %}"
        "{% for name, one in tool.function.parameters.properties.items() %}{{ name }}"
        "{{ one.type }}{{ one.enum }}{% if one.type %}{{ one.properties }}{{ one['items'] }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
        + EACH
        + "{{ message.content }}{{ message.reasoning_content }}"
        + CALLS
        + "{% endfor %}",
        ["filled", "written=untyped"],
    ),
    "Command R+": (
        "{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description }}"
        "{% for name, one in (tool.function.parameters.properties or {}).items() %}"
        "{{ name + one.type + one.description }}{% endfor %}{% endfor %}" + SILENT,
        ["told", "written=only"],
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


@pytest.mark.parametrize("name", TEMPLATES)
@given(chat=conversations())
def test_no_conversation_loses_anything_silently(name: str, chat: inference.Chat) -> None:
    render, shape = asked(name)
    if name == "Gemma 2" and refused(chat, shape):
        return
    assert missing(render, shape, chat) == []


def refused(chat: inference.Chat, shape: Shape) -> bool:
    try:
        refuse_lost(chat, shape)
    except InvalidInput:
        return True
    return False


PARTS = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ part.text or '<image>' }}{% endfor %}{% endif %}"
)
SEEING: Mapping[str, tuple[str, list[str]]] = {
    "in any message": (TOLD + EACH + PARTS + CALLS + "{% endfor %}", []),
    "refused in results": (
        TOLD + EACH + "{% if message.role == 'tool' and message.content is not string %}"
        "{{ raise_exception('a text') }}{% endif %}" + PARTS + CALLS + "{% endfor %}",
        ["behind"],
    ),
    "left out of results, in turns": (
        TURNS
        + TOLD
        + EACH
        + "{% if message.role == 'tool' %}{{ message.content }}{% else %}"
        + PARTS
        + "{% endif %}"
        + CALLS
        + "{% endfor %}",
        ["bridged", "opened", "behind"],
    ),
}


@pytest.mark.parametrize("name", SEEING)
@given(chat=conversations(images=True))
def test_no_conversation_loses_an_image(name: str, chat: inference.Chat) -> None:
    render, shape = seeing(name)
    assert shape.changes == SEEING[name][1]
    assert missing(render, shape, chat, "<image>") == []


@functools.cache
def seeing(name: str) -> tuple[Any, Shape]:
    render = rendering(SEEING[name][0])
    return render, with_images(render, shape_of(render), "<image>")


def test_images_in_results_are_refused_where_no_place_shows_them() -> None:
    render, _ = seeing("in any message")
    shape = with_images(render, shape_of(render), "<picture>")
    chat = inference.Chat(messages=[message("user", "x"), message("assistant", tool_calls=[call("c1")])])
    chat.messages.append(message("tool", "r", tool_call_id="c1", images=[inference.Image()]))
    with pytest.raises(InvalidInput, match="does not show images in a tool's result"):
        refuse_lost(chat, shape)


def test_what_would_be_lost_is_named() -> None:
    _, shape = asked("Gemma 2")
    chat = inference.Chat(messages=[message("user", "x")], tools=[inference.Tool(name="f")])
    with pytest.raises(InvalidInput, match="does not show tools \\(") as caught:
        refuse_lost(chat, shape)
    assert caught.value.reason == "CHAT_TEMPLATE_LOSES"
    assert caught.value.metadata["param"] == "tools"
    assert in_short(shape.lost) == ["tool calls", "tools"]
    assert in_short([*shape.lost, MESSAGES]) == [MESSAGES]
    refuse_lost(inference.Chat(messages=[message("system", "s"), message("user", "x")]), shape)
