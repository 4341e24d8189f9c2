"""Bounds of tools, of calls of them, and of the JSON in both."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.v1 import inference_pb2 as inference

THINKING = "thinking"
EMBEDDING, RERANK = "embedding", "rerank"
"""Capabilities of models that make vectors and generate nothing."""

CAPABILITIES = ("tools", THINKING, "vision", EMBEDDING, RERANK)
"""Optional abilities of models, by Ollama's names."""

MAX_TOOLS = 128
MAX_CALLS = 128
"""Tool calls in one message."""

MAX_JSON_BYTES = 1 << 20
MAX_SCHEMA_BYTES = 64 << 10
"""Size of a schema for an answer or for the arguments of a strict tool."""

MAX_SCHEMA_MEMBERS = 512
"""Members of one object in a schema or an HTTP body; the cost grows with the square of their number."""

MAX_MULTIPLE = 10_000
"""Largest `multipleOf`, in units of its last decimal: an automaton has a state for each remainder."""

MAX_JSON_DEPTH = 32

_OWN = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of a template that no request may set, like those of special tokens."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")


def capabilities_of(reported: Iterable[str]) -> list[str]:
    """The known capabilities out of those that a head or a gateway reports of a model, in a fixed order."""
    found = set(reported)
    return [one for one in CAPABILITIES if one in found]


def finite(digits: str) -> float:
    """A number that JSON can say again. Raises ValueError for NaN and infinities, which 1e999 is as well."""
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(digits)
    return number


def parse_json_object(text: str, param: str) -> dict[str, Any]:
    """The object in a JSON text; an empty text is an empty one. Raises InvalidInput (BAD_JSON_FIELD)."""
    value: Any = {}
    if len(text) > MAX_JSON_BYTES:
        raise _bad_json(param, f"it is longer than {MAX_JSON_BYTES} characters")
    try:
        value = json.loads(text, parse_float=finite, parse_constant=finite) if text else {}
    except (ValueError, RecursionError):
        raise _bad_json(param, "it is not valid JSON") from None
    if not isinstance(value, dict):
        raise _bad_json(param, "it is not a JSON object")
    if too_deep(value):
        raise _bad_json(param, f"it is nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def check_schema(text: str, param: str) -> None:
    """Bounds a schema before it is compiled. Its cost within these bounds is measured by a trial
    (node.engine.trial).

    Raises InvalidInput: BAD_JSON_FIELD, SCHEMA_TOO_LONG, SCHEMA_TOO_COSTLY.
    """
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise InvalidInput(
            f"{param} has a schema of more than {MAX_SCHEMA_BYTES} bytes",
            hint="send a smaller one",
            reason="SCHEMA_TOO_LONG",
            param=param,
            limit=MAX_SCHEMA_BYTES,
        )
    _check_objects(parse_json_object(text, param), param)


def _check_objects(value: Any, param: str) -> None:
    """Recurses no deeper than `parse_json_object` lets JSON be nested."""
    if isinstance(value, dict):
        if len(value) > MAX_SCHEMA_MEMBERS:
            raise _too_costly(param, f"an object of more than {MAX_SCHEMA_MEMBERS} members")
        if _units(value.get("multipleOf")) > MAX_MULTIPLE:
            raise _too_costly(param, f"a multipleOf of more than {MAX_MULTIPLE} units of its last decimal")
    for one in _inside(value):
        _check_objects(one, param)


def _units(number: Any) -> int:
    """A number without its exponent: 12 of 1200 and of 0.012."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 0
    mantissa = repr(number).lower().partition("e")[0]
    digits = mantissa.replace(".", "").lstrip("-0").rstrip("0")
    if not digits.isdecimal():  # 0, infinity and NaN
        return 0
    return int(digits[: len(str(MAX_MULTIPLE)) + 1])


def _too_costly(param: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"{param} has a schema with {why}",
        hint="check this in your own program, and leave it out of the schema",
        reason="SCHEMA_TOO_COSTLY",
        param=param,
    )


def too_deep(value: Any, levels: int = MAX_JSON_DEPTH) -> bool:
    """Whether JSON is nested deeper than `levels`. Goes level by level: a call for each value of a long array
    would take long."""
    level = [value]
    for _ in range(levels):
        level = [one for outer in level for one in _inside(outer) if isinstance(one, dict | list)]
    return any(map(_inside, level))


def _inside(value: Any) -> Collection[Any]:
    """The values in an object or array; nothing in any other value."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def check_tool_name(name: str, param: str) -> None:
    """Raises InvalidInput (BAD_TOOL_NAME)."""
    if _NAME.match(name) is None:
        raise InvalidInput(
            "the name of a tool is malformed",
            hint="use 1 to 128 of A-Z, a-z, 0-9, _, . and -",
            reason="BAD_TOOL_NAME",
            param=param,
        )


def tools_size(chat: inference.Chat) -> int:
    """The length in bytes of a chat's tools and of the variables of its template, before any is read."""
    return sum(tool.ByteSize() for tool in chat.tools) + len(chat.template_arguments)


def check_tools(chat: inference.Chat) -> None:
    """Checks the tools of a chat and the variables of its template.

    Raises InvalidInput: TOO_MANY_TOOLS, BAD_TOOL_NAME, BAD_JSON_FIELD, and those of `check_schema`.
    """
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidInput(
            f"there are more than {MAX_TOOLS} tools", reason="TOO_MANY_TOOLS", param="tools", limit=MAX_TOOLS
        )
    for index, tool in enumerate(chat.tools):
        check_tool_name(tool.name, f"tools[{index}].name")
        param = f"tools[{index}].parameters"
        if tool.strict:
            check_schema(tool.parameters, param)
        else:
            parse_json_object(tool.parameters, param)
    if chat.call_required and not chat.tools:
        raise InvalidInput("a tool must be called and there is none", reason="NO_TOOLS", param="tools")
    for name in parse_json_object(chat.template_arguments, "chat_template_kwargs"):
        if name in _OWN or name.endswith("_token") or not name.isidentifier():
            raise _bad_json("chat_template_kwargs", "it sets a variable that is the server's own")


def check_calls(message: inference.ChatMessage, param: str) -> int:
    """Checks the tool calls of a message; returns their length in bytes.

    Raises InvalidInput: BAD_TOOL_CALL, BAD_TOOL_NAME, BAD_JSON_FIELD.
    """
    if (message.tool_calls and message.role != "assistant") or len(message.tool_calls) > MAX_CALLS:
        raise InvalidInput(
            f"an assistant may call tools, at most {MAX_CALLS} in a message, and nobody else",
            reason="BAD_TOOL_CALL",
            param=f"{param}.tool_calls",
        )
    for index, call in enumerate(message.tool_calls):
        check_tool_name(call.name, f"{param}.tool_calls[{index}].name")
        parse_json_object(call.arguments, f"{param}.tool_calls[{index}].arguments")
    return sum(call.ByteSize() for call in message.tool_calls)


def _bad_json(param: str, why: str) -> InvalidInput:
    return InvalidInput(f"{param} is refused: {why}", reason="BAD_JSON_FIELD", param=param)
