"""The shape of a chat template: conversations are shown to it in which every text has a mark. The first shape
in which no mark is missing from the prompt is the model's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text.shapes import Shape, is_nested, is_untyped, parameters
from sealring.v1 import inference_pb2 as inference

Render = Callable[[Sequence[Mapping[str, Any]]], Sequence[str | None]]
"""Renders several chats; None for one that is refused."""

Change = Mapping[str, Any]

_MARK = re.compile(r"zq[a-z]+")


class Asked(NamedTuple):
    """Conversations of one kind. The changes of a shape are tried in order."""

    kind: str
    chats: Sequence[inference.Chat]
    changes: Sequence[Change] = ({},)
    needs: tuple[str, ...] = ()
    """Kinds without which it is not asked, and is lost as well."""


def shape_of(render: Render) -> Shape:
    """The shape of the template that `render` uses. Renders some hundred short chats at most."""
    shape, lost = Shape(), list[str]()
    for asked in ASKED:
        tried = (replace(shape, **change) for change in asked.changes)
        found = None
        if not set(asked.needs) & set(lost):
            found = next((one for one in tried if shows(render, one, asked.chats)), None)
        shape = found or shape
        lost += [] if found else [asked.kind]
    lost += [each.kind for each in ASKED if each.kind not in lost and not shows(render, shape, each.chats)]
    return replace(shape, lost=tuple(dict.fromkeys(lost)), asked=True)


def with_images(render: Render, shape: Shape, placeholder: str) -> Shape:
    """The shape of a template that writes `placeholder` for an image of a user: also for those of tools."""
    if CALLS in shape.lost:
        return shape
    for one in (shape, replace(shape, behind=True)):
        if shows(render, one, _SEEN, placeholder):
            return one
    return replace(shape, lost=(*shape.lost, IMAGES))


def shows(render: Render, shape: Shape, chats: Sequence[inference.Chat], placeholder: str = "") -> bool:
    """Whether each chat's prompt has all of its marks, and a placeholder for each of its images."""
    asked = []
    for chat in chats:
        messages, tools, variables = shape.chat(chat.messages, chat.tools)
        asked.append({"messages": messages, "tools": tools, "arguments": variables})
    prompts = render(asked)
    return all(
        prompt is not None
        and not _missing(chat, prompt)
        and not _dumped(shape, prompt)
        and (not placeholder or prompt.count(placeholder) == sum(len(each.images) for each in chat.messages))
        for chat, prompt in zip(chats, prompts, strict=True)
    )


def _missing(chat: inference.Chat, prompt: str) -> bool:
    return any(mark not in prompt for mark in _MARK.findall(str(chat)))


def _dumped(shape: Shape, prompt: str) -> bool:
    """Whether the template has written down a part of a content as a data structure."""
    return "part" in shape.thoughts and re.search("['\"]zqthought['\"]", prompt) is not None


def _said(role: str, content: str = "", **fields: Any) -> inference.ChatMessage:
    return inference.ChatMessage(role=role, content=content, **fields)


def _call(name: str) -> inference.ToolCall:
    arguments = f'{{"zqat{name}": "zqgiven{name}"}}'
    return inference.ToolCall(id=f"call_{name}", name=f"zqlook{name}", arguments=arguments)


def _result(name: str, **fields: Any) -> inference.ChatMessage:
    return _said("tool", f"zqresult{name}", tool_call_id=f"call_{name}", name=f"zqlook{name}", **fields)


def _chat(*messages: inference.ChatMessage, tools: Sequence[inference.Tool] = ()) -> inference.Chat:
    return inference.Chat(messages=messages, tools=tools)


def _tool(name: str, description: str, parameter: str, about: str) -> list[inference.Tool]:
    schema = {"type": "object", "properties": {parameter: {"type": "string", "description": about}}}
    return [inference.Tool(name=name, description=description, parameters=json.dumps(schema))]


_SYSTEM, _USER, _MORE = _said("system", "zqsystem"), _said("user", "zquser"), _said("user", "zqmore")
_ANSWER, _AGAIN = _said("assistant", "zqanswer"), _said("assistant", "zqagain")
_CALLS = _said("assistant", tool_calls=[_call("a")])
_BOTH = _said("assistant", tool_calls=[_call("a"), _call("b")])
_NEXT = _said("assistant", tool_calls=[_call("b")])
_SAYS = _said("assistant", "zqsays", tool_calls=[_call("a")])
_THINKS = _said("assistant", reasoning="zqthought", tool_calls=[_call("a")])
_DONE = (_result("a"), _ANSWER, _MORE)
_ANY, _TOOL = _tool("any", "any", "x", "any"), _tool("zqtool", "zqlooks", "zqplace", "any")
_DETAILED = _tool("zqtool", "zqlooks", "zqplace", "zqabout")
_BARE = [inference.Tool(name="zqnow", description="zqclock")]
_OPEN = [inference.Tool(name="zqall", description="zqfree", parameters='{"type": "object"}')]
_BROAD = [inference.Tool(name="zqany", description="zqbroad", parameters='{"properties": {"zqplace": {}}}')]


def _shown(*parts: Mapping[str, Any]) -> inference.Chat:
    """A tool whose parameters have these schemas."""
    schema = {"type": "object", "properties": {f"p{at}": part for at, part in enumerate(parts)}}
    return _chat(_USER, tools=[inference.Tool(name="any", description="any", parameters=json.dumps(schema))])


_FIELDS: Mapping[str, Any] = {"type": "object", "properties": {"zqinner": {"type": "string"}}}
_NESTED: Sequence[Mapping[str, Any]] = (
    {"type": "integer"},
    _FIELDS,
    {"type": "array", "items": _FIELDS},
    {"type": "string", "enum": ["zqone", "zqtwo"]},
)
_UNTYPED: Sequence[Mapping[str, Any]] = (
    {"anyOf": [_FIELDS, {"type": "null"}]},
    {"properties": {"zqplace": {}}},
    {"const": "zqvalue"},
)
_SEES = _result("a", images=[inference.Image()])
_SEEN = [
    _chat(_USER, _CALLS, _SEES, tools=_ANY),
    _chat(_USER, _CALLS, _SEES, _ANSWER, _MORE, tools=_ANY),
    _chat(_USER, _BOTH, _SEES, _result("b", images=[inference.Image()]), tools=_ANY),
]


def _combined(*changes: Change) -> list[Change]:
    """No change, each by itself, each two, and so on."""
    return [
        {name: value for change in chosen for name, value in change.items()}
        for count in range(len(changes) + 1)
        for chosen in combinations(changes, count)
    ]


_NULL, _TEXTS, _SHORT, _TOLD = {"null": True}, {"texts": True}, {"short_ids": True}, {"told": True}
_FILLED, _BRIDGED, _JOINED, _IN_USER = (
    {"filled": True},
    {"bridged": True},
    {"joined": True},
    {"in_user": True},
)
_APART, _OPENED, _ONLY = {"beside": "apart"}, {"opened": True}, {"written": "only"}
_THOUGHTS = [
    {"thoughts": names} for names in (("reasoning_content",), ("thinking",), ("reasoning",), ("part",))
]

CALLS, TOOLS, SYSTEM, THOUGHTS = "tool calls", "tools", "a system message", "thoughts"
SEVERAL, BESIDE = "several tool calls at once", "text beside a tool call"
BARE, INNER = "a tool without type or properties", "parts of a tool's parameters"
SYSTEM_CALLS, NO_TOOLS = "a system message beside tool calls", "tool calls without tools"
WORDS, ROW = "words of a user behind a tool call or its result", "answers in a row"
BEFORE, FIRST = "an answer before a tool call", "an answer first"
FIRST_TOOLS, NOBODY = "an answer or a tool call first, where tools are", "no words of a user"
LAST = "a tool call as the last message"
DETAILS, IMAGES = "descriptions of a tool's parameters", "images in a tool's result"
MESSAGES = "earlier messages"

ASKED = (
    Asked(MESSAGES, [_chat(_USER), _chat(_USER, _ANSWER, _MORE)]),
    Asked(SYSTEM, [_chat(_SYSTEM, _USER), _chat(_SYSTEM, _USER, _ANSWER, _MORE)], [{}, _IN_USER]),
    Asked(
        CALLS,
        [
            _chat(_USER, _CALLS, _result("a"), tools=_ANY),
            _chat(_USER, _CALLS, *_DONE, tools=_ANY),
            _chat(_USER, _CALLS, _result("a"), _NEXT, _result("b"), tools=_ANY),
        ],
        [*_combined(_NULL, _TEXTS, _SHORT), _TOLD, {**_TOLD, **_SHORT}],
    ),
    Asked(
        SEVERAL,
        [_chat(_USER, _BOTH, _result("a"), _result("b"), tools=_ANY)],
        [{}, {"singly": True}, _TOLD],
        (CALLS,),
    ),
    Asked(
        BESIDE,
        [_chat(_USER, _SAYS, _result("a"), tools=_ANY), _chat(_USER, _SAYS, *_DONE, tools=_ANY)],
        [{}, {"beside": "tool_plan"}, _APART, {**_APART, **_BRIDGED}, _TOLD],
        (CALLS,),
    ),
    Asked(
        NO_TOOLS,
        [_chat(_USER, _CALLS, *_DONE), _chat(_USER, _CALLS, _result("a"))],
        [{}, {"told_without": True}],
        (CALLS,),
    ),
    Asked(
        SYSTEM_CALLS,
        [_chat(_SYSTEM, _USER, _CALLS, _result("a"), tools=_ANY)],
        [{}, _IN_USER],
        (SYSTEM, CALLS),
    ),
    Asked(
        TOOLS,
        [
            _chat(_USER, tools=_TOOL),
            _chat(_SYSTEM, _USER, tools=_TOOL),
            _chat(_SYSTEM, _USER, _CALLS, _result("a"), tools=_TOOL),
            _chat(_SYSTEM, _USER, _CALLS, *_DONE, tools=_TOOL),
        ],
        [{}, _FILLED, {"tools": "xml_tools"}, {"tools": "system"}],
        (SYSTEM_CALLS,),
    ),
    Asked(DETAILS, [_chat(_USER, tools=_DETAILED)], needs=(TOOLS,)),
    Asked(
        BARE,
        [_chat(_USER, tools=tools) for tools in (_BARE, _OPEN, _BROAD)],
        [{}, _FILLED, _ONLY],
        (TOOLS,),
    ),
    Asked(
        INNER,
        [_shown(*_NESTED), _shown(*_UNTYPED)],
        [{}, {"written": "untyped"}, {"written": "nested"}, _ONLY],
        (TOOLS,),
    ),
    Asked(
        WORDS,
        [_chat(_USER, _CALLS, _result("a"), _MORE, tools=_ANY), _chat(_USER, _CALLS, _MORE, tools=_ANY)],
        [{}, _BRIDGED],
        (CALLS,),
    ),
    Asked(ROW, [_chat(_USER, _ANSWER, _AGAIN, _MORE)], [{}, _JOINED, _BRIDGED]),
    Asked(
        BEFORE, [_chat(_USER, _ANSWER, _CALLS, _result("a"), tools=_ANY)], [{}, _JOINED, _BRIDGED], (CALLS,)
    ),
    Asked(FIRST, [_chat(_ANSWER, _USER)], [{}, _OPENED]),
    Asked(
        FIRST_TOOLS,
        [_chat(_ANSWER, _USER, tools=_TOOL), _chat(_CALLS, _result("a"), tools=_TOOL)],
        [{}, _OPENED],
        (TOOLS,),
    ),
    Asked(NOBODY, [_chat(_SYSTEM), _chat(_SYSTEM, _ANSWER)], [{}, {"spoken": True}], (SYSTEM,)),
    Asked(LAST, [_chat(_USER, _CALLS, tools=_ANY)], needs=(CALLS,)),
    Asked(THOUGHTS, [_chat(_USER, _THINKS, _result("a"), tools=_ANY)], [{}, *_THOUGHTS], (CALLS,)),
)
"""What a template is asked, the simple before what consists of it."""


def kinds_of(chat: inference.Chat) -> set[str]:
    """The kinds of what a chat has, but for thoughts and details: templates leave those out by design."""
    said = [message for message in chat.messages if message.role != "system"]
    pairs = list(pairwise(said))
    calls = any(message.tool_calls or message.role == "tool" for message in said)
    answers = [(first, then) for first, then in pairs if first.role == then.role == "assistant"]
    system = len(said) < len(chat.messages)
    first = bool(said) and said[0].role == "assistant"
    found = {
        MESSAGES: len(said) > 1,
        SYSTEM: system,
        CALLS: calls,
        SEVERAL: any(len(message.tool_calls) > 1 for message in said),
        BESIDE: any(message.tool_calls and message.content for message in said),
        NO_TOOLS: calls and not chat.tools,
        SYSTEM_CALLS: system and calls,
        TOOLS: bool(chat.tools),
        BARE: any(not {"type", "properties"} <= parameters(tool).keys() for tool in chat.tools),
        INNER: any(is_untyped(parameters(tool)) or is_nested(parameters(tool)) for tool in chat.tools),
        WORDS: any(then.role == "user" and (one.role == "tool" or one.tool_calls) for one, then in pairs),
        ROW: any(not then.tool_calls for _, then in answers),
        BEFORE: any(then.tool_calls for _, then in answers),
        FIRST: first and not chat.tools,
        FIRST_TOOLS: first and bool(chat.tools),
        LAST: bool(said) and bool(said[-1].tool_calls),
        IMAGES: any(message.images for message in said if message.role == "tool"),
        NOBODY: system and all(message.role != "user" for message in said),
    }
    return {kind for kind, here in found.items() if here}


def in_short(lost: Iterable[str]) -> list[str]:
    """The kinds that are lost, without those that consist of another."""
    found = list(lost)
    if MESSAGES in found:
        return [MESSAGES]
    needs = {asked.kind: asked.needs for asked in ASKED}
    return [kind for kind in found if kind == TOOLS or not set(needs.get(kind, ())) & set(found)]


def refuse_lost(chat: inference.Chat, shape: Shape) -> None:
    """Raises InvalidInput (CHAT_TEMPLATE_LOSES) for a chat of which the model would not see a part."""
    kinds = kinds_of(chat) if shape.lost else ()
    if gone := in_short(kind for kind in shape.lost if kind in kinds):
        raise InvalidInput(
            f"the model's chat template does not show {' and '.join(gone)}",
            reason="CHAT_TEMPLATE_LOSES",
            hint="leave it out, or serve a model whose template shows it",
            param="tools" if gone[0] in (TOOLS, BARE, INNER) else "messages",
        )
