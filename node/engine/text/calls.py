"""A model's tool calls as the request's tools have them: their names, and arguments by their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.tools import check_tool_name, parse_json_object
from sealring.node.engine.text.notations.reading import Alone, Reader
from sealring.node.engine.text.notations.values import Written, json_of, named
from sealring.v1 import inference_pb2 as inference

Schemas = Mapping[str, Mapping[str, Any]]
"""The schemas of the tools' arguments, by the tools' names."""


def read_calls(reader: Reader | Alone, text: str, schemas: Schemas) -> list[inference.ToolCall] | None:
    """The calls in what a model has written between its markers; None where it cannot be read."""
    found = reader.read(text)
    return None if found is None else calls_of(found, schemas)


def calls_of(found: Sequence[Written], schemas: Schemas) -> list[inference.ToolCall] | None:
    """The calls with their arguments as the schemas want them; None where one of them cannot be a call."""
    try:
        return [_call(one, schemas) for one in found]
    except (InvalidInput, ValueError, RecursionError):
        return None


def _call(found: Written, schemas: Schemas) -> inference.ToolCall:
    name = named(found.name.strip(), list(schemas))
    check_tool_name(name, "name")
    arguments: Any = found.arguments
    if arguments is None:
        if name not in schemas:
            raise ValueError
        arguments = "{}"
    if not isinstance(arguments, str):
        schema = schemas.get(name, {})
        arguments = json_of(arguments, schema, schema)
    json.dumps(parse_json_object(arguments, "arguments"), ensure_ascii=False).encode()
    return inference.ToolCall(id=found.id, name=name, arguments=arguments or "{}")
