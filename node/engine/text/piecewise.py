"""Calls whose arguments a model writes one by one, texts as they are and all else as JSON: their grammar.

A strict tool's arguments come in the order of its schema. A text holds nothing that ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text.notations.notation import Flat, Pieces

_ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples"})
_OBJECT = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$schema", "$defs", "definitions"}
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
BREAK = '"\\n"?'

Literal = Callable[[str], str]
K = TypeVar("K")


class Arguments:
    """The rules of one tool's arguments, `name` in front of each rule's own."""

    def __init__(
        self,
        notation: Pieces | Flat,
        tool: str,
        schema: dict[str, Any],
        literal: Literal,
        name: str,
        end: str,
    ) -> None:
        """`end` is the text that ends calls, if it is none of the special tokens."""
        self._notation = notation
        self._tool, self._name = tool, name
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
        if isinstance(self._notation, Flat):
            return self._separated(made, wanted)
        return " ".join(one if want else f"({one})?" for one, want in zip(made, wanted, strict=True))

    def _separated(self, made: list[str], wanted: list[bool]) -> str:
        """Arguments with something between any two that are there: rules for what may follow, from behind."""
        mark = self._literal(",")
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
        notation = self._notation
        if isinstance(notation, Pieces) and notation.cdata:
            raise ValueError("texts in CDATA")
        if not _KEY.match(key) or not isinstance(schema, dict):
            raise ValueError("an argument whose name is not letters, digits and underscores")
        kind = schema.get("type")
        said = isinstance(notation, Pieces) and notation.kinds and "#" not in notation.value
        if kind == "string":
            begin = f"{key}:{notation.quote}" if isinstance(notation, Flat) else notation.text
            return f"{self._around(begin, key)} {self._text(index, schema)}"
        if not isinstance(kind, str) and not said:
            raise ValueError("an argument that has no type, or several")
        if isinstance(notation, Flat) and kind in ("array", "object"):
            raise ValueError("arrays and objects among its arguments")
        shared = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        inner = _unending({**schema, **shared})
        inner = {**inner, "$defs": {**inner.get("$defs", {}), _ANYTHING: _unending({})}}
        if isinstance(notation, Flat):
            return f"{self._literal(f'{key}:')} {as_json(inner)}"
        begin = notation.value.replace("#", "number" if kind == "integer" else str(kind))
        return (
            f"{self._around(begin, key)} {as_json(inner)} {self._around(notation.value_end)} {self._break()}"
        )

    def _text(self, index: int, schema: dict[str, Any]) -> str:
        """A text and what ends it. The reader keeps every byte between both."""
        notation = self._notation
        end = notation.quote if isinstance(notation, Flat) else notation.text_end.removesuffix("\n")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        patterned = "pattern" in schema and isinstance(notation, Pieces)
        if unknown := set(schema) - _ANNOTATIONS - {"enum", "const"} - ({"pattern"} if patterned else set()):
            raise ValueError(f"{min(unknown)[:64]} of a text")
        rest = self._literal(end)
        mark = end.strip()
        if values is not None:
            barred = [one for one in (mark, self._end) if one]
            if not all(
                isinstance(value, str) and not any(one in value for one in barred) for value in values
            ):
                raise ValueError("an enum of other texts than a call can hold")
            return f"({' | '.join(self._literal(value) for value in values)}) {rest} {self._break()}"
        name = f"TEXT_{self._name}_{index}".upper()
        barred = [re.escape(self._end)] * bool(self._end)
        if "<[" in rest:  # a special token, which is no text
            self.rules.append(f"{name}: /(?s:.*)/{_without([re.escape(mark), *barred])}")
            return f"{name} {rest} {self._break()}"
        ended, whole = (
            re.escape(mark).replace("/", r"\/"),
            re.escape(end).replace("/", r"\/").replace("\\\n", r"\n"),
        )
        held = self._pattern(schema["pattern"], whole) if patterned else f"/(?s:.*){whole}/"
        self.rules.append(f"{name}: {held} & ~/(?s:.*{ended}.+)/{_without(barred)}")
        return f"{name} {self._break()}"

    def _pattern(self, pattern: Any, ended: str) -> str:
        """Matches a text and its end."""
        pattern = _a(str, pattern)
        if not (pattern.startswith("^") and pattern.endswith("$")):
            raise ValueError("a pattern of a text that is not anchored by ^ and $")
        body = re.sub(
            r"(\\.)|/|\n", lambda found: found[1] or {"/": r"\/", "\n": r"\n"}[found[0]], pattern[1:-1]
        )
        return f"/(?:{body}){ended}/"

    def _break(self) -> str:
        """The line break behind an argument, which may be missing."""
        return BREAK if isinstance(self._notation, Pieces) and self._notation.text_end.endswith("\n") else ""

    def _around(self, text: str, key: str = "") -> str:
        """Matches what stands around an argument. Line breaks inside may be missing; one beside a text may
        not, for the text might begin or end with another."""
        filled = text.replace("%s", key).removesuffix("\n") if key == "" else text.replace("%s", key)
        begin, end = "\n" * filled.startswith("\n"), "\n" * filled.endswith("\n")
        parts = filled.removeprefix(begin).removesuffix(end).split("\n")
        inner = f" {BREAK} ".join(self._literal(part) for part in parts)
        return " ".join(part for part in (self._literal(begin), inner, self._literal(end)) if part)


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
    _narrow_kinds(made)
    return made


def _narrow_kinds(made: dict[str, Any]) -> None:
    """As `_unending`, by the kinds of values that a schema allows."""
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
