"""Calls as a request's tools have them: names of its tools, and arguments by their schemas."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.node.engine.text.calls import calls_of, read_calls
from sealring.node.engine.text.notations import values
from sealring.node.engine.text.notations.notation import NOTATIONS
from sealring.node.engine.text.notations.reading import reader_of
from sealring.node.engine.text.notations.values import Lone, Raw, Tree, Written, json_of

NONE = frozenset[str]()


def typed(text: str, schema: Any, root: Any = None) -> Any:
    return json.loads(json_of(Raw(text), schema, root))


@given(st.text())
def test_a_text_keeps_every_byte(text: str) -> None:
    choice = {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "string", "maxLength": 3}]}
    for schema in ({"type": "string"}, {"enum": [text, "other"]}, {"const": text}, choice):
        assert typed(text, schema, {"$defs": {"word": {"type": "string"}}}) == text


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("123", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "123"),
        ("123", {"type": ["string", "null"]}, "123"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ("maybe", {"type": "boolean"}, "maybe"),
        ('"a"', {"type": ["string", "null"]}, '"a"'),
        ('"a"', {}, '"a"'),
        (" true\n", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("True", {}, "True"),
        ("2026-01-15", {"type": "integer"}, "2026-01-15"),
        ("007", {"type": "integer"}, "007"),
        ("12345678901234567890123", {"type": "integer"}, 12345678901234567890123),
        ("3.0", {"type": "integer"}, 3.0),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("5", {"$ref": "#/$defs/number"}, 5),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, "auto"]}, 5),
        ("auto", {"enum": [5, "auto"]}, "auto"),
        ('["a", {"b": null}]', {"type": "array"}, ["a", {"b": None}]),
        ("['a', (1, None), {'b': True}]", {"type": "array"}, ["a", [1, None], {"b": True}]),
        ("[1, x]", {"type": "array"}, "[1, x]"),
        ("", {"type": "array"}, []),
        ("", {"type": ["array", "string"]}, ""),
        ("7", True, 7),
        ("7", {"$ref": "#"}, 7),
        ("7", {"$ref": "#/$defs/no"}, 7),
    ],
)
def test_a_text_is_typed_by_its_schema(text: str, schema: Any, value: Any) -> None:
    found = typed(text, schema, {"$defs": {"number": {"type": "number"}}, "$ref": "#"})
    assert (found, type(found)) == (value, type(value))


def test_what_is_nested_is_typed_by_what_describes_it() -> None:
    schema = {
        "properties": {"list": {"type": "array", "items": {"type": "string"}}, "one": {"type": "array"}},
        "additionalProperties": {"type": "integer"},
    }
    tree: Tree = {"list": [Raw("1"), Raw(" 2")], "one": Lone(item=Raw("3")), "more": Raw("4")}
    assert json.loads(json_of(tree, schema, schema)) == {"list": ["1", " 2"], "one": [3], "more": 4}
    for kind, found in (("array", [3]), ("integer", [3]), ("object", {"item": 3})):
        assert json.loads(json_of(Lone(item=Raw("3")), {"type": kind}, {})) == found
        assert json.loads(json_of({"item": Raw("3")}, {"type": kind}, {})) == {"item": 3}
    assert json.loads(json_of(Lone(item=Raw("3")), {}, {})) == [3]


def test_a_name_is_that_of_a_tool_where_a_notation_cannot_hold_it() -> None:
    tools: dict[str, Any] = {"mcp.look-up": {}, "a.b": {}, "a_b": {}, "a-b": {}}
    names = ["mcp.look-up", "mcp_look_up", " a_b", "a/b", "other"]
    found = [calls_of([Written(name)], tools) for name in names]
    assert [calls[0].name if calls else None for calls in found] == [
        "mcp.look-up",
        "mcp.look-up",
        "a_b",
        None,
        "other",
    ]


OBJECT = ('{"name": "look", "arguments": {"at": "x"}}', [("look", {"at": "x"})])
READ: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("json_tools", *OBJECT),
    ("json_tools", '{"name": "look"}', [("look", {})]),
    ("json_tools", '{"name": "look", "arguments": null}', [("look", {})]),
    ("json_tools", '{"parameters": {"at": "x"}, "name": "look"}', [("look", {"at": "x"})]),
    ("json_tools", '{"name": "look", "arguments": "{\\"at\\": \\"x\\"}"}', [("look", {"at": "x"})]),
    ("json_tools", '{"name": "look", "arguments": {"at": "a\nb"}}}', [("look", {"at": "a\nb"})]),
    ("json_tools", '{"name": "look", "arguments": {"at": "x"}', [("look", {"at": "x"})]),
    ("json_tools", f"{OBJECT[0]}\n{OBJECT[0]}", OBJECT[1] * 2),
    ("llama", '{"type": "function", "function": {"name": "look", "parameters": {}}}', [("look", {})]),
    ("mistral", 'look[CALL_ID]abcdefghi[ARGS]{"at": "x"}', OBJECT[1]),
    ("mistral", 'mcp.f{"at": "x"}', [("mcp.f", {"at": "x"})]),
    ("mistral", f"[{OBJECT[0]}]", OBJECT[1]),
    (
        "qwen3_coder",
        "<function=look>\n<parameter=at>\n1\n</parameter>\n</function>\n<function=look>\n"
        "<parameter=at>\n2\n</parameter>\n</function>",
        [("look", {"at": "1"}), ("look", {"at": "2"})],
    ),
    ("qwen3_coder", "<function=look><parameter=at>x</parameter>", OBJECT[1]),
    (
        "dsml",
        '<｜DSML｜invoke name="look"><｜DSML｜parameter name="n" string="false">so</｜DSML｜parameter>'
        "</｜DSML｜invoke>",
        [("look", {"n": "so"})],
    ),
    (
        "function_gemma",
        "call:my-tool{p:{a:1,b:[2,<escape>c}<escape>]}}",
        [("my-tool", {"p": {"a": 1, "b": [2, "c}"]}})],
    ),
    ("function_gemma", "call:my-tool{p:{a:1,b:2}}", [("my-tool", {"p": {"a": 1, "b": 2}})]),
    (
        "pythonic",
        "[look(at='a\\n\\'b', n=(1, None)), f.g()]",
        [("look", {"at": "a\n'b", "n": [1, None]}), ("f.g", {})],
    ),
    (
        "pythonic_raw",
        "[look(at='x', ☀️=None), look(at='y')]",
        [("look", {"at": "x", "☀️": None}), ("look", {"at": "y"})],
    ),
    (
        "pythonic_raw",
        "[look(at='x', file path=None, n='y'), look(at='As 'a', so let n = m.')]",
        [("look", {"at": "x", "file path": None, "n": "y"}), ("look", {"at": "As 'a', so let n = m."})],
    ),
    ("llama4", "[look(at='x', file path=['y'])]", [("look", {"at": "x", "file path": ["y"]})]),
    ("llama4", OBJECT[0], OBJECT[1]),
    (
        "minimax_m3",
        '<invoke name="look"><n></usr/x>1<//usr/x></n></invoke>'.replace("<", "]<]minimax[>[<"),
        [("look", {"n": {"/usr/x": 1}})],
    ),
    (
        "minimax_m3",
        '<invoke name="take"><item>x</item></invoke>'.replace("<", "]<]minimax[>[<"),
        [("take", {"item": "x"})],
    ),
]
TOOLS = {
    "look": {"type": "object", "properties": {"at": {"type": "string"}, "n": {}}},
    "take": {"properties": {"item": {"type": "string"}}},
}


@pytest.mark.parametrize(("notation", "text", "calls"), READ)
def test_malformed_but_certain_is_a_call(notation: str, text: str, calls: Any) -> None:
    found = read_calls(reader_of(notation, NONE), text, TOOLS)
    assert found is not None
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


@pytest.mark.parametrize("notation", NOTATIONS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "{",
        '{"name": 1}',
        '{"name": "lo ok"}',
        "[" * 5000,
        '{"a":' * 5000,
        "call:f{" * 5000,
        "\ud800",
    ],
)
def test_what_is_none_cannot_be_read(notation: str, text: str) -> None:
    found = read_calls(reader_of(notation, NONE), text, TOOLS)
    keyed = notation == "apertus" and text == '{"name": 1}'
    assert found is None or keyed


M3 = "]<]minimax[>["


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        ("json_tools", '{"name": "look", "argumnets": {"at": "x"}}'),
        ("json_tools", '{"name": "look", "at": "x"}'),
        ("seed", "<function=look><parameter=at>x</parameter><parameter=at>y</parameter></function>"),
        ("gemma4", 'call:look{at:<|"|>x<|"|>,at:<|"|>y<|"|>}'),
        ("pythonic", "[look(at='x', at='y')]"),
        ("minimax_m3", f'{M3}<invoke name="look">{M3}<at>x{M3}</at>{M3}<at>y{M3}</at>{M3}</invoke>'),
        ("minimax_m3", f'{M3}<invoke name="look">x{M3}</invoke>'),
        ("minimax_m3", f'{M3}<invoke name="look">{M3}<at>x{M3}</at> so {M3}</invoke>'),
    ],
)
def test_what_would_lose_a_part_of_what_is_written_is_no_call(notation: str, text: str) -> None:
    assert read_calls(reader_of(notation, NONE), text, TOOLS) is None


@pytest.mark.parametrize(
    "arguments", ['{"at": "\\ud800"}', '{"at": 1e999}', '{"at": NaN}', '{"at":' * 40 + "1" + "}" * 40]
)
def test_a_call_that_no_client_could_read_is_none(arguments: str) -> None:
    text = f'{{"name": "look", "arguments": {arguments}}}'
    assert read_calls(reader_of("json_tools", NONE), text, TOOLS) is None


def test_pythons_lists_in_lists_are_tried_as_json_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error of JSON's reader counts the lines before it: one for each item would square the time."""
    tried: list[int] = []
    decoder = json.JSONDecoder()

    def noting(text: str, at: int) -> Any:
        tried.append(at)
        return decoder.raw_decode(text, at)

    monkeypatch.setattr(values, "_DECODER", SimpleNamespace(raw_decode=noting, decode=decoder.decode))
    said, _ = values.python_value("[" + "['a'], {'b': 1}, " * 9 + "]", 0)
    assert json.loads(said) == [["a"], {"b": 1}] * 9
    assert tried == [0]
