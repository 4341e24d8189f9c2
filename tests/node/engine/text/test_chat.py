"""Chats as a model's template gets them, and the beginning of an answer that has to be a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text import ChatTemplate, Delimiters, Shape, StopStrings, encode_chat, in_turns
from sealring.node.engine.text.chat import sections_of
from sealring.node.engine.text.thinking import Thinking
from sealring.v1 import inference_pb2 as inference

CALL = ("<tool_call>", "</tool_call>")
THINK = ("<think>", "</think>")


class Template:
    """A tokenizer whose template says what it was written with, and whose tokens are characters."""

    def __init__(self, form: Delimiters, turn: str = "") -> None:
        self.format = form
        self.shape = Shape()
        self.thinking = Thinking()
        self.special: dict[str, int] = {}
        self.given: list[Any] = []
        self._turn = turn

    def encode_chat(self, *given: Any, begun: bool) -> list[int]:
        self.given = list(given[:-1])  # the last one are the images
        return [ord(char) for char in self._turn]

    def last_turn(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def encode_markers(self, text: str) -> list[int]:
        return [ord(char) for char in text]


def told(chat: inference.Chat, form: Delimiters | None = None, turn: str = "") -> tuple[list[Any], str]:
    """What the template was given, and what came of it."""
    template: Any = Template(form or Delimiters(), turn)
    ids = encode_chat(template, chat)
    return template.given, template.last_turn(ids)


def test_a_template_is_told_what_was_said_and_nothing_of_what_was_not() -> None:
    chat = inference.Chat(template_arguments='{"effort": 1}')
    chat.tools.add(name="look", description="looks", parameters='{"type": "object"}')
    chat.tools.add(name="wait")
    chat.messages.add(role="user", content="hi")
    call = inference.ToolCall(id="one", name="look", arguments='{"at": [1]}')
    chat.messages.add(role="assistant", reasoning="hm", tool_calls=[call])
    chat.messages.add(role="tool", content="7", tool_call_id="one", name="look")
    chat.messages.add(role="assistant", content="once more", reasoning="so", tool_calls=[call])
    (messages, tools, arguments), _ = told(chat)
    called = {"type": "function", "id": "one", "function": {"name": "look", "arguments": {"at": [1]}}}
    assert messages == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "thinking": "hm",
            "tool_calls": [called],
        },
        {"role": "tool", "content": "7", "tool_call_id": "one", "name": "look"},
        {"role": "assistant", "content": "once more", "reasoning_content": "so", "tool_calls": [called]},
    ], "gpt-oss's template reads `thinking`, and refuses it beside a content and a call"
    assert [tool["type"] for tool in tools] == ["function"] * 2
    assert [tool["function"] for tool in tools] == [
        {"name": "look", "description": "looks", "parameters": {"type": "object"}},
        {"name": "wait", "description": "", "parameters": {}},
    ]
    assert arguments == {"effort": 1}


@pytest.mark.parametrize("where", ["template_arguments", "arguments", "parameters"])
def test_what_is_no_object_is_refused(where: str) -> None:
    chat = inference.Chat(template_arguments="[]" if where == "template_arguments" else "")
    if where == "arguments":
        chat.messages.add(role="assistant", tool_calls=[inference.ToolCall(name="look", arguments="1")])
    if where == "parameters":
        chat.tools.add(name="look", parameters="nonsense")
    with pytest.raises(InvalidInput) as caught:
        told(chat)
    names = {"template_arguments": "chat_template_kwargs", "arguments": "messages", "parameters": "tools"}
    assert caught.value.metadata["param"] == names[where]


@pytest.mark.parametrize(
    ("thinking", "turn", "begun"),
    [
        (None, "", "<tool_call>"),
        (None, "<think>", "<tool_call>"),
        (THINK, "", "<tool_call>"),
        (THINK, "<think>", "</think>\n\n<tool_call>"),
        (THINK, "<think></think>", "<tool_call>"),
        (THINK, "<think></think><think>", "</think>\n\n<tool_call>"),
    ],
)
def test_a_call_that_is_required_begins_after_the_reasoning(
    thinking: tuple[str, str] | None, turn: str, begun: str
) -> None:
    form = Delimiters(thinking, CALL)
    assert told(inference.Chat(call_required=True), form, turn)[1] == turn + begun
    assert told(inference.Chat(), form, turn)[1] == turn


@pytest.mark.parametrize("thinking", [None, THINK])
def test_only_a_model_that_can_call_has_to(thinking: tuple[str, str] | None) -> None:
    assert told(inference.Chat(), Delimiters(thinking))[1] == ""
    with pytest.raises(InvalidInput) as caught:
        told(inference.Chat(call_required=True), Delimiters(thinking))
    assert caught.value.reason == "NO_TOOL_CALLS"


@pytest.mark.parametrize(
    ("form", "prompt", "divided"),
    [
        (Delimiters(THINK, CALL), inference.Prompt(chat=inference.Chat()), True),
        (Delimiters(THINK), inference.Prompt(chat=inference.Chat()), True),
        (Delimiters(), inference.Prompt(chat=inference.Chat()), False),
        (Delimiters(THINK, CALL), inference.Prompt(text="x"), False),
        (Delimiters(THINK, CALL), inference.Prompt(tokens=inference.TokenIds(ids=[1])), False),
    ],
)
def test_only_answers_to_chats_are_divided(form: Delimiters, prompt: inference.Prompt, divided: bool) -> None:
    template: Any = Template(form)
    assert (sections_of(template, prompt, [], StopStrings(())) is not None) is divided


@pytest.mark.parametrize("schema", ["", "{}"])
def test_an_answer_that_is_held_to_a_schema_is_no_call(schema: str) -> None:
    template: Any = Template(Delimiters(THINK, CALL, "json_tools"))
    prompt = inference.Prompt(chat=inference.Chat(tools=[inference.Tool(name="f")]), schema=schema)
    sections = sections_of(template, prompt, [], StopStrings(()))
    assert sections is not None
    answer = '{"name": "f", "arguments": {}}'
    text, parsed = sections.take(answer, inference.FINISH_REASON_STOP)
    assert (text, parsed is None) == ((answer, True) if schema else ("", False))


def image(name: str, at: int = 0) -> inference.Image:
    return inference.Image(data=name.encode(), at=at)


def shown_in(chat: inference.Chat) -> list[tuple[str, Any]]:
    """Role and content of each message that the template was given."""
    (messages, *_), _ = told(chat)
    return [(message["role"], message["content"]) for message in messages]


IMAGE = {"type": "image"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def test_a_message_with_images_is_a_list_of_parts() -> None:
    chat = inference.Chat()
    chat.messages.add(role="user", content="see  this", images=[image("a", 4), image("b", 4), image("c", 9)])
    chat.messages.add(role="assistant", content="I do")
    chat.messages.add(role="user", images=[image("d")])
    assert shown_in(chat) == [
        ("user", [text("see "), IMAGE, IMAGE, text(" this"), IMAGE]),
        ("assistant", "I do"),
        ("user", [IMAGE]),
    ]


def test_images_keep_their_places_where_messages_become_one() -> None:
    chat = inference.Chat()
    chat.messages.add(role="user", images=[image("a")])
    chat.messages.add(role="user", content="one", images=[image("b"), image("c", 2)])
    chat.messages.add(role="user", images=[image("d")])
    chat.messages.add(role="user", content="two", images=[image("e", 3)])
    (joined,) = in_turns(chat.messages)
    assert joined.content == "one\n\ntwo"
    assert [(each.data, each.at) for each in joined.images] == [
        (b"a", 0),
        (b"b", 0),
        (b"c", 2),
        (b"d", 3),
        (b"e", 8),
    ]
    assert [len(message.images) for message in chat.messages] == [1, 2, 1, 1]


def test_images_of_tools_move_to_the_user_where_the_template_knows_none_there() -> None:
    chat = inference.Chat()
    chat.messages.add(role="assistant", tool_calls=[inference.ToolCall(name="look", arguments="{}")])
    chat.messages.add(role="tool", content="it is", images=[image("a", 2)])
    chat.messages.add(role="tool", content="so", images=[image("b")])
    chat.messages.add(role="user", content="well?", images=[image("c", 5)])
    chat.messages.add(role="tool", content="x", images=[image("d")])
    chat.messages.add(role="assistant", content="yes")
    chat.messages.add(role="tool", content="y", images=[image("e")])
    moved, _, _ = Shape(behind=True).chat(chat.messages, ())
    assert [(one["role"], one["content"]) for one in moved[1:]] == [
        ("tool", "it is"),
        ("tool", "so"),
        ("user", [IMAGE, IMAGE, text("well?"), IMAGE]),
        ("tool", "x"),
        ("user", [IMAGE]),
        ("assistant", "yes"),
        ("tool", "y"),
        ("user", [IMAGE]),
    ]


STRICT = """{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('the system speaks first') }}
{%- elif message.role == 'user' and loop.index0 > 0 and messages[loop.index0 - 1].role == 'user' -%}
{{ raise_exception('users speak in turns') }}
{%- endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor -%}"""


@pytest.mark.parametrize(
    ("said", "rendered"),
    [
        ("system:a user:b system:c", "<system>a<user>b\n\nc"),
        ("user:a system:b user:c assistant:d system:e", "<user>a\n\nb\n\nc<assistant>d<user>e"),
        ("system:a system:b user:c user:d", "<system>a\n\nb<user>c\n\nd"),
        ("user:a assistant:b tool:c tool:d system:e", "<user>a<assistant>b<tool>c<tool>d<user>e"),
    ],
)
def test_a_strict_template_takes_a_system_that_speaks_again(said: str, rendered: str) -> None:
    chat = inference.Chat()
    for role, _, content in (one.partition(":") for one in said.split()):
        chat.messages.add(role=role, content=content)
    (messages, *_), _ = told(chat)
    assert ChatTemplate(STRICT, {}).render(messages) == rendered
    assert [one.role for one in chat.messages] == [one.partition(":")[0] for one in said.split()]


def test_the_template_is_not_shown_a_tool_that_a_message_defines() -> None:
    chat = inference.Chat()
    chat.tools.add(name="look")
    chat.tools.add(name="fetch", in_conversation=True)
    (_, tools, _), _ = told(chat)
    assert [tool["function"]["name"] for tool in tools] == ["look"]


@pytest.mark.parametrize(
    ("last", "form", "required"),
    [
        (inference.ChatMessage(role="user", content="x"), Delimiters(), False),
        (inference.ChatMessage(role="assistant"), Delimiters(), False),
        (
            inference.ChatMessage(role="assistant", content="x", tool_calls=[{"name": "look"}]),
            Delimiters(),
            False,
        ),
        (inference.ChatMessage(role="assistant", content="x"), Delimiters(THINK, final="<|final|>"), False),
        (inference.ChatMessage(role="assistant", content="x"), Delimiters(call=CALL), True),
    ],
)
def test_only_an_answer_of_text_is_continued(
    last: inference.ChatMessage, form: Delimiters, required: bool
) -> None:
    chat = inference.Chat(messages=[last], begun=True, call_required=required)
    with pytest.raises(InvalidInput) as caught:
        told(chat, form)
    assert caught.value.reason == "CANNOT_CONTINUE"
