"""The grammars of custom tools, in Lark or as a regex, as the pattern of one text.

A model writes the input of a custom tool as a text within a call. Most calls are JSON, which has several
forms of each character. Therefore a grammar has to be regular: no rule may lead to itself. That of Codex's
`apply_patch` is. Regexes are Rust's, as llguidance reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sealring.api.fields import bad
from sealring.mesh.prompt.tools import MAX_SCHEMA_BYTES

MAX_PATTERN = MAX_SCHEMA_BYTES // 4
_MAX_DEPTH = 32

_COMMON = {
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_INT": "[+-]?[0-9]+",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Lark's `common` terminals."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|(?://|\#)[^\n]*|\n\s*(?=\||\n|\Z|//))|(?P<line>\n\s*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[0-9]+)|(?P<mark>->|\.\.|[][():|?*+~!%,.])""",
    re.VERBOSE,
)

_Token = tuple[str, str]


def pattern_of(form: dict[str, Any], param: str) -> str:
    """The pattern, anchored at both ends, of a custom tool's `format`; empty where its input is any text.

    Raises InvalidInput (BAD_FIELD).
    """
    kind, syntax, definition = (form.get(name) for name in ("type", "syntax", "definition"))
    if kind in (None, "text"):
        return ""
    if kind != "grammar" or syntax not in ("lark", "regex"):
        raise bad(f"{param}.syntax", "formats are text, or a grammar in lark or regex")
    if not isinstance(definition, str) or not 0 < len(definition) <= MAX_PATTERN:
        raise bad(f"{param}.definition", f"it is not a text of 1 to {MAX_PATTERN} characters")
    try:
        found = definition if syntax == "regex" else _Lark(definition).pattern()
    except ValueError as error:
        raise bad(f"{param}.definition", str(error)) from None
    return f"^(?:{found})$"


class _Lark:
    """One grammar: its rules, and each of them once as a regex."""

    def __init__(self, source: str) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._made: dict[str, str] = {}
        self._within: list[str] = []
        self._brackets = 0  # open, over all rules
        for line in _lines(source):
            if line[0] == ("mark", "%"):
                self._import(line)
            else:
                name, body = _definition(line)
                self._rules[name] = body

    def pattern(self) -> str:
        """Raises ValueError, which says what cannot be kept."""
        return self._rule("start")

    def _import(self, line: list[_Token]) -> None:
        told = [text for _, text in line]
        if told[1:4] != ["import", "common", "."] and told[1:4] != ["import", "common", "("]:
            raise ValueError(f"%{told[1][:32] if told[1:] else ''} is not supported, but %import common")
        names = [text for kind, text in line[4:] if kind == "name"]
        known = names[-1] if "->" in told else names[0] if names else ""
        for name in names[:1] if "->" in told else names:
            if name not in _COMMON:
                raise ValueError(f"common.{name[:64]} is not known")
            self._made[known if "->" in told else name] = _COMMON[name]

    def _rule(self, name: str) -> str:
        if name not in self._made:
            if name in self._within or len(self._within) > _MAX_DEPTH:
                raise ValueError(f"its rule {name[:64]} comes to itself or goes too deep")
            if name not in self._rules:
                raise ValueError(f"it has no rule {name[:64]}")
            self._within.append(name)
            rest = self._rules[name][::-1]
            made = self._choice(rest)
            if rest:
                raise ValueError(f"its rule {name[:64]} is malformed at {rest[-1][1][:32]}")
            self._within.pop()
            self._made[name] = f"(?:{made})"
        return self._made[name]

    def _choice(self, rest: list[_Token]) -> str:
        """Alternatives, up to what cannot belong to them. `rest` is what follows, the next token last."""
        found = [self._sequence(rest)]
        while rest and rest[-1][1] == "|":
            rest.pop()
            found.append(self._sequence(rest))
        if sum(map(len, found)) > MAX_PATTERN:
            raise ValueError(f"it is a pattern of more than {MAX_PATTERN} characters")
        return "|".join(found)

    def _sequence(self, rest: list[_Token]) -> str:
        made = ""
        while rest and (rest[-1][0] in ("string", "regex", "name") or rest[-1][1] in ("(", "[")):
            made += self._item(rest)
            if len(made) > MAX_PATTERN:
                raise ValueError(f"it is a pattern of more than {MAX_PATTERN} characters")
        if rest and rest[-1][1] == "->":  # what the tree is to call it
            rest.pop()
            _take(rest, "name")
        return made

    def _item(self, rest: list[_Token]) -> str:
        kind, text = rest.pop()
        if kind == "name":
            made = self._rule(text)
        elif kind == "regex":
            body, flags = text[1 : text.rindex("/")], text[text.rindex("/") + 1 :].replace("u", "")
            if "l" in flags:
                raise ValueError("the flag l is not supported")
            made = f"(?{flags}:{body})"
        elif kind == "string":
            made = _quoted(text)
            if rest and rest[-1][1] == "..":
                rest.pop()
                made = _range(text, _take(rest, "string"))
        else:
            if self._brackets == _MAX_DEPTH:
                raise ValueError(f"its brackets go deeper than {_MAX_DEPTH}")
            self._brackets += 1
            inner = self._choice(rest)
            self._brackets -= 1
            if not rest or rest.pop()[1] != {"(": ")", "[": "]"}[text]:
                raise ValueError(f"a {text} is not closed")
            made = f"(?:{inner})" + "?" * (text == "[")
        return f"(?:{made}){self._times(rest)}" if rest and rest[-1][1] in ("?", "*", "+", "~") else made

    def _times(self, rest: list[_Token]) -> str:
        sign = rest.pop()[1]
        if sign != "~":
            return sign
        least = most = _take(rest, "number")
        if rest and rest[-1][1] == "..":
            rest.pop()
            most = _take(rest, "number")
        return f"{{{least},{most}}}"


def _lines(source: str) -> Iterator[list[_Token]]:
    """The tokens of each definition and each directive."""
    line: list[_Token] = []
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise ValueError(f"it is malformed at {source[at : at + 32]}")
        at = found.end()
        kind = str(found.lastgroup)
        if kind == "line" and line:
            yield line
            line = []
        elif kind not in ("line", "space"):
            line.append((kind, found[0]))
    if line:
        yield line


def _definition(line: list[_Token]) -> tuple[str, list[_Token]]:
    """A rule's name and body: `?name.2: ...` is `name`."""
    while line and line[0][1] in ("?", "!"):
        line = line[1:]
    if len(line) > 3 and line[1][1] == "." and line[2][0] == "number":
        line = [line[0], *line[3:]]
    if len(line) < 2 or line[0][0] != "name" or line[1][1] != ":":
        raise ValueError(f"it is malformed at {line[0][1][:32] if line else 'its beginning'}")
    return line[0][1], line[2:]


def _take(rest: list[_Token], kind: str) -> str:
    if not rest or rest[-1][0] != kind:
        raise ValueError(f"a {kind} is missing")
    return rest.pop()[1]


def _range(low: str, high: str) -> str:
    """The characters between two Lark strings of one each, as a regex."""
    first, last = _plain(low), _plain(high)
    if len(first) != 1 or len(last) != 1 or first > last:
        raise ValueError(f"the range {low[:16]}..{high[:16]} is malformed")
    flag = "i" * (low.endswith("i") or high.endswith("i"))
    return f"(?{flag}:[{_escaped(first)}-{_escaped(last)}])"


def _quoted(text: str) -> str:
    """A Lark string as a regex."""
    return f"(?{'i' * text.endswith('i')}:{_escaped(_plain(text))})"


def _escaped(text: str) -> str:
    return re.sub(r"[][\\.^$*+?{}|()#&~/-]", lambda found: "\\" + found[0], text)


def _plain(text: str) -> str:
    """What a Lark string stands for."""
    spelt = re.sub(r"\\x([0-9A-Fa-f]{2})", r"\\u00\1", text.removesuffix("i"))
    try:
        return str(json.loads(spelt, strict=False))
    except ValueError:
        raise ValueError(f"the string {text[:32]} is malformed") from None
