"""What of a request's schema a grammar holds: closed objects, and nothing that says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.node.engine.text.schemas import closed

N: dict[str, Any] = {"properties": {"n": {"type": "integer"}}}
CLOSED = N | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (N, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        (N | {"additionalProperties": True}, N | {"additionalProperties": True}),
        (N | {"patternProperties": {"x": N}}, N | {"patternProperties": {"x": CLOSED}}),
        (N | {"required": ["n"]}, CLOSED | {"required": ["n"]}),
        (N | {"required": ["m"]}, N | {"required": ["m"]}),
        (N | {"minProperties": 2}, N | {"minProperties": 2}),
        ({"items": N, "$defs": {"a": N}}, {"items": CLOSED, "$defs": {"a": CLOSED}}),
        ({"anyOf": [N, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [N, {"properties": {"m": {}}}]}, {"allOf": [N, {"properties": {"m": {}}}]}),
        (
            {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": N}},
            {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": N}},
        ),
        (N | {"anyOf": [N]}, N | {"anyOf": [N]}),
        (
            {"properties": {"properties": N}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
        ({"propertyNames": {"type": "string"}}, {}),
        ({"propertyNames": {"pattern": "a"}}, {"propertyNames": {"pattern": "a"}}),
        ({"format": "int32"}, {}),
        ({"format": "date"}, {"format": "date"}),
        ({"const": N, "enum": [{"format": "int32"}]}, {"const": N, "enum": [{"format": "int32"}]}),
        (True, True),
    ],
)
def test_objects_are_closed_and_what_says_nothing_is_left_out(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


def test_the_arguments_of_a_tool_are_closed_though_they_name_nothing() -> None:
    assert closed({}, tool=True) == {"additionalProperties": False}
    assert closed({"additionalProperties": {}}, tool=True) == {"additionalProperties": {}}
    assert closed({"required": ["a"]}, tool=True) == {"required": ["a"]}
