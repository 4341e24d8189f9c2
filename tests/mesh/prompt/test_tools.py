"""Bounds of tools, calls and the JSON in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from refusals import refused

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.tools import MAX_JSON_DEPTH, check_schema, parse_json_object
from sealring.mesh.prompt.validate import validate_prompt
from sealring.v1 import inference_pb2 as inference

SCHEMA = '{"type": "' + "x" * ((64 << 10) - 12) + '"}'
"""As long as one may be."""


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def schema(content: dict[str, Any]) -> str:
    return json.dumps(content)


def members(count: int) -> dict[str, Any]:
    return {f"p{number}": {} for number in range(count)}


def prompt(**fields: object) -> inference.Prompt:
    made = inference.Chat(messages=[inference.ChatMessage(role="user", content="x")], **fields)  # type: ignore[arg-type]
    return inference.Prompt(chat=made)


def test_json_is_an_object_of_bounded_depth() -> None:
    assert parse_json_object("", "x") == {}
    assert parse_json_object(nested(MAX_JSON_DEPTH), "x")
    assert parse_json_object(nested(MAX_JSON_DEPTH - 1).replace("1", "[0, []]"), "x")
    with refused("BAD_JSON_FIELD", InvalidInput):
        parse_json_object(nested(MAX_JSON_DEPTH - 1).replace("1", "[0, [0]]"), "x")
    assert parse_json_object("{}".rjust(1 << 20), "x") == {}
    for text in ("[]", "{", nested(MAX_JSON_DEPTH + 1), nested(100_000), "{}".rjust((1 << 20) + 1)):
        with pytest.raises(InvalidInput) as caught:
            parse_json_object(text, "x")
        assert (caught.value.reason, caught.value.metadata["param"]) == ("BAD_JSON_FIELD", "x")


def test_numbers_that_json_cannot_say_again_are_refused() -> None:
    assert parse_json_object('{"a": 1e308}', "x") == {"a": 1e308}
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e309"):
        with refused("BAD_JSON_FIELD", InvalidInput):
            parse_json_object(f'{{"a": [{number}]}}', "x")


def test_the_length_of_tools_is_looked_at_before_they_are_read() -> None:
    """A hundred times 1 MiB of what is no JSON: the first thing that is said is that they are too long."""
    tool = inference.Tool(name="a", parameters="[" * (1 << 20))
    with refused("CONTENT_TOO_LONG", InvalidInput):
        validate_prompt(prompt(tools=[tool] * 5))


def test_tools_are_checked() -> None:
    tool = inference.Tool(name="a", parameters="{}")
    validate_prompt(prompt(tools=[tool] * 128, call_required=True))
    for fields, reason in (
        ({"tools": [tool] * 129}, "TOO_MANY_TOOLS"),
        ({"tools": [inference.Tool(name="a b")]}, "BAD_TOOL_NAME"),
        ({"tools": [inference.Tool(name="a", parameters="[]")]}, "BAD_JSON_FIELD"),
        ({"tools": [inference.Tool(name="a", description="x" * (4 << 20))]}, "CONTENT_TOO_LONG"),
        ({"call_required": True}, "NO_TOOLS"),
        ({"tools": [inference.Tool(name="a", parameters=SCHEMA + " ")]}, ""),
        ({"tools": [inference.Tool(name="a", parameters=SCHEMA, strict=True)]}, ""),
        ({"tools": [inference.Tool(name="a", parameters=SCHEMA + " ", strict=True)]}, "SCHEMA_TOO_LONG"),
        ({"tools": [inference.Tool(name="a", parameters="[]", strict=True)]}, "BAD_JSON_FIELD"),
        ({"template_arguments": '{"effort": 1, "_x": 2}'}, ""),
        ({"template_arguments": '{"a b": 1}'}, "BAD_JSON_FIELD"),
        ({"template_arguments": '{"": 1}'}, "BAD_JSON_FIELD"),
        ({"template_arguments": '{"tools": 1}'}, "BAD_JSON_FIELD"),
        ({"template_arguments": '{"documents": 1}'}, "BAD_JSON_FIELD"),
        ({"template_arguments": '{"add_generation_prompt": 1}'}, "BAD_JSON_FIELD"),
        ({"template_arguments": '{"messages": 1}'}, "BAD_JSON_FIELD"),
        ({"template_arguments": '{"eos_token": ""}'}, "BAD_JSON_FIELD"),
    ):
        if not reason:
            validate_prompt(prompt(**fields))
            continue
        with refused(reason, InvalidInput):
            validate_prompt(prompt(**fields))


def test_a_schema_is_an_object_of_bounded_length_width_and_cost() -> None:
    check_schema(SCHEMA, "response_format")
    for text, reason in (
        (SCHEMA + " ", "SCHEMA_TOO_LONG"),
        (SCHEMA[:-1].replace("x", "é", 1) + "}", "SCHEMA_TOO_LONG"),  # bytes, not characters
        ("1", "BAD_JSON_FIELD"),
        ("{", "BAD_JSON_FIELD"),
        (schema({"properties": members(513)}), "SCHEMA_TOO_COSTLY"),
        (schema({"anyOf": [{"items": members(513)}]}), "SCHEMA_TOO_COSTLY"),
        (schema({"items": {"multipleOf": 10001}}), "SCHEMA_TOO_COSTLY"),
        (schema({"multipleOf": 99.99}), ""),
        (schema({"multipleOf": 1000.01}), "SCHEMA_TOO_COSTLY"),
        (schema({"multipleOf": 10**300 + 1}), "SCHEMA_TOO_COSTLY"),
        (schema({"multipleOf": 1e300, "properties": members(512)}), ""),
        (schema({"properties": {"multipleOf": {"multipleOf": 0.001}}}), ""),
        ('{"multipleOf": NaN}', "BAD_JSON_FIELD"),
    ):
        made = inference.Prompt(text="x", schema=text)
        if not reason:
            validate_prompt(made)
            continue
        for check in (lambda text=text: check_schema(text, "response_format"), lambda: validate_prompt(made)):  # noqa: B023
            with pytest.raises(InvalidInput) as caught:
                check()
            assert (caught.value.reason, caught.value.metadata["param"]) == (reason, "response_format")


@pytest.mark.parametrize(
    ("call", "count", "reason"),
    [
        ({"name": "a"}, 128, ""),
        ({"name": "a"}, 129, "BAD_TOOL_CALL"),
        ({"name": "a", "arguments": "[]"}, 1, "BAD_JSON_FIELD"),
        ({"name": ""}, 1, "BAD_TOOL_NAME"),
        ({"name": "a b"}, 1, "BAD_TOOL_NAME"),
        ({"name": "a" * 128}, 1, ""),
        ({"name": "a" * 129}, 1, "BAD_TOOL_NAME"),
    ],
)
def test_calls_are_checked(call: dict[str, str], count: int, reason: str) -> None:
    message = inference.ChatMessage(role="assistant", tool_calls=[inference.ToolCall(**call)] * count)
    made = inference.Prompt(chat=inference.Chat(messages=[message]))
    if not reason:
        validate_prompt(made)
        return
    with pytest.raises(InvalidInput) as caught:
        validate_prompt(made)
    assert caught.value.reason == reason
    assert caught.value.metadata["param"].startswith("messages[0].tool_calls")


def test_only_an_assistant_calls_tools_and_its_calls_count_as_said() -> None:
    call = inference.ToolCall(name="a", arguments="{}")
    for role, good in (("assistant", True), ("user", False), ("tool", False)):
        message = inference.ChatMessage(role=role, tool_calls=[call])
        made = inference.Prompt(chat=inference.Chat(messages=[message]))
        if good:
            validate_prompt(made)
        else:
            with pytest.raises(InvalidInput, match="assistant"):
                validate_prompt(made)
