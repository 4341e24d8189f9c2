"""Calls whose arguments are written one by one: what their grammar lets through, the model's parser reads."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.node.engine import Grammars
from sealring.node.engine.grammar import Follower
from sealring.node.engine.text import Delimiters, Tokenizer, grammar_of, load_tokenizer
from sealring.node.engine.text.calls import read_calls
from sealring.node.engine.text.notations.notation import NOTATIONS, Flat, Headed, Objects, Pieces
from sealring.node.engine.text.notations.reading import reader_of
from sealring.v1 import inference_pb2 as inference

MODEL = Path(__file__).parents[4] / "examples" / "demo_model" / "model"
PARSERS = ["qwen3_coder", "glm47", "gemma4", "function_gemma", "dsml", "kimi_k2"]
FLAT = ("gemma4", "function_gemma")
HELD_ONES = [
    name
    for name, notation in NOTATIONS.items()
    if isinstance(notation, Objects | Headed | Pieces | Flat) and name not in ("harmony", "minicpm5")
]
LONGEST = 400


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer, 1536)


def takes(grammar: str, answer: str) -> bool:
    """Whether it is a whole answer."""
    grammars().try_out(grammar)
    follower = Follower(grammars().compile(grammar), tokenizer().end_tokens)
    return all(map(follower.allows, [*tokenizer().encode_markers(answer), *tokenizer().end_tokens]))


def form_of(name: str) -> Delimiters:
    return Delimiters(None, (NOTATIONS[name].begin, NOTATIONS[name].end), name)


def schema_of(choices: random.Random, parser: str) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "string", "enum": ["a", "two words", "é"]},
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"type": "null"},
    ]
    if parser not in FLAT:
        items = {"type": "array", "items": {"type": "string"}, "maxItems": 2}
        inner = {"x": {"type": "integer"}, "y": {"type": "string", "maxLength": 3}}
        kinds += [
            items,
            {"type": "object", "properties": inner, "required": ["x"], "additionalProperties": False},
        ]
    properties = {f"arg_{at}": choices.choice(kinds) for at in range(choices.randint(0, 4))}
    required = [name for name in properties if choices.random() < 0.5]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def asked(schema: dict[str, Any], *, strict: bool = True, **fields: Any) -> inference.Prompt:
    tools = [inference.Tool(name="look", parameters=json.dumps(schema), strict=strict)]
    chat = inference.Chat(messages=[inference.ChatMessage(role="user", content="x")], tools=tools, **fields)
    return inference.Prompt(chat=chat)


def read(form: Delimiters, text: str, schema: dict[str, Any]) -> Any:
    assert form.call is not None
    calls = read_calls(reader_of(form.name, frozenset()), text.removesuffix(form.call[1]), {"look": schema})
    assert calls is not None
    (call,) = calls
    assert call.name == "look"
    return json.loads(call.arguments)


@pytest.mark.parametrize("parser", HELD_ONES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 20))
def test_whatever_its_grammar_lets_through_is_read_as_an_instance(parser: str, seed: int) -> None:
    """A call of tokens drawn at random, with a liking for those that end something."""
    choices = random.Random(seed)
    schema, form = schema_of(choices, parser), form_of(parser)
    grammar = grammar_of(asked(schema, call_required=True, one_call=True), form, dict, "")
    matcher = grammars().compile(grammar).deep_copy()
    told: list[int] = []
    while not matcher.is_stopped() and len(told) < LONGEST:
        if matcher.is_accepting():
            break
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        free = [int(token) for token in np.flatnonzero(bits)]
        assert free, "nothing may follow"
        ending = [token for token in free if tokenizer().spelling(token)[:1] in b'<\n"}],']
        token = choices.choice(ending if ending and choices.random() < 0.7 else free)
        assert matcher.consume_token(token)
        told.append(token)
    text = b"".join(map(tokenizer().spelling, told))
    if matcher.is_accepting():
        jsonschema.validate(read(form, text.decode(errors="replace"), schema), schema)


WRITTEN = {
    "qwen3_coder": (
        "\n<function=look>\n<parameter=city>\nParis\nFR\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "glm47": (
        "look\n<arg_key>city</arg_key>\n<arg_value>Paris\nFR</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>"
    ),
    "gemma4": 'call:look{city:<|"|>Paris\nFR<|"|>,days:3}<tool_call|>',
    "function_gemma": "call:look{city:<escape>Paris\nFR<escape>,days:3}<end_function_call>",
    "dsml": (
        '\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="city" string="true">Paris\nFR'
        "</｜DSML｜parameter>\n"
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
    "kimi_k2": (
        '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"city": "Paris\\nFR", "days": 3}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
}
TRIP = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


@pytest.mark.parametrize("parser", PARSERS)
def test_calls_as_the_models_templates_write_them(parser: str) -> None:
    form, call = form_of(parser), WRITTEN[parser]
    grammar = grammar_of(asked(TRIP, call_required=True, one_call=True), form, dict, "")
    answers = [call, call.replace("3", "x"), call.replace("city", "town")]
    assert [takes(grammar, answer) for answer in answers] == [True, False, False]
    assert read(form, call, TRIP) == {"city": "Paris\nFR", "days": 3}
    assert form.call is not None
    free = grammar_of(asked(TRIP), form, dict, "")
    assert takes(free, "no call")
    assert takes(free, f"so {form.call[0]}{call}")
    loose = grammar_of(asked(TRIP, strict=False, call_required=True), form, dict, "")
    answers = [call, "text", call.replace("look", "other")]
    assert [takes(loose, answer) for answer in answers] == [True, False, False]


TEXT = {"type": "string"}
HELD: list[tuple[dict[str, Any], str]] = [
    (TEXT, "%s"),
    ({"type": "array", "items": {"type": "string", "pattern": "^.{2,30}$"}}, '["%s"]'),
    ({"type": "array", "items": {"type": "string", "maxLength": 30}}, '["%s"]'),
    ({"type": "array"}, '[1, {"a": ["%s"]}]'),
    ({"type": "array", "prefixItems": [TEXT]}, '["%s"]'),
    ({"type": "array", "items": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/two"}]}}, '["%s"]'),
    ({"type": "object"}, '{"a": "%s"}'),
    ({"type": "object"}, '{"%s": 1}'),
    ({"type": "object", "additionalProperties": {"type": ["string", "null"]}}, '{"%s": null}'),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, '{"a": "%s"}'),
    ({"type": "object", "properties": {"a": {"allOf": [TEXT, {"minLength": 1}]}}}, '{"a": "%s"}'),
]
"""Arguments, and how one with a text is written."""


CALLED = {
    "qwen3_coder": "\n<function=%s>\n<parameter=city>\n%s\n</parameter>\n</function>\n</tool_call>",
    "glm47": "%s\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "dsml": (
        '\n<｜DSML｜invoke name="%s">\n<｜DSML｜parameter name="city" string="false">%s'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
}


@pytest.mark.parametrize("parser", CALLED)
def test_no_text_ends_its_argument_or_its_call(parser: str) -> None:
    form, tools = form_of(parser), []
    for number, (argument, _) in enumerate(HELD):
        defined = {"two": {"type": "string", "minLength": 2}}
        schema = {"type": "object", "properties": {"city": argument}, "required": ["city"], "$defs": defined}
        tools.append(inference.Tool(name=f"look{number}", parameters=json.dumps(schema), strict=True))
    chat = inference.Chat(messages=[inference.ChatMessage(role="user", content="x")], tools=tools)
    chat.call_required = chat.one_call = True
    grammar = grammar_of(inference.Prompt(chat=chat), form, dict, "")
    assert form.call is not None
    own = {"qwen3_coder": "</parameter>", "glm47": "</arg_value>", "dsml": "</｜DSML｜parameter>"}[parser]
    for number, (argument, value) in enumerate(HELD):
        for text in ("a <b> / c <", own, form.call[1]):
            call = CALLED[parser] % (f"look{number}", value % text)
            if argument is TEXT:
                call = call.replace('"false"', '"true"')
            assert takes(grammar, call) == text.startswith("a"), call


@pytest.mark.parametrize("parser", CALLED)
def test_a_text_with_a_pattern_is_read_as_one_that_has_it(parser: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^([a-z/ ]|\n)*$"}}}
    schema["required"] = ["city"]
    form = form_of(parser)
    grammar = grammar_of(asked(schema, call_required=True, one_call=True), form, dict, "")
    assert form.call is not None
    for text in ("a/b c", "a\nb", " a", "a\n", "\na", "", "\n", "null", "A", f"a{form.call[1]}"):
        call = CALLED[parser].replace('"false"', '"true"') % ("look", text)
        if takes(grammar, call):
            assert re.fullmatch("([a-z/ ]|\n)*", read(form, call, schema)["city"]) is not None
        else:
            assert text not in ("a/b c", "a\nb")
    assert takes(grammar, CALLED[parser].replace('"false"', '"true"') % ("look", "a/b c"))


@pytest.mark.parametrize(
    "argument",
    [
        {"type": "string", "pattern": "a"},
        {"type": "string", "minLength": 1},
        {"enum": [1, "null"]},
        {"type": ["string", "null"]},
        {"type": "array", "items": {"enum": ["</parameter>"]}},
        {"type": "object", "properties": {"</parameter>": {}}},
        {"type": "object", "patternProperties": {".*": {}}},
        {"type": "array", "items": {"anyOf": 3}},
    ],
)
def test_what_a_parser_could_not_tell_apart_is_refused(argument: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"n": argument}}
    for parser in ("qwen3_coder", "gemma4"):
        with pytest.raises(InvalidInput) as caught:
            grammar_of(asked(schema), form_of(parser), dict, "")
        assert caught.value.reason == "NO_STRICT_TOOLS"
