"""Calls that a template writes are read back byte for byte: names, order and arguments.

The templates of tests/data/notations write calls as those of the families do. `make templates` has the real
templates.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sealring.node.engine.text import ChatTemplate, Delimiters, Sections
from sealring.node.engine.text.notations.notation import (
    NOTATIONS,
    Flat,
    Nested,
    Notation,
    Pieces,
    Python,
    spelt,
)
from sealring.node.engine.text.notations.reading import Ending
from sealring.v1 import inference_pb2 as inference

FOLDER = Path(__file__).parents[4] / "data" / "notations"
ONE_CALL = ("llama", "gigachat", "harmony")
"""Their families write one call a turn."""

CALLS = 100
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
SHIELD = "\ufdd2"
"""Stands in a text where it would spell a special token."""

LOOK = [inference.Tool(name="look", parameters='{"properties": {"at": {"type": "string"}}}')]
Call = tuple[str, dict[str, Any]]


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text("utf-8"), {})


def markers(notation: Notation) -> list[str]:
    """What the notation writes around names and values."""
    fields = vars(notation)
    texts = [text for text in fields.values() if isinstance(text, str) and text]
    found = [part for text in texts for part in re.split(r"%s|#|\n", text) if len(part) > 1]
    return [*found, *HARMONY]


def special(notation: Notation) -> frozenset[str]:
    """What may be special tokens: what stands between angles or brackets, and Gemma's quotes."""
    names = {
        part
        for text in markers(notation)
        for part in re.findall(r"<\|[^<>\s=]+?\|>|<｜[^<>]+?｜>|｜DSML｜", text)
    }
    whole = {notation.begin, notation.end, getattr(notation, "quote", ""), getattr(notation, "mark", "")}
    return frozenset(
        names | {one for one in whole if one.startswith(("[", "]", "<|", "<esc")) and "\n" not in one} - {""}
    )


def tokens_of(name: str) -> frozenset[str]:
    return frozenset(HARMONY) if name == "harmony" else special(NOTATIONS[name])


KEYS = ["text", "old_string", "n", "Content-Type", "k.v", "path", "größe_☀️", "file path"]


class Drawn:
    """Random tools and calls of them that a notation can hold."""

    def __init__(self, seed: str, notation: Notation, *, tokens: bool) -> None:
        self._choices = random.Random(seed)
        self._notation, self._tokens = notation, tokens
        self._texts = [
            *markers(notation),
            *"  \n\n\t{}[]()'\"\\,:=<>&%é🙂",
            "null",
            "None",
            "true",
            "123",
            "2026-01-15",
            "\n    if x:\n        return 1\n",
            "<think>",
            "</think>",
            "a",
            "=",
            " b ",
            '{"a": "b"}',
            "&amp;",
            "\\n",
            "]]>",
        ]

    def text(self) -> str:
        made = "".join(self._choices.choices(self._texts, k=self._choices.randint(0, 6)))
        return made if may_hold(self._notation, made, tokens=self._tokens) else self.text()

    def value(self, level: int = 0) -> tuple[dict[str, Any], Any]:
        """A schema and a value of it."""
        kinds = ["string"] * 4 + ["integer", "number", "boolean", "maybe", "null", "enum"]
        kind = self._choices.choice(kinds + ["array", "object", "free"] * (level < 2))
        if kind == "integer":
            return {"type": "integer"}, self._choices.choice([0, -7, 123, 10**20])
        if kind == "number":
            return {"type": "number"}, self._choices.choice([0.5, -3, 1e22, 1e-9])
        if kind == "boolean":
            return {"type": "boolean"}, self._choices.random() < 0.5
        if kind == "maybe":
            schema = {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}
            text = self.text()
            return schema, None if text.strip() in ("null", "None") or self._choices.random() < 0.3 else text
        if kind == "null":
            return {"type": ["null", "boolean"]}, None
        if kind == "enum":
            return {"enum": ["1", "null", "x y"]}, self._choices.choice(["1", "null", "x y"])
        if kind == "array":
            schema, _ = self.value(level + 1)
            return {"type": "array", "items": {"type": "string"}}, [
                self.text() for _ in range(self._choices.randint(0, 3))
            ]
        if kind == "object":
            inner = {f"k{at}": self.value(level + 1) for at in range(self._choices.randint(1, 3))}
            schema = {"type": "object", "properties": {key: one for key, (one, _) in inner.items()}}
            return schema, {key: one for key, (_, one) in inner.items()}
        return {"type": "object"}, {"a": [None, True, 1.5, self.text()], "b": {"Content-Type": self.text()}}

    def call(self, name: str) -> tuple[Call, dict[str, Any]]:
        properties, arguments = {}, {}
        for key in self._choices.sample(KEYS, k=3):
            schema, value = self.value()
            if isinstance(self._notation, Nested) and not nestable(schema, value):
                continue
            properties[key], arguments[key] = schema, value
        schema = {"type": "object", "properties": properties, "$defs": {"text": {"type": "string"}}}
        return (name, dict(list(arguments.items())[: self._choices.randint(0, 3)])), schema


def may_hold(notation: Notation, text: str, *, tokens: bool) -> bool:
    """Whether the notation can hold a text. Where its marks are tokens of their own it can hold any."""
    if isinstance(notation, Python):
        if not tokens and (notation.end in text or notation.begin in text):
            return False
        closed = re.search(r"'\s*(?:\)\s*(?:[,\]]|\Z)|,[^'=]*=)", text)
        return notation.escapes or closed is None  # a quote like the one that ends the text
    if isinstance(notation, Pieces) and notation.cdata and text.strip().startswith("<![CDATA["):
        return True
    if isinstance(notation, Pieces):
        call, outer = notation.call.lstrip().partition("%s")[0], notation.end
        key, end = notation.value.partition("%s")[0], notation.text_end.strip()
        follows = [one for one in (key, call, notation.call_end.strip(), outer) if one]
        if tokens and {end, key} & special(notation):
            return True
        ended = rf"{re.escape(end)}\s*(?:{'|'.join(map(re.escape, follows))}|\Z)"
        return tokens_only(notation, tokens) or re.search(ended, text) is None
    if tokens:
        return True
    if isinstance(notation, Flat):
        return notation.quote not in text and notation.end not in text
    if isinstance(notation, Nested):
        return notation.mark not in text
    return True


def tokens_only(notation: Pieces, tokens: bool) -> bool:
    """Whether each end of a text has a token in it."""
    return tokens and any(name in notation.text_end for name in special(notation))


def nestable(schema: dict[str, Any], value: Any) -> bool:
    """Whether MiniMax M3 writes the value: no null, and nothing that no schema describes."""
    if value is None or schema == {"type": "object"}:
        return False
    if isinstance(value, dict):
        return all(nestable(schema["properties"][key], one) for key, one in value.items())
    return True


def marked(text: str, names: frozenset[str]) -> str:
    return spelt(text, names).replace(SHIELD, "").replace(repr(SHIELD)[1:-1], "")


def shielded(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, str):
        for name in sorted(names, key=len, reverse=True):
            value = value.replace(name, name[0] + SHIELD + name[1:])
        return value
    if isinstance(value, dict):
        return {key: shielded(one, names) for key, one in value.items()}
    return [shielded(one, names) for one in value] if isinstance(value, list) else value


def said(name: str, calls: list[Call], names: frozenset[str]) -> str:
    """The calls as the template writes them, in the text that an answer has of it."""
    told = [
        {"name": called, "id": f"abcdefgh{at}", "arguments": shielded(arguments, names)}
        for at, (called, arguments) in enumerate(calls)
    ]
    return marked(template(name).render([], (), {"calls": told}), names)


def read(sections: Sections, text: str, choices: random.Random) -> tuple[str, str, list[Call]]:
    parsed, told, at = inference.Parsed(), "", 0
    while at < len(text):
        size = choices.choice([1, 2, 3, 5, 40, 500])
        more = inference.FINISH_REASON_UNSPECIFIED
        finish = more if at + size < len(text) else inference.FINISH_REASON_STOP
        piece, beside = sections.take(text[at : at + size], finish)
        told, at = told + piece, at + size
        if beside is not None:
            parsed.reasoning += beside.reasoning
            parsed.tool_calls.extend(beside.tool_calls)
    return told, parsed.reasoning, [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


def form_of(name: str) -> Delimiters:
    notation = NOTATIONS[name]
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    return Delimiters(("<think>", "</think>"), (notation.begin, notation.end), name, final)


def one(name: str, number: int, *, tokens: bool) -> None:
    notation = NOTATIONS[name]
    names = tokens_of(name) if tokens else frozenset[str]()
    drawn, choices = Drawn(f"{name} {number}", notation, tokens=tokens), random.Random(number)
    tools = ["look", "mcp.f-g", "a_b.c"][: choices.randint(1, 3)]
    made = [drawn.call(tool) for tool in tools]
    calls = [call for call, _ in made][: 1 if name in ONE_CALL else 3]
    chat = inference.Chat(
        tools=[
            inference.Tool(name=tool, parameters=json.dumps(schema))
            for tool, (_, schema) in zip(tools, made, strict=True)
        ]
    )
    form = form_of(name)
    text = said(name, calls, names)
    told, thought, found = read(Sections(form, names, chat), text, choices)
    assert [(called, arguments) for called, arguments in found] == calls, text
    assert (told.strip(), thought) == ("", ""), text


@pytest.mark.parametrize("tokens", [False, True], ids=["texts", "tokens"])
@pytest.mark.parametrize("name", NOTATIONS)
def test_what_a_template_writes_is_read_byte_for_byte(name: str, tokens: bool) -> None:
    if name == "harmony":  # of tokens only
        tokens = True
    for number in range(CALLS // 2):
        one(name, number, tokens=tokens)


def lost(name: str, number: int, *, tokens: bool) -> None:
    """Words stand anywhere in thoughts, calls and text, and each is in what comes out."""
    choices = random.Random(number)
    names = tokens_of(name) if tokens else frozenset[str]()
    calls: list[Call] = [("look", {"at": "x", "n": {"k": ["y"]}}), ("a_b.c", {}), ("look", {"at": ""})]
    made = said(name, calls[choices.randrange(3) :][: 1 if name in ONE_CALL else 2], names)
    if name == "harmony":
        made = marked(f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{made}", names)
    made = f"<think>\nhm</think>I look.\n{made}\nDone." if name != "harmony" else made
    parts, words = re.split(r"(\ufdd0[^\ufdd1]*\ufdd1|\W)", made), []
    for at in range(choices.randint(1, 3)):
        words.append(f"w{at}w")
        parts.insert(
            choices.randint(0, len(parts)), choices.choice(["{}", " {}", '"{}"', "{}\n"]).format(words[-1])
        )
    chat = inference.Chat(tools=[inference.Tool(name=one) for one in ("look", "a_b.c")])
    text = "".join(parts)
    told, thought, found = read(Sections(form_of(name), names, chat), text, choices)
    there = f"{told} {thought} {json.dumps(found)}"
    assert [word for word in words if word not in there] == [], (text, told, thought, found)


@pytest.mark.parametrize("name", NOTATIONS)
def test_no_word_of_an_answer_is_lost(name: str) -> None:
    for number in range(CALLS):
        lost(name, number, tokens=bool(number % 2) or name == "harmony")


LONG: dict[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda length: {"at": "x = {1}\n" * (length // 8)},
    "arguments": lambda length: {f"k{at}": "x" for at in range(length // 32)},
}
"""Arguments of a length."""


@pytest.mark.parametrize("arguments", LONG)
@pytest.mark.parametrize("name", sorted(NOTATIONS.keys() - {"harmony"}))
def test_a_call_is_looked_at_in_proportion_to_its_length(
    name: str, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it comes. Harmony's calls are messages, of which nothing is held."""
    find, looked = Ending.find, 0

    def counted(ending: Ending, held: str) -> tuple[int, re.Match[str] | None]:
        nonlocal looked
        looked += len(held)
        return find(ending, held)

    monkeypatch.setattr(Ending, "find", counted)
    shares = []
    for length in (1 << 13, 1 << 14):
        text = said(name, [("look", LONG[arguments](length))], tokens_of(name))
        pieces = [text[at : at + 64] for at in range(0, len(text), 64)]
        sections, looked = Sections(form_of(name), tokens_of(name), inference.Chat(tools=LOOK)), 0
        for piece in pieces:
            sections.take(piece, inference.FINISH_REASON_UNSPECIFIED)
        sections.take("", inference.FINISH_REASON_STOP)
        shares.append(looked / len(text))
    assert 0 < shares[1] < 1.1 * shares[0]


@pytest.mark.sweep
@pytest.mark.parametrize("name", NOTATIONS)
def test_a_thousand_calls_of_each_notation(name: str) -> None:
    for number in range(1000):
        one(name, number, tokens=bool(number % 2) or name == "harmony")


def test_every_notation_has_a_template() -> None:
    assert {file.stem for file in FOLDER.glob("*.jinja")} == set(NOTATIONS)
