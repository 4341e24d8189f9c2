"""Calls whose arguments a model writes one by one, texts as they are and all else as JSON: their grammar.

A strict tool's arguments come in the order of its schema, and are such that the model's parser reads what was
written: a text holds nothing that ends it, and a number no more digits than the parser keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sealring.mesh.errors import InvalidInput

_ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples"})
_OBJECT = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$schema", "$defs", "definitions"}
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_WHOLE = 2**53 - 1
BREAK = '"\\n"?'

Literal = Callable[[str], str]


@dataclass(frozen=True)
class Pieces:
    """What stands around a call and around each argument; %s is for the tool's name and the argument's.

    A line break in `breaks` may be left out. `typed` parsers read an argument by the type in its schema,
    which has to be there; they take a text `null` for none.
    """

    call: str
    end: str
    text: str
    text_end: str
    value: str
    value_end: str
    between: str = ""
    breaks: str = ""
    typed: bool = False
    several: bool = False


PIECES = {
    "qwen3_coder": Pieces(
        "\n<function=%s>\n",
        "</function>\n",
        "<parameter=%s>\n",
        "</parameter>",
        "<parameter=%s>\n",
        "\n</parameter>",
        breaks="\n",
        typed=True,
    ),
    "glm47": Pieces(
        "%s\n",
        "",
        "<arg_key>%s</arg_key>\n<arg_value>",
        "</arg_value>",
        "<arg_key>%s</arg_key>\n<arg_value>",
        "</arg_value>",
        breaks="\n",
    ),
    "gemma4": Pieces("call:%s{", "}", '%s:<|"|>', '<|"|>', "%s:", "", between=","),
    "function_gemma": Pieces("call:%s{", "}", "%s:<escape>", "<escape>", "%s:", "", between=","),
    "dsml": Pieces(
        '\n<｜DSML｜invoke name="%s">\n',
        "</｜DSML｜invoke>\n",
        '<｜DSML｜parameter name="%s" string="true">',
        "</｜DSML｜parameter>",
        '<｜DSML｜parameter name="%s" string="false">',
        "</｜DSML｜parameter>",
        breaks="\n",
        several=True,
    ),
}
"""By mlx-lm's names of parsers, as the models' chat templates write calls."""

_FLAT = frozenset({"gemma4", "function_gemma"})
"""They have a notation of their own for what is in an array or an object."""


class Arguments:
    """The rules of one tool's arguments, `name` in front of each rule's own."""

    def __init__(self, parser: str, tool: str, schema: dict[str, Any], literal: Literal, name: str) -> None:
        """Raises InvalidInput (NO_STRICT_TOOLS)."""
        self._pieces = PIECES[parser]
        self._parser, self._tool, self._name = parser, tool, name
        self._literal = literal
        self._schema = schema
        self.rules: list[str] = []

    def body(self) -> str:
        """What stands between a call's beginning and its end."""
        if unknown := set(self._schema) - _OBJECT:
            raise self._refused(f"{min(unknown)[:64]} in its schema")
        properties = self._schema.get("properties") or {}
        required = self._schema.get("required") or []
        if not set(required) <= set(properties):
            raise self._refused("an argument that is required and not described")
        made = [self._argument(index, *item) for index, item in enumerate(properties.items())]
        wanted = [key in required for key in properties]
        if not self._pieces.between:
            return " ".join(one if want else f"({one})?" for one, want in zip(made, wanted, strict=True))
        return self._separated(made, wanted)

    def _separated(self, made: list[str], wanted: list[bool]) -> str:
        """Arguments with something between any two that are there: rules for what may follow, from behind."""
        mark = self._literal(self._pieces.between)
        after, first = '""', '""'
        for index in reversed(range(len(made))):
            name = f"{self._name}_from_{index}"
            self.rules.append(f"{name}_next: {mark} {made[index]} {after}")
            self.rules.append(f"{name}: {made[index]} {after}")
            skip = "" if wanted[index] else " | "
            first = f"({name}{skip}{'' if wanted[index] else first})"
            after = f"({name}_next{skip}{'' if wanted[index] else after})"
        return first

    def _argument(self, index: int, key: str, schema: Any) -> str:
        if self._parser in _FLAT and not self._tool.isidentifier():
            raise self._refused("a name that is not letters, digits and underscores")
        if not _KEY.match(key) or not isinstance(schema, dict):
            raise self._refused("an argument whose name is not letters, digits and underscores")
        kind = schema.get("type")
        if kind == "string":
            return f"{self._around(self._pieces.text, key)} {self._text(index, schema)}"
        if not isinstance(kind, str) and (self._pieces.typed or self._parser in _FLAT):
            raise self._refused("an argument that has no type, or several")
        if self._parser in _FLAT and kind in ("array", "object"):
            raise self._refused("arrays and objects among its arguments")
        shared = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        inner = _unending({**schema, **shared})
        if kind in ("integer", "number") and "enum" not in schema and "const" not in schema:
            # parsers go through a double
            inner["minimum"] = max(schema.get("minimum", -_WHOLE), -_WHOLE)
            inner["maximum"] = min(schema.get("maximum", _WHOLE), _WHOLE)
        ending = self._around(self._pieces.value_end)
        return f"{self._around(self._pieces.value, key)} {as_json(inner)} {ending}".strip()

    def _text(self, index: int, schema: dict[str, Any]) -> str:
        """A text and what ends it."""
        end = self._pieces.text_end
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if unknown := set(schema) - _ANNOTATIONS - {"enum", "const"}:
            raise self._refused(f"{min(unknown)[:64]} of a text")
        rest = self._around(self._pieces.value_end if self._pieces.typed else end)
        if values is not None:
            if not all(isinstance(value, str) and self._readable(value) for value in values):
                raise self._refused("an enum of other texts than the model's parser reads")
            return f"({' | '.join(self._literal(value) for value in values)}) {rest}"
        name = f"TEXT_{self._name}_{index}".upper()
        barred = [re.escape(end), *([r"\}"] if self._parser == "function_gemma" else [])]
        if rest.startswith("<["):  # a special token, which is no text
            self.rules.append(f"{name}: {_without(barred)}")
            return f"{name} {rest}"
        ended = re.escape(end).replace("/", r"\/")
        once = [rf"/(?s:.*){ended}/", rf"~/(?s:.*{ended}.+)/"]
        if self._pieces.typed:
            once.append(rf"~/(?s:\n?[Nn][Uu][Ll][Ll]\n?{ended})/")
        if self._parser == "function_gemma":
            once.append(r"~/(?s:.*\}.*)/")
        self.rules.append(f"{name}: {' & '.join(once)}")
        return f"{name} {BREAK}" if self._pieces.breaks else name

    def _readable(self, value: str) -> bool:
        null = self._pieces.typed and value.lower() == "null"
        barred = "}" if self._parser == "function_gemma" else self._pieces.text_end
        return value == value.strip() and barred not in value and not null

    def _around(self, text: str, key: str = "") -> str:
        """Of what stands around an argument; the line breaks in it may be missing."""
        filled = text.replace("%s", key)
        if not self._pieces.breaks:
            return self._literal(filled)
        parts = [self._literal(part) if part else "" for part in filled.split("\n")]
        ends = text in (self._pieces.text_end, self._pieces.value_end)
        return f" {BREAK} ".join(parts).strip() + f" {BREAK}" * ends

    def _refused(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"calls of {self._tool} cannot be held to its schema: {why}, as this model writes calls",
            hint="leave strict out of this tool, or make its schema simpler",
            reason="NO_STRICT_TOOLS",
            param="tools",
        )


def _unending(schema: Any) -> Any:
    """A schema whose texts hold no `</`, as what ends an argument begins with: parsers do not know JSON."""
    if isinstance(schema, list):
        return [_unending(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "string" and not schema.keys() - _ANNOTATIONS:
        return {**schema, "pattern": "^([^<]|<+[^</])*<*$"}
    return {name: _unending(one) if name not in ("enum", "const") else one for name, one in schema.items()}


def _without(barred: list[str]) -> str:
    parts = [f"~/(?s:.*{one}.*)/".replace("</", r"<\/") for one in barred]
    return " & ".join([r"/(?s:.*)/", *parts])


COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON with at most one space behind commas and colons: models otherwise write spaces until they are cut."""


def as_json(schema: dict[str, Any]) -> str:
    """The rule's part for an instance of a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT})
