"""Calls whose arguments a model writes one by one, texts as they are and all else as JSON: their grammar.

A strict tool's arguments come in the order of its schema. The model's parser reads them as they were written:
a text holds nothing that ends it, and a number no more digits than the parser keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sealring.mesh.errors import InvalidInput

_ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples"})
_OBJECT = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$schema", "$defs", "definitions"}
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_WHOLE = 2**53 - 1
BREAK = '"\\n"?'

Literal = Callable[[str], str]
K = TypeVar("K")


@dataclass(frozen=True)
class Pieces:
    """The texts around a call and around each argument; %s is for the tool's name and the argument's.

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
"""Notations of calls, as the models' chat templates write them, by mlx-lm's names of parsers."""

_FLAT = frozenset({"gemma4", "function_gemma"})
"""They have a notation of their own for what is in an array or an object."""


class Arguments:
    """The rules of one tool's arguments, `name` in front of each rule's own."""

    def __init__(
        self, parser: str, tool: str, schema: dict[str, Any], literal: Literal, name: str, end: str
    ) -> None:
        """`end` is the text that ends calls, if it is none of the special tokens."""
        self._pieces = PIECES[parser]
        self._parser, self._tool, self._name = parser, tool, name
        self._literal = literal
        self._schema = schema
        self._end = end
        self.rules: list[str] = []

    def body(self) -> str:
        """What stands between a call's beginning and its end. Raises InvalidInput (NO_STRICT_TOOLS)."""
        try:
            return self._body()
        except ValueError as error:
            raise InvalidInput(
                f"calls of {self._tool} cannot be held to its schema: {error}, as this model writes calls",
                hint="leave strict out of this tool, or make its schema simpler",
                reason="NO_STRICT_TOOLS",
                param="tools",
            ) from None

    def _body(self) -> str:
        if unknown := set(self._schema) - _OBJECT:
            raise ValueError(f"{min(unknown)[:64]} in its schema")
        properties = _a(dict, self._schema.get("properties") or {})
        required = _a(list, self._schema.get("required") or [])
        if not all(name in properties for name in required):
            raise ValueError("an argument that is required and not described")
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
            raise ValueError("a name that is not letters, digits and underscores")
        if not _KEY.match(key) or not isinstance(schema, dict):
            raise ValueError("an argument whose name is not letters, digits and underscores")
        kind = schema.get("type")
        if kind == "string":
            return f"{self._around(self._pieces.text, key)} {self._text(index, schema)}"
        if not isinstance(kind, str) and (self._pieces.typed or self._parser in _FLAT):
            raise ValueError("an argument that has no type, or several")
        if self._parser in _FLAT and kind in ("array", "object"):
            raise ValueError("arrays and objects among its arguments")
        shared = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        inner = _unending({**schema, **shared})
        inner = {**inner, "$defs": {**inner.get("$defs", {}), _ANYTHING: _unending({})}}
        if kind in ("integer", "number") and "enum" not in schema and "const" not in schema:
            # parsers go through a double
            low, high = schema.get("minimum", -_WHOLE), schema.get("maximum", _WHOLE)
            if not isinstance(low, int | float) or not isinstance(high, int | float):
                raise ValueError("it is malformed")
            inner["minimum"], inner["maximum"] = max(low, -_WHOLE), min(high, _WHOLE)
        ending = self._around(self._pieces.value_end)
        return f"{self._around(self._pieces.value, key)} {as_json(inner)} {ending}".strip()

    def _text(self, index: int, schema: dict[str, Any]) -> str:
        """A text and what ends it."""
        end = self._pieces.text_end
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        patterned = "pattern" in schema and bool(self._pieces.breaks)
        if unknown := set(schema) - _ANNOTATIONS - {"enum", "const"} - ({"pattern"} if patterned else set()):
            raise ValueError(f"{min(unknown)[:64]} of a text")
        rest = self._around(self._pieces.value_end if self._pieces.typed else end)
        if values is not None:
            if not all(isinstance(value, str) and self._readable(value) for value in values):
                raise ValueError("an enum of other texts than the model's parser reads")
            return f"({' | '.join(self._literal(value) for value in values)}) {rest}"
        name = f"TEXT_{self._name}_{index}".upper()
        barred = [re.escape(self._end)] * bool(self._end) + [r"\}"] * (self._parser == "function_gemma")
        if rest.startswith("<["):  # a special token, which is no text
            self.rules.append(f"{name}: /(?s:.*)/{_without([re.escape(end), *barred])}")
            return f"{name} {rest}"
        ended = re.escape(end).replace("/", r"\/")
        null = rf" & ~/(?s:\n?[Nn][Uu][Ll][Ll]\n?{ended})/" if self._pieces.typed else ""
        held = self._pattern(schema["pattern"], ended) if patterned else f"/(?s:.*){ended}/"
        self.rules.append(f"{name}: {held} & ~/(?s:.*{ended}.+)/{null}{_without(barred)}")
        return f"{name} {BREAK}" if self._pieces.breaks else name

    def _pattern(self, pattern: Any, ended: str) -> str:
        """Matches a text and its end; the text has the pattern once the parser has stripped it."""
        pattern = _a(str, pattern)
        if not (pattern.startswith("^") and pattern.endswith("$")):
            raise ValueError("a pattern of a text that is not anchored by ^ and $")
        body = re.sub(
            r"(\\.)|/|\n", lambda found: found[1] or {"/": r"\/", "\n": r"\n"}[found[0]], pattern[1:-1]
        )
        if self._parser == "glm47":
            return rf"/(?:{body}){ended}/ & ~/(?s:\s.*)/ & ~/(?s:.*\s{ended})/"
        if self._pieces.typed:
            return rf"/(?:{body})\n{ended}/ & ~/(?s:\n.*)/"
        return f"/(?:{body}){ended}/"

    def _readable(self, value: str) -> bool:
        null = self._pieces.typed and value.lower() == "null"
        barred = "}" if self._parser == "function_gemma" else self._pieces.text_end
        ended = barred in value or (self._end and self._end in value)
        return value == value.strip() and not ended and not null

    def _around(self, text: str, key: str = "") -> str:
        """Matches what stands around an argument; the line breaks in it may be missing."""
        filled = text.replace("%s", key)
        if not self._pieces.breaks:
            return self._literal(filled)
        parts = [self._literal(part) if part else "" for part in filled.split("\n")]
        ends = text in (self._pieces.text_end, self._pieces.value_end)
        return f" {BREAK} ".join(parts).strip() + f" {BREAK}" * ends


def _unending(schema: Any) -> Any:
    """A schema narrowed to texts and keys without `</`, which begins all that ends an argument: parsers do
    not know JSON. Where an object has properties it has no others.

    Raises ValueError, which says what cannot be narrowed.
    """
    if schema is True:
        return {"$ref": f"#/$defs/{_ANYTHING}"}
    if not isinstance(schema, dict):
        return schema
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        if "</" in json.dumps(values):
            raise ValueError("a value with </")
        return schema
    made = dict(schema)
    for name in made.keys() & {"anyOf", "oneOf", "allOf", "prefixItems"}:
        made[name] = [_unending(one) for one in _a(list, made[name])]
    for name in made.keys() & {"properties", "$defs", "definitions"}:
        made[name] = {key: _unending(one) for key, one in _a(dict, made[name]).items()}
    if "patternProperties" in made or any("</" in key for key in made.get("properties", {})):
        raise ValueError("names of properties that could hold </")
    kinds = made.get("type")
    if kinds is None and not made.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        kinds = made["type"] = ["null", "boolean", "number", "string", "array", "object"]
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds:
        made["allOf"] = [*made.get("allOf", []), {"pattern": _UNENDING}]
    if "array" in kinds:
        made["items"] = _unending(made.get("items", True))
    if "object" in kinds:
        others = made.pop("additionalProperties", True)
        made["additionalProperties"] = False
        if others is not False and not made.get("properties"):
            made["patternProperties"] = {_UNENDING: _unending(others)}
    return made


def _a(kind: type[K], value: Any) -> K:
    if not isinstance(value, kind):
        raise ValueError("it is malformed")
    return value


_UNENDING = "^([^<]|<+[^</])*<*$"
_ANYTHING = "anything-at-all"


def _without(barred: list[str]) -> str:
    """The part of a text's rule that lets none of these be in it."""
    return "".join(f" & ~/(?s:.*{one}.*)/".replace("</", r"<\/") for one in barred)


COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON with at most one space behind commas and colons: models otherwise write spaces until they are cut."""


def as_json(schema: dict[str, Any]) -> str:
    """The rule's part for an instance of a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT})
