"""The messages and tools of a chat in the shape that a model's template reads: as OpenAI's, but for what a
template would leave out or refuse (node.engine.text.marked finds it)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sealring.mesh.prompt.tools import parse_json_object
from sealring.v1 import inference_pb2 as inference

Messages = list[inference.ChatMessage]

_SEAM = "\n\n"
"""Between the contents of messages that become one."""

_ANSWER, _WORDS = "OK.", "Go on."
"""What is put where a template wants the assistant or the user to speak."""


_UNTRANSLATED = frozenset(("$ref", "allOf", "anyOf", "const", "oneOf", "patternProperties", "prefixItems"))


@dataclass(frozen=True)
class Shape:
    """What is done for one template; nothing for most."""

    null: bool = False
    """An empty content beside calls is null."""
    texts: bool = False
    """Arguments are JSON texts."""
    short_ids: bool = False
    """Names of calls have nine letters and digits."""
    singly: bool = False
    """One call a message, with its result behind it."""
    told: bool = False
    """A call stands in its result, and is none of the assistant's."""
    told_without: bool = False
    """As `told`, where a chat has no tools."""
    beside: str = "content"
    """The field for the text beside a call; `apart` for a message of its own."""
    thoughts: tuple[str, ...] = ("reasoning_content", "thinking")
    """The fields for thoughts; `part` for a part of the content."""
    filled: bool = False
    """Schemas of tools have `type` and `properties`."""
    written: str = ""
    """Which schemas of tools also stand in the tools' descriptions: those that are `untyped` somewhere, also
    `nested` ones, or all, which stand there `only`."""
    tools: str = "tools"
    """The variable with the tools; `system` for a text in the system message."""
    bridged: bool = False
    """A short answer stands between a call or its result and the user's words."""
    joined: bool = False
    """Answers in a row are one."""
    opened: bool = False
    """The user speaks first."""
    spoken: bool = False
    """The user speaks at least once."""
    behind: bool = False
    """Images of tools stand in the user's words behind them."""
    in_user: bool = False
    """The system message stands in the user's first one."""
    lost: tuple[str, ...] = ()
    """What no shape shows to the model (node.engine.text.marked)."""
    asked: bool = False
    """Whether a template was asked."""

    @property
    def changes(self) -> list[str]:
        """The names and values of the fields that are not as for most templates, but for what is lost."""
        names = [each.name for each in fields(self) if each.name not in ("lost", "asked")]
        told = {name: getattr(self, name) for name in names}
        return [
            name if value is True else f"{name}={value if isinstance(value, str) else '+'.join(value)}"
            for name, value in told.items()
            if value != getattr(Shape, name)
        ]

    def chat(
        self, messages: Iterable[inference.ChatMessage], tools: Sequence[inference.Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        """Messages, tools and variables for the template. Raises InvalidInput (BAD_JSON_FIELD)."""
        arranged = in_turns(messages)
        described = [{"type": "function", "function": self._function(tool)} for tool in tools]
        if self.tools == "system" and described:
            text = "## Tools\nYou have access to the following tools:\n" + "".join(map(_description, tools))
            arranged = in_turns([inference.ChatMessage(role="system", content=text), *arranged])
        if self.told_without and not tools:
            arranged = _told(arranged)
        for name, change in _ARRANGE.items():
            if getattr(self, name) is True or (name == "beside" and self.beside == "apart"):
                arranged = change(arranged)
        variables = {} if self.tools in ("tools", "system") or not described else {self.tools: described}
        shown = described if self.tools == "tools" else []
        return [self._message(message) for message in arranged], shown, variables

    def _message(self, message: inference.ChatMessage) -> dict[str, Any]:
        """As templates know messages, which are those of OpenAI but for the arguments: they are an object."""
        content = _content(message)
        told: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning:
            for name in self.thoughts:
                if name == "part":
                    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
                    thought = {"type": "thinking", "thinking": message.reasoning}
                    told["content"] = [thought, *(part for part in parts if part.get("text") != "")]
                elif name != "thinking" or not (message.content and message.tool_calls):
                    told[name] = message.reasoning  # gpt-oss's template refuses both beside a call
        if message.tool_calls:
            if self.beside not in ("content", "apart") and message.content:
                told[self.beside], told["content"] = message.content, ""
            if self.null and not told["content"]:
                told["content"] = None
            told["tool_calls"] = [
                {"type": "function", "id": call.id, "function": self._call(call)}
                for call in message.tool_calls
            ]
        for name in ("tool_call_id", "name"):
            if value := getattr(message, name):
                told[name] = value
        return told

    def _call(self, call: inference.ToolCall) -> dict[str, Any]:
        arguments = parse_json_object(call.arguments, "messages")
        text = json.dumps(arguments, ensure_ascii=False)
        return {"name": call.name, "arguments": text if self.texts else arguments}

    def _function(self, tool: inference.Tool) -> dict[str, Any]:
        schema, about = parameters(tool), tool.description
        if self._writes(schema):
            about = f"{about}\n\nParameters: {json.dumps(schema, ensure_ascii=False)}".lstrip()
        if self.written == "only":
            schema = {}
        if self.filled:
            schema = {"type": "object", "properties": {}, **schema}
        return {"name": tool.name, "description": about, "parameters": schema}

    def _writes(self, schema: dict[str, Any]) -> bool:
        if self.written == "only":
            return bool(schema)
        return bool(self.written) and (is_untyped(schema) or (self.written == "nested" and is_nested(schema)))


def parameters(tool: inference.Tool) -> dict[str, Any]:
    """The schema of a tool's arguments; empty where it takes none."""
    return parse_json_object(tool.parameters, "tools")


def is_untyped(schema: Any) -> bool:
    """Whether a part of a schema is more than its type says: templates that translate schemas lose it."""
    if not isinstance(schema, dict) or not _UNTRANSLATED.isdisjoint(schema):
        return True
    return (bool(schema) and not isinstance(schema.get("type"), str)) or any(map(is_untyped, _parts(schema)))


def is_nested(schema: Any) -> bool:
    return any(part.get("type") in ("object", "array") or "enum" in part for part in _parts(schema))


def _parts(schema: dict[str, Any]) -> list[Any]:
    properties = schema.get("properties", {})
    items = [schema["items"]] if "items" in schema else []
    return [*(properties.values() if isinstance(properties, dict) else [properties]), *items]


def in_turns(messages: Iterable[inference.ChatMessage]) -> Messages:
    """The messages as every template takes them: one system message, which is the first, and never two of a
    user in a row.

    What the system says later becomes the user's, at the same place. Many templates refuse anything else, and
    some leave it out without a word.
    """
    found: list[tuple[str, Messages]] = []
    for message in messages:
        later = message.role == "system" and found and (len(found) > 1 or found[0][0] != "system")
        role = "user" if later else message.role
        if found and found[-1][0] == role and role in ("system", "user"):
            found[-1][1].append(message)
        else:
            found.append((role, [message]))
    return [_joined(parts, role) for role, parts in found]


def _joined(parts: Messages, role: str) -> inference.ChatMessage:
    """One message of several: joined once, for a text that grew with each would cost their square."""
    said = _copy(parts[0], role=role)
    if len(parts) == 1:
        return said
    said.content = _SEAM.join(part.content for part in parts if part.content)
    said.reasoning = _SEAM.join(part.reasoning for part in parts if part.reasoning)
    for part in parts[1:]:
        said.tool_calls.extend(part.tool_calls)
    del said.images[:]
    end = 0  # of the contents before
    for part in parts:
        begin = end + len(_SEAM) if end and part.content else end
        for image in part.images:
            moved = said.images.add()
            moved.CopyFrom(image)
            moved.at = begin + image.at
        end = begin + len(part.content)
    return said


def _copy(message: inference.ChatMessage, **changed: Any) -> inference.ChatMessage:
    said = inference.ChatMessage()
    said.CopyFrom(message)
    for name, value in changed.items():
        if isinstance(value, str):
            setattr(said, name, value)
        else:
            del getattr(said, name)[:]
            getattr(said, name).extend(value)
    return said


def _behind_tools(messages: Messages) -> Messages:
    """The messages with the images of tools at the beginning of the user's message that follows, or in one of
    their own: many templates know images in messages of the user only."""
    found: Messages = []
    waiting: list[inference.Image] = []

    def show(message: inference.ChatMessage) -> inference.ChatMessage:
        images = [inference.Image(data=each.data, low_detail=each.low_detail) for each in waiting]
        waiting.clear()
        return _copy(message, images=[*images, *message.images])

    for message in messages:
        if message.role == "tool":
            waiting.extend(message.images)
            found.append(_copy(message, images=[]))
            continue
        if waiting and message.role != "user":
            found.append(show(inference.ChatMessage(role="user")))
        found.append(show(message) if waiting else message)
    return [*found, show(inference.ChatMessage(role="user"))] if waiting else found


def _with_short_ids(messages: Messages) -> Messages:
    """Numbers the calls, so that a name stays while a conversation grows."""
    ids: dict[str, str] = {}

    def short(name: str) -> str:
        return ids.setdefault(name, f"call{len(ids) + 1:05}")

    return [
        _copy(
            message,
            tool_call_id=short(message.tool_call_id) if message.role == "tool" else "",
            tool_calls=[
                inference.ToolCall(id=short(call.id), name=call.name, arguments=call.arguments)
                for call in message.tool_calls
            ],
        )
        for message in messages
    ]


def _rounds(messages: Messages) -> list[tuple[inference.ChatMessage, Messages]]:
    """Each message but results, with the results that follow it."""
    found: list[tuple[inference.ChatMessage, Messages]] = []
    for message in messages:
        if message.role == "tool" and found and found[-1][0].tool_calls:
            found[-1][1].append(message)
        else:
            found.append((message, []))
    return found


def _matched(
    message: inference.ChatMessage, results: Messages
) -> list[tuple[inference.ToolCall, inference.ChatMessage | None]]:
    """Each call of the message with its result, by name or else in order."""
    rest = list(results)
    found: list[tuple[inference.ToolCall, inference.ChatMessage | None]] = []
    for call in message.tool_calls:
        named = next((each for each in rest if call.id and each.tool_call_id == call.id), None)
        result = named or next((each for each in rest if not each.tool_call_id), None)
        if result is not None:
            rest.remove(result)
        found.append((call, result))
    return found


def _singly(messages: Messages) -> Messages:
    found: Messages = []
    for message, results in _rounds(messages):
        if len(message.tool_calls) < 2:
            found += [message, *results]
            continue
        pairs = _matched(message, results)
        for number, (call, result) in enumerate(pairs):
            first = {} if number == 0 else {"content": "", "reasoning": ""}
            found.append(_copy(message, tool_calls=[call], **first))
            found += [result] if result is not None else []
        found += [each for each in results if not any(each is result for _, result in pairs)]
    return found


def _told(messages: Messages) -> Messages:
    found: Messages = []
    for message, results in _rounds(messages):
        if not message.tool_calls:
            found += [message, *results]
            continue
        if message.content:
            found.append(_copy(message, tool_calls=[]))
        pairs = _matched(message, results)
        for call, result in pairs:
            said = result or inference.ChatMessage(role="tool", tool_call_id=call.id, name=call.name)
            called = f"{call.name}({call.arguments}):\n"
            images = [
                inference.Image(data=each.data, low_detail=each.low_detail, at=each.at + len(called))
                for each in said.images
            ]
            found.append(_copy(said, content=called + said.content, images=images))
        found += [each for each in results if not any(each is result for _, result in pairs)]
    return found


def _apart(messages: Messages) -> Messages:
    found: Messages = []
    for message in messages:
        if message.tool_calls and message.content:
            found.append(_copy(message, tool_calls=[], reasoning=""))
            message = _copy(message, content="")
        found.append(message)
    return found


def _join_answers(messages: Messages) -> Messages:
    runs: list[Messages] = []
    for message in messages:
        if runs and message.role == "assistant" == runs[-1][-1].role:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_joined(run, run[0].role) for run in runs]


def _open(messages: Messages) -> Messages:
    first = next((place for place, one in enumerate(messages) if one.role != "system"), len(messages))
    if first < len(messages) and messages[first].role == "user":
        return messages
    return [*messages[:first], inference.ChatMessage(role="user", content=_WORDS), *messages[first:]]


def _speak(messages: Messages) -> Messages:
    return messages if any(message.role == "user" for message in messages) else _open(messages)


def _bridge(messages: Messages) -> Messages:
    """Also words of a user between two answers, the second of which calls."""
    found: Messages = []
    for message in messages:
        last = found[-1] if found else inference.ChatMessage()
        if message.role == "user" and (last.role == "tool" or last.tool_calls):
            found.append(inference.ChatMessage(role="assistant", content=_ANSWER))
        elif message.role == "assistant" == last.role and not last.tool_calls:
            found.append(inference.ChatMessage(role="user", content=_WORDS))
        found.append(message)
    return found


def _system_in_user(messages: Messages) -> Messages:
    if not messages or messages[0].role != "system":
        return messages
    if len(messages) > 1 and messages[1].role == "user":
        return [_joined(messages[:2], "user"), *messages[2:]]
    return [_copy(messages[0], role="user"), *messages[1:]]


_ARRANGE: Mapping[str, Callable[[Messages], Messages]] = {
    "behind": _behind_tools,
    "told": _told,
    "singly": _singly,
    "beside": _apart,
    "joined": _join_answers,
    "opened": _open,
    "spoken": _speak,
    "bridged": _bridge,
    "in_user": _system_in_user,
    "short_ids": _with_short_ids,
}
"""What is done to the messages for each field of a shape, in this order."""


def _description(tool: inference.Tool) -> str:
    return (
        f"\n### {tool.name}\nDescription: {tool.description}\n\n"
        f"Parameters: {json.dumps(parameters(tool), ensure_ascii=False)}\n"
    )


def _content(message: inference.ChatMessage) -> str | list[dict[str, str]]:
    """The text, or where there are images a list of parts."""
    if not message.images:
        return message.content
    parts: list[dict[str, str]] = []
    begin = 0
    for image in message.images:
        if text := message.content[begin : image.at]:
            parts.append({"type": "text", "text": text})
        parts.append({"type": "image"})
        begin = image.at
    rest = message.content[begin:]
    return [*parts, {"type": "text", "text": rest}] if rest else parts
