"""Values of arguments as models write them: texts without quotes, JSON and Python's literals.

A text that a schema lets be a string keeps every byte. What does not fit its schema is passed on as it
stands: the tool's own error teaches the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sealring.mesh.prompt.tools import finite

_DECODER = json.JSONDecoder(strict=False, parse_float=finite, parse_constant=finite)
_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^\s,:=()\[\]{}'\"]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_MOST = 64  # levels of arrays and objects; a tool's arguments have fewer


@dataclass(frozen=True)
class Raw:
    """The text of a value. The schema types it, unless the notation says its kind."""

    text: str
    kind: str = ""
    """`string`, `json` for any other kind, or empty where the notation does not say; `word` where it does not
    but for words of Python, which are no text."""


class Lone(dict[str, "Tree"]):
    """An element `item` by itself: a list of one, unless its schema says that it is an object."""


Tree = Raw | dict[str, "Tree"] | list["Tree"]


@dataclass(frozen=True)
class Written:
    """A call as a model wrote it. Its arguments are a JSON text, or single values. Where there is nothing but
    a word they are None: a call only if the word names a tool."""

    name: str
    arguments: str | dict[str, Tree] | None = field(default_factory=dict)
    id: str = ""


def json_of(value: Tree, schema: Any, root: Any) -> str:
    """The JSON text of a value that a schema describes, which refers to definitions in `root`."""
    if isinstance(value, Raw):
        return dumped(value.text) if value.kind == "string" else _typed(value, schema, root)
    parts = Allowed(schema, root)
    if isinstance(value, Lone) and ("array" in parts.kinds or "object" not in parts.kinds):
        value = list(value.values())
    if isinstance(value, list):
        return "[" + ", ".join(json_of(one, parts.items, root) for one in value) + "]"
    members = (
        f"{dumped(key)}: {json_of(one, parts.properties.get(key, parts.others), root)}"
        for key, one in value.items()
    )
    return "{" + ", ".join(members) + "}"


def _typed(value: Raw, schema: Any, root: Any) -> str:
    parts, text, said = Allowed(schema, root), value.text, value.kind == "json"
    may_be_text = "string" in parts.kinds and not said
    if may_be_text and (parts.kinds == {"string"} or text in parts.values):
        return dumped(text)
    kind, found = literal(text, words=bool(parts.kinds or value.kind))
    if not found:
        empty = {"array": "[]", "object": "{}", "null": "null"} if not text.strip() else {}
        fits = [kind for kind in empty if kind in parts.kinds and not may_be_text]
        return empty[fits[0]] if fits else dumped(text)
    numbers = {"integer", "number"}
    fits_kind = kind in parts.kinds - {"string"} or (kind in numbers and parts.kinds & numbers)
    quoted = kind == "string" and not (said or parts.kinds)
    return dumped(text) if quoted or (may_be_text and not fits_kind) else found


class Allowed:
    """What a schema lets a value be. It has no kinds where it says nothing."""

    def __init__(self, schema: Any, root: Any) -> None:
        self.kinds: set[str] = set()
        self.values: list[Any] = []
        self.properties: dict[str, Any] = {}
        self.items: Any = {}
        self.others: Any = {}
        self._root = root
        self._add(schema, 16)

    def _add(self, schema: Any, levels: int) -> None:
        if not isinstance(schema, dict) or not levels:
            return
        kinds = schema.get("type")
        self.kinds |= {
            kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)
        }
        if schema.get("nullable") is True:
            self.kinds.add("null")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            self.values += values
            if kinds is None:
                self.kinds |= {_KINDS.get(type(value), "null") for value in values}
        if isinstance(found := schema.get("properties"), dict):
            self.properties |= found
        self.items = schema.get("items", self.items)
        self.others = schema.get("additionalProperties", self.others)
        for name in ("anyOf", "oneOf", "allOf"):
            inner = schema.get(name)
            for one in inner if isinstance(inner, list) else ():
                self._add(one, levels - 1)
        self._add(self._target(schema.get("$ref")), levels - 1)

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        found = self._root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def dumped(text: Any) -> str:
    return json.dumps(text, ensure_ascii=False)


def literal(text: str, *, words: bool = True) -> tuple[str, str]:
    """The kind and the JSON text of a value in JSON, or of Python's; both empty where it is neither. Without
    `words`, Python's names of values are none."""
    text = text.strip()
    try:
        value = json.loads(text, parse_float=finite, parse_constant=finite)
        return _KINDS.get(type(value), "null"), text
    except (ValueError, RecursionError):
        pass
    if text in _WORDS:
        return (_KINDS[bool] if text != "None" else "null", _WORDS[text]) if words else ("", "")
    if text[:1] not in _PAIRS:
        return "", ""
    try:
        found, end = python_value(text, 0)
    except (ValueError, IndexError):
        return "", ""
    return ("object" if found[0] == "{" else "array", found) if end == len(text) else ("", "")


def python_value(text: str, at: int, *, escapes: bool = True, level: int = 0) -> tuple[str, int]:
    """The JSON text of the Python value at this place, and where it ends. Raises ValueError, IndexError.

    Without `escapes` the outermost text is in quotes as it is, and ends before what may follow one.
    """
    at = skip(text, at)
    if text[at] in "\"'":
        return _python_text(text, at) if escapes else _quoted(text, at)
    if text[at] not in _PAIRS:
        return _bare(text, at)
    if level == _MOST:
        raise ValueError
    try:  # JSON's own reader is a hundred times as fast; its errors take time in proportion to the whole text
        if level == 0:
            _, end = _DECODER.raw_decode(text, at)
            return json.dumps(_DECODER.decode(text[at:end]), ensure_ascii=False), end
    except (ValueError, RecursionError):
        pass
    return _python_pair(text, at, level)


def _bare(text: str, at: int) -> tuple[str, int]:
    """As `python_value`, of a number or a word."""
    found = _BARE.match(text, at)
    said = found and literal(found[0])[1]
    if found is None or not said:
        raise ValueError
    return said, found.end()


def _python_pair(text: str, at: int, level: int) -> tuple[str, int]:
    """As `python_value`, of what stands in brackets."""
    close, parts, at, keyed = _PAIRS[text[at]], list[str](), skip(text, at + 1), text[at] == "{"
    while text[at] != close:
        said, at = python_value(text, at, level=level + 1)
        at = skip(text, at)
        if keyed:
            if text[at] != ":":
                raise ValueError
            value, at = python_value(text, at + 1, level=level + 1)
            said, at = f"{said if said[0] == chr(34) else dumped(said)}: {value}", skip(text, at)
        parts.append(said)
        if text[at] == ",":
            at = skip(text, at + 1)
        elif text[at] != close:
            raise ValueError
    inner = ", ".join(parts)
    return ("{" + inner + "}" if keyed else "[" + inner + "]"), at + 1


def skip(text: str, at: int) -> int:
    """The end of the blanks at this place."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ENDS = {mark: re.compile(rf"(?:[^\\{mark}]|\\.)*+{mark}", re.DOTALL) for mark in "\"'"}
_SIGN = r"[^\s=(),'\"\[\]{}<>:;+*/%!&|\\]"
_VALUE = rf"(?:[\"'\[({{\d-]|(?:{'|'.join([*_WORDS, *_WORDS.values()])})\b)"
_NAMED = rf"{_SIGN}++(?:\s*+=|(?: ++{_SIGN}++)++\s*+=\s*+{_VALUE})"
"""An argument's name, of any characters but those of code around one. Several words are a name only before a
value: prose in a text has commas and signs of equality, too."""

_UNESCAPED = {mark: re.compile(rf"{mark}(?=\s*(?:\)\s*(?:[,\]]|\Z)|,\s*{_NAMED}))") for mark in "\"'"}


def _python_text(text: str, at: int) -> tuple[str, int]:
    found = _ENDS[text[at]].match(text, at + 1)
    if found is None:
        raise ValueError

    def plain(escaped: re.Match[str]) -> str:
        code = escaped[1] or escaped[2] or escaped[3]
        if code:
            return chr(int(code, 16))
        return _PLAIN.get(escaped[4], escaped[4] if escaped[4] in "\\'\"" else escaped[0])

    said = _ESCAPED.sub(plain, found[0][:-1])
    return dumped(said.encode("utf-16", "surrogatepass").decode("utf-16")), found.end()


def _quoted(text: str, at: int) -> tuple[str, int]:
    found = _UNESCAPED[text[at]].search(text, at + 1)
    if found is None:
        raise ValueError
    return dumped(text[at + 1 : found.start()]), found.end()


@dataclass(frozen=True)
class Member:
    """A member of an object in JSON: what it holds, and how that is written."""

    value: Any
    text: str


def objects(text: str, at: int = 0) -> Iterator[dict[str, Member]]:
    """The objects of a text that holds nothing else but what stands between those of an array. Brackets too
    many and too few are no harm. Raises ValueError, RecursionError."""
    while (at := _between(text, at)) < len(text):
        found, at = members(text, at)
        yield found


_BETWEEN = re.compile(r"[\s,;\[\]}]*+")


def _between(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return at if found is None else found.end()


def members(text: str, at: int) -> tuple[dict[str, Member], int]:
    """The members of the object at this place, whose last bracket may be missing, and where it ends. Raises
    ValueError, RecursionError."""
    if text[at : at + 1] != "{":
        raise ValueError
    found: dict[str, Member] = {}
    at = skip(text, at + 1)
    while at < len(text) and text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = skip(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError
        start = skip(text, at + 1)
        value, at = _DECODER.raw_decode(text, start)
        found[key] = Member(value, text[start:at])
        at = skip(text, at)
        if text[at : at + 1] == ",":
            at = skip(text, at + 1)
        elif at < len(text) and text[at] != "}":
            raise ValueError
    return found, at + 1


def arguments_of(member: Member | None) -> str:
    """The JSON text of a call's arguments. Raises ValueError where they are no object."""
    if member is None or member.value is None or member.value == "":
        return "{}"
    value, text = member.value, member.text
    if isinstance(value, str):  # JSON in a text
        value, text = _DECODER.decode(value.strip()), value.strip()
    if not isinstance(value, dict):
        raise ValueError
    return strictly(value, text)


def strictly(value: Any, text: str) -> str:
    """The text where it is JSON to the letter; else the value's own."""
    try:
        json.loads(text, parse_float=finite, parse_constant=finite)
    except ValueError:
        return dumped(value)
    return text


def named(pattern: str, names: Sequence[str]) -> str:
    """The name among the tools' for one that a model wrote: as it is, or without what a notation cannot hold.
    A name of no tool stays."""
    if pattern in names:
        return pattern
    alike = [name for name in names if _core(name) == _core(pattern)]
    return alike[0] if len(alike) == 1 else pattern


def _core(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", name)
