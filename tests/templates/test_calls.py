"""Calls of BFCL, written by the chat templates of real models, are read back unchanged (`make templates`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text import THINK, ChatTemplate, Sections, family_of, format_of, thinking_of
from sealring.node.engine.text.notations.notation import NOTATIONS, Flat, Nested, Notation, Pieces, Python
from sealring.node.engine.text.notations.values import literal
from sealring.v1 import inference_pb2 as inference

pytestmark = pytest.mark.sweep

FOLDER = Path(__file__).parents[2] / "build" / "templates"
TEMPLATES = sorted(file.stem for file in (FOLDER / "jinja").glob("*.jinja"))
TOKENS = {
    "Kimi-K3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "openai-gpt-oss-120b": ("<|start|>", "<|channel|>", "<|message|>", "<|call|>"),
}
"""What a family is recognised by where its template does not say it."""

SILENT = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "it refuses parameters without a description",
    "HuggingFaceTB-SmolLM3-3B": "it leaves calls out",
    "Kimi-K2-Instruct": "it changes a list, which the sandbox forbids",
    "Kimi-K2-Thinking": "it changes a list, which the sandbox forbids",
    "LFM2-8B-A1B": "it leaves calls out",
    "LFM2.5-Instruct": "it leaves calls out",
    "ibm-granite-granite-3.3-2B-Instruct": "it leaves calls out",
    "llama-cpp-deepseek-r1": "it does not render",
}
"""Templates that write no calls, and why."""

ONE_CALL = ("llama", "gigachat", "harmony", "llama4")
LEFT_OUT = re.compile(
    r"<\|eot_id\|>|<\|eom_id\|>|<\|end_of_text\|>|<\|message_sep\|>|<\|call\|>|<EOS>|<\|im_end\|>"
)
KINDS = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "hashmap": "object",
    "any": None,
    "Array": "array",
}

ASKED = "What-nobody-else-says"
Call = tuple[str, dict[str, Any]]


def schema_of(value: Any) -> Any:
    """BFCL's schemas have Python's names of types, and Java's; what is none of JSON's is a text."""
    if isinstance(value, list):
        return [schema_of(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {key: schema_of(one) for key, one in value.items() if key not in ("default", "optional")}
    if isinstance(kind := value.get("type"), str):
        known = ("string", "integer", "number", "boolean", "array", "object", "null")
        made["type"] = kind if kind in known else KINDS.get(kind, "string")
        if made["type"] is None:
            del made["type"]
    return made


def kinds_of(schema: Any) -> set[str]:
    kinds = schema.get("type", []) if isinstance(schema, dict) else []
    return set(kinds if isinstance(kinds, list) else [kinds])


EMPTY = "nothing is written of what is empty"
QUOTE = "a text has the quote that ends it, and what follows one"
LONE = "a list of one is an object with an item, where its schema says object"
BARE = "a text without quotes is what its schema says"


SCHEMA_ALONE = ("glm47", "hy3", "longcat", "minicpm5", "minimax_m2", "muse_spark", "qwen3_coder", "seed")
LEFT = {
    **{name: {BARE: 89} for name in SCHEMA_ALONE},
    "gemma4": {BARE: 29},
    "minimax_m3": {BARE: 95, EMPTY: 5, LONE: 2},
    "pythonic_raw": {QUOTE: 3},
}
"""Arguments of BFCL's calls that a notation cannot carry, by the reason; all others are read back."""


def carried(notation: Notation, value: Any, schema: Any) -> str:
    """Why the notation cannot carry a value of this schema; empty if it can.

    Where it writes texts without quotes, the schema alone says what is a text.
    """
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(notation, Python) and not notation.escapes:
        text = value if isinstance(value, str) else ""
        return QUOTE if re.search(r"'\s*(?:\)\s*(?:[,\]]|\Z)|,\s*[\w.$-]+\s*=)", text) else ""
    if not isinstance(notation, Pieces | Nested | Flat) or (isinstance(notation, Pieces) and notation.kinds):
        return ""
    kinds = kinds_of(schema)
    if isinstance(notation, Nested | Flat) and isinstance(value, list | dict):
        nested = isinstance(notation, Nested)
        if nested and isinstance(value, list) and len(value) == 1 and "object" in kinds:
            return LONE
        if nested and not value:
            return EMPTY
        items = enumerate(value) if isinstance(value, list) else value.items()
        kept = schema.get("properties") or {}
        inner = [
            (one, kept.get(key) if isinstance(value, dict) else schema.get("items")) for key, one in items
        ]
        return next(filter(None, (carried(notation, *one) for one in inner)), "")
    if isinstance(value, str):
        if isinstance(notation, Flat):
            return ""
        other = literal(value)[1] or (not value.strip() and kinds & {"array", "object", "null"})
        return BARE if other and "string" not in kinds else ""
    return BARE if kinds == {"string"} else ""


@cache
def turns() -> list[tuple[dict[str, Any], list[Call]]]:
    """The schemas of tools by name, and calls of them."""
    found = []
    for answers in sorted((FOLDER / "bfcl").glob("answers-*.json")):
        asked = FOLDER / "bfcl" / answers.name.removeprefix("answers-")
        tools = {one["id"]: one for one in map(json.loads, asked.read_text("utf-8").splitlines())}
        for line in answers.read_text("utf-8").splitlines():
            entry = json.loads(line)
            truth = entry["ground_truth"]
            if "function" not in tools[entry["id"]] or not all(isinstance(one, dict) for one in truth):
                continue
            schemas = {one["name"]: schema_of(one["parameters"]) for one in tools[entry["id"]]["function"]}
            calls: list[Call] = []
            for one in truth:
                (name, given), *_ = one.items()
                calls.append((name, {key: values[0] for key, values in given.items() if values}))
            found.append((schemas, calls))
    return found


def written(
    template: ChatTemplate, calls: list[Call], schemas: dict[str, Any], *, starts: bool
) -> str | None:
    """The assistant's turn with these calls; None where the template refuses."""
    functions = [
        {"name": name, "description": "a tool", "parameters": {"type": "object", "properties": {}, **schema}}
        for name, schema in schemas.items()
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    user = {"role": "user", "content": ASKED}
    result = [{"role": "tool", "tool_call_id": "abcdefg00", "name": calls[0][0], "content": "42"}]
    for as_text, content, then in ((False, "", []), (True, None, []), (True, "", []), (False, "", result)):
        told = [
            {
                "type": "function",
                "id": f"abcdefg{at:02}",
                "function": {
                    "name": name,
                    "arguments": json.dumps(given, ensure_ascii=False) if as_text else given,
                },
            }
            for at, (name, given) in enumerate(calls)
        ]
        said = {"role": "assistant", "content": content, "tool_calls": told}
        try:
            before = template.render([user], tools)
            whole = template.render([user, said, *then], tools)
        except InvalidInput:
            continue
        turn = whole[whole.rindex(ASKED) + len(ASKED) :]
        if starts:  # the answer is nothing but the call
            same = (at for at, (one, two) in enumerate(zip(before, whole, strict=False)) if one != two)
            turn = whole[next(same, len(before)) :]
        if calls[0][0] in turn:
            return turn
    return None


def read(name: str, source: str, turn: str, schemas: dict[str, Any]) -> list[Call]:
    form = format_of(source, TOKENS.get(name, ()))
    tools = [inference.Tool(name=one, parameters=json.dumps(schema)) for one, schema in schemas.items()]
    sections = Sections(form, (), inference.Chat(tools=tools))
    _, parsed = sections.take(turn, inference.FINISH_REASON_STOP)
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] if parsed else []


def held(notation: Notation, calls: list[Call], schemas: dict[str, Any], left: Counter[str]) -> list[Call]:
    """The calls without the arguments that the notation cannot carry, which are counted by the reason."""
    found = []
    for name, given in calls:
        properties = schemas.get(name, {}).get("properties", {})
        why = {key: carried(notation, value, properties.get(key)) for key, value in given.items()}
        left.update(filter(None, why.values()))
        found.append((name, {key: value for key, value in given.items() if not why[key]}))
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_as_they_were_written(name: str) -> None:
    source = (FOLDER / "jinja" / f"{name}.jinja").read_text("utf-8")
    family = family_of(source, TOKENS.get(name, ()))
    if not family.notation or name in SILENT:
        pytest.skip(SILENT.get(name, "nobody reads its calls, and docs/models.md says so"))
    template = ChatTemplate(source, {"bos_token": "", "eos_token": "<EOS>"})
    changed, tried, left = [], 0, Counter[str]()
    for schemas, calls in turns():
        calls = calls[:1] if family.notation in ONE_CALL else calls
        calls = held(NOTATIONS[family.notation], calls, schemas, left)
        turn = written(template, calls, schemas, starts=bool(NOTATIONS[family.notation].starts))
        assert turn is not None, calls
        end = LEFT_OUT.search(turn, max(0, turn.find(NOTATIONS[family.notation].begin)))
        found = read(name, source, turn[: end.start()] if end else turn, schemas)
        tried += len(calls)
        if found != calls:
            changed.append((calls, found, turn))
    assert not changed, (len(changed), tried, changed[0])
    assert left == LEFT.get(family.notation, {})


def test_the_page_says_of_each_template_what_is_read() -> None:
    """docs/templates.json, of which docs/models.md is made."""
    said = json.loads((Path(__file__).parents[2] / "docs" / "templates.json").read_bytes())
    for name in TEMPLATES:
        source = (FOLDER / "jinja" / f"{name}.jinja").read_text("utf-8")
        family = family_of(source, TOKENS.get(name, ()))
        marks = [mark for pair in THINK for mark in pair if mark in source]
        thinks = thinking_of(family, marks) is not None
        assert (said[name]["calls"], said[name]["thoughts"]) == (
            family.name * bool(family.notation),
            thinks,
        ), name
    assert set(said) == set(TEMPLATES)


def test_templates_were_fetched() -> None:
    assert len(TEMPLATES) == 70
    assert sum(len(calls) for _, calls in turns()) > 2000
