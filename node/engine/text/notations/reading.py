"""Readers of tool calls: where a call ends while it comes, and what it says once it is whole.

A reader takes time in proportion to the text, in the thread that asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache

from sealring.node.engine.text.notations.notation import (
    KEY,
    LONGEST,
    NAME,
    NOTATIONS,
    OPEN,
    Flat,
    Headed,
    Nested,
    Notation,
    Objects,
    Pieces,
    Python,
    spelt,
    unmarked,
)
from sealring.node.engine.text.notations.values import (
    Lone,
    Member,
    Raw,
    Tree,
    Written,
    arguments_of,
    members,
    objects,
    python_value,
    skip,
)

_SLOT = re.compile(r"(%s|#|```json|```|\s+)")
_JSON_TEXT = r'(?P<open>")'
_JSON_END = re.compile(r'\\.|(?P<close>")', re.DOTALL)
_FIRST = re.compile(r'[\[\s]*(?:\Z|\{\s*(?:\Z|\}|"(?P<key>[^"]*)(?P<whole>"?)))')
_GIVEN = ("arguments", "parameters", "args")
_KEYS = ("name", *_GIVEN, "function", "type", "id", "index", "tool_name", "tool_call_id")
_ID = r"(?P<id>[\w.-]*)"
_TYPES = "(?:string|integer|number|boolean|array|object|null)"
_BRACES = re.compile(r"[\s}]*+")
_LEVELS = re.compile(r'(?P<open>")|[{}]')
_FOLLOWS = re.compile(r"(?P<over>[^\s`])")
_MOST = 32  # levels of objects and arrays


class Reader:
    """Reads one notation in the answers of a model with these special tokens."""

    def __init__(self, notation: Notation, special: frozenset[str]) -> None:
        self.notation = notation
        self._special = special
        self.begin, self.end = self._spelt(notation.begin), self._spelt(notation.end)
        call = notation.call.lstrip()
        before, _, after = call.partition("%s")
        self._prefix = self._spelt(before.partition("#")[0])
        follows = self._spelt(after)[:1]
        blank = follows.isspace() or not follows
        self._named = re.compile(
            rf"{NAME}(?:\s*(?:[`<{{{OPEN}]|\Z))|\Z" if blank else rf"{NAME}(?:{re.escape(follows)}|\Z)|\Z"
        )
        self.bare = self._prefix if notation.bare else ""
        self.bare_end = self._spelt(notation.call_end.strip())
        self.call = [
            re.compile(rf"\s*{self._pattern(form.strip())}\s*") for form in (notation.call, *notation.also)
        ]
        self.call_end = re.compile(rf"\s*{self._pattern(notation.call_end.strip(), None)}")
        self.opens, self.closes = "", _JSON_END
        """What begins and ends a part of a call in which no marker counts."""
        self.longest = 2 * max(map(len, (self.begin, self.end, self._prefix, self.bare_end)), default=0) + 16
        """Characters of the longest marker."""

    def begins(self, text: str) -> bool:
        """Whether a call may begin like this."""
        text = text.lstrip()
        if len(text) <= len(self._prefix):
            return self._prefix.startswith(text)
        return text.startswith(self._prefix) and self._named.match(text, len(self._prefix)) is not None

    def read(self, text: str) -> list[Written] | None:
        """The calls between `begin` and `end`; None where these are none that can be read."""
        try:
            return list(self._read(text)) or None
        except (ValueError, IndexError, RecursionError):
            return None

    def _read(self, text: str) -> Iterator[Written]:
        raise NotImplementedError

    def _head(self, text: str, at: int) -> re.Match[str]:
        found = next((one for form in self.call if (one := form.match(text, at))), None)
        if found is None:
            raise ValueError
        return found

    def _spelt(self, text: str) -> str:
        return spelt(text, self._special)

    def _pattern(self, text: str, name: str | None = NAME) -> str:
        """Matches a text whose blanks and fences may be missing, with a group for the name in it."""
        kinds = {
            "%s": f"(?P<name>{name})",
            "#": _ID,
            "```json": "(?:```(?:json)?)?",
            "```": "(?:```)?",
        }
        parts = _SLOT.split(self._spelt(text))
        return "".join(kinds.get(one, r"\s*" if one.isspace() else re.escape(one)) for one in parts if one)


class ObjectReader(Reader):
    def __init__(self, notation: Objects, special: frozenset[str]) -> None:
        super().__init__(notation, special)
        self._keyed = notation.keyed
        self.opens = _JSON_TEXT

    def begins(self, text: str) -> bool:
        found = _FIRST.match(text)
        if found is None:
            return False
        key, whole = found["key"], found["whole"]
        return (
            key is None
            or self._keyed
            or (key in _KEYS if whole else any(one.startswith(key) for one in _KEYS))
        )

    def _read(self, text: str) -> Iterator[Written]:
        yield from _objects(unmarked(text), keyed=self._keyed)


def _objects(text: str, *, keyed: bool = False) -> Iterator[Written]:
    for found in objects(text):
        if keyed:
            for key, member in found.items():
                yield Written(key, arguments_of(member))
            continue
        inner = found.get("function")
        if inner is not None and isinstance(inner.value, dict):
            found |= members(inner.text, 0)[0]
        name = _first(found, "name", "tool_name", "function")
        given = _first(found, *_GIVEN)
        if name is None or not isinstance(name.value, str):
            raise ValueError
        if given is None and not found.keys() <= set(_KEYS):  # whose members may be the arguments
            raise ValueError
        identity = _first(found, "id")
        given_id = identity.value if identity is not None and isinstance(identity.value, str) else ""
        yield Written(name.value, arguments_of(given), given_id)


def _put(found: dict[str, Tree], key: str, value: Tree) -> None:
    """Raises ValueError where the key has a value: nothing says which of both is meant."""
    if found.setdefault(key, value) is not value:
        raise ValueError


def _first(found: Mapping[str, Member], *names: str) -> Member | None:
    return next((found[name] for name in names if name in found), None)


class HeadedReader(Reader):
    def __init__(self, notation: Headed, special: frozenset[str]) -> None:
        super().__init__(notation, special)
        self.opens = _JSON_TEXT

    def begins(self, text: str) -> bool:
        return not self._prefix or super().begins(text)

    def _read(self, text: str) -> Iterator[Written]:
        if not self._prefix and text.lstrip()[:1] in ("{", "["):
            yield from _objects(unmarked(text))
            return
        at = skip(text, 0)
        while at < len(text):
            head = self._head(text, at)
            at = head.end()
            arguments = "{}"
            if text[at : at + 1] == "{" or not self._prefix:
                found, end = members(text, at)
                value = {key: member.value for key, member in found.items()}
                arguments, at = arguments_of(Member(value, unmarked(text[at:end]))), end
            braces = _BRACES.match(text, at)
            at = at if braces is None else braces.end()
            if (end_of := self.call_end.match(text, at)) is not None:
                at = end_of.end()
            at = skip(text, at)
            yield Written(head["name"], arguments, head.groupdict().get("id") or "")


class PieceReader(Reader):
    def __init__(self, notation: Pieces, special: frozenset[str]) -> None:
        super().__init__(notation, special)
        self._notation = notation
        self.longest = LONGEST
        forms = (
            [(notation.text, "string"), (notation.value, "json")]
            if notation.kinds
            else [(notation.value, "")]
        )
        self._forms = [(re.compile(rf"\s*{self._opening(form)}"), kind) for form, kind in forms]
        ends = {self._ending(end) for end in (notation.text_end, notation.value_end)}
        follows = [
            self._spelt(notation.value.partition("%s")[0]),
            self._prefix,
            self._spelt(notation.call_end.strip()),
        ]
        next_ = "|".join(re.escape(one) for one in follows if one)
        ending = "|".join(sorted(ends, key=len, reverse=True))
        self._value_end = re.compile(rf"(?:{ending})(?=\s*(?:{next_}|\Z))")
        self.opens = "(?P<open>" + "|".join(self._opening(form, groups=False) for form, _ in forms) + ")"
        self.closes = re.compile(rf"(?P<close>(?:{ending})(?=\s*(?:{next_}|{re.escape(self.end)})))")

    def _opening(self, form: str, *, groups: bool = True) -> str:
        pad = r"\n?" if form.endswith("\n") else ""
        found = self._pattern(form.strip(), KEY)
        found = found.replace(_ID, _TYPES)
        return (found if groups else found.replace("(?P<name>", "(?:")) + pad

    def _ending(self, form: str) -> str:
        return (r"\n?" if form.startswith("\n") else "") + self._pattern(form.strip(), None)

    def _read(self, text: str) -> Iterator[Written]:
        at = skip(text, 0)
        while at < len(text):
            head = self._head(text, at)
            arguments: dict[str, Tree] = {}
            at = head.end()
            while (opened := self._open(text, at)) is not None:
                found, kind = opened
                end = self._value_end.search(text, found.end())
                if end is None:
                    raise ValueError
                said = unmarked(text[found.end() : end.start()])
                _put(arguments, self._plain(found["name"]), self._value(said, kind))
                at = end.end()
            at = skip(text, at)
            if self.bare_end and (closed := self.call_end.match(text, at)) is not None:
                at = skip(text, closed.end())
            name, given = self._plain(head["name"]), head.groupdict().get("id") or ""
            if not arguments and text[at : at + 1] == "{":
                members_, end_at = members(text, at)
                yield Written(name, {key: Raw(one.text, "json") for key, one in members_.items()})
                at = skip(text, end_at)
                continue
            word = not arguments and not self._prefix
            yield Written(name, None if word else arguments, "" if self._notation.escaped else given)

    def _open(self, text: str, at: int) -> tuple[re.Match[str], str] | None:
        return next(((found, kind) for form, kind in self._forms if (found := form.match(text, at))), None)

    def _plain(self, name: str) -> str:
        return name.replace("&quot;", '"').replace("&amp;", "&") if self._notation.escaped else name

    def _value(self, said: str, kind: str) -> Raw:
        inner = said.strip()
        if self._notation.cdata and inner.startswith("<![CDATA[") and inner.endswith("]]>"):
            return Raw(inner[9:-3], "string")
        return Raw(said, kind)


class FlatReader(Reader):
    def __init__(self, notation: Flat, special: frozenset[str]) -> None:
        super().__init__(notation, special)
        self._quote = self._spelt(notation.quote)
        quote = re.escape(self._quote)
        self._quote_end = re.compile(rf"{quote}(?=\s*(?:[,:}}\]]|\Z))")
        self._bare_value = re.compile(r"[^,{}\[\]]*")
        self._key = re.compile(rf"([^:{{}},{OPEN}]+):")
        self.opens = f"(?P<open>{quote})"
        self.closes = re.compile(rf"(?P<close>{quote})(?=\s*[,:}}\]])")

    def _read(self, text: str) -> Iterator[Written]:
        at = skip(text, 0)
        while at < len(text):
            head = self._head(text, at)
            inner, at = self._object(text, head.end(), 0)
            at = skip(text, at)
            yield Written(head["name"], inner)

    def _object(self, text: str, at: int, level: int) -> tuple[dict[str, Tree], int]:
        """The members from behind the bracket."""
        found: dict[str, Tree] = {}
        at = skip(text, at)
        while text[at] != "}":
            if text.startswith(self._quote, at):
                key, at = self._text(text, at)
                at = skip(text, at)
                if text[at] != ":":
                    raise ValueError
                at += 1
            elif (named := self._key.match(text, at)) is not None:
                key, at = named[1].strip(), named.end()
            else:
                raise ValueError
            value, at = self._any(text, at, level)
            _put(found, key, value)
            at = self._on(text, at, "}")
        return found, at + 1

    def _any(self, text: str, at: int, level: int) -> tuple[Tree, int]:
        at = skip(text, at)
        if text.startswith(self._quote, at):
            said, at = self._text(text, at)
            return Raw(said, "string"), at
        if level == _MOST:
            raise ValueError
        if text[at] == "{":
            return self._object(text, at + 1, level + 1)
        if text[at] == "[":
            items: list[Tree] = []
            at = skip(text, at + 1)
            while text[at] != "]":
                item, at = self._any(text, at, level + 1)
                items.append(item)
                at = self._on(text, at, "]")
            return items, at + 1
        bare = self._bare_value.match(text, at)
        if bare is None:
            raise ValueError
        return Raw(unmarked(bare[0]).strip(), "word"), bare.end()

    def _text(self, text: str, at: int) -> tuple[str, int]:
        start = at + len(self._quote)
        end = self._quote_end.search(text, start)
        if end is None:
            raise ValueError
        return unmarked(text[start : end.start()]), end.end()

    def _on(self, text: str, at: int, close: str) -> int:
        at = skip(text, at)
        if text[at] == ",":
            return skip(text, at + 1)
        if text[at] != close:
            raise ValueError
        return at


class NestedReader(Reader):
    def __init__(self, notation: Nested, special: frozenset[str]) -> None:
        super().__init__(notation, special)
        self._tag = re.compile(rf"{re.escape(self._spelt(notation.mark))}<(/?)({KEY})>")

    def _read(self, text: str) -> Iterator[Written]:
        at = skip(text, 0)
        while at < len(text):
            head = self._head(text, at)
            inner, at = self._element(text, head.end(), "invoke", 0)
            at = skip(text, at)
            if isinstance(inner, Raw) and inner.text.strip():
                raise ValueError
            yield Written(head["name"], dict(inner) if isinstance(inner, dict) else {})

    def _element(self, text: str, at: int, name: str, level: int) -> tuple[Tree, int]:
        """What is in an element from behind its tag: a text, or elements and blanks between them."""
        if level == _MOST:
            raise ValueError
        found, said, start = list[tuple[str, Tree]](), False, at
        while (tag := self._tag.search(text, at)) is not None:
            said = said or bool(text[at : tag.start()].strip())
            if tag[1] and tag[2] == name:
                if found and said:
                    raise ValueError
                return _element(found, unmarked(text[start : tag.start()])), tag.end()
            key = tag[1] + tag[2]  # a name may begin with a slash
            inner, at = self._element(text, tag.end(), key, level + 1)
            found.append((key, inner))
        raise ValueError


def _element(found: list[tuple[str, Tree]], text: str) -> Tree:
    if not found:
        return Raw(text)
    if len(found) > 1 and all(name == "item" for name, _ in found):
        return [one for _, one in found]
    members_: dict[str, Tree] = Lone() if [name for name, _ in found] == ["item"] else {}
    for name, one in found:
        _put(members_, name, one)
    return members_


class PythonReader(Reader):
    def __init__(self, notation: Python, special: frozenset[str]) -> None:
        super().__init__(notation, special)
        self._escapes = notation.escapes
        self._call = re.compile(rf"\s*({NAME})\(\s*")
        self._name = re.compile(r"\s*([^\s=(),'\"][^\n=(),'\"]{0,255}?)\s*=")

    def begins(self, text: str) -> bool:
        return text.lstrip()[:1] in ("", "[", "{")

    def _read(self, text: str) -> Iterator[Written]:
        text = unmarked(text).strip()
        if text.startswith(("[{", "{")):
            yield from _objects(text)
            return
        at, end = (1, len(text) - text.endswith("]")) if text.startswith("[") else (0, len(text))
        while (at := skip(text, at)) < end:
            head = self._call.match(text, at)
            if head is None:
                raise ValueError
            arguments: dict[str, Tree] = {}
            at = head.end()
            while text[at] != ")":
                name = self._name.match(text, at)
                if name is None:
                    raise ValueError
                said, at = python_value(text, name.end(), escapes=self._escapes)
                _put(arguments, name[1], Raw(said, "json"))
                at = skip(text, at)
                at = skip(text, at + 1) if text[at] == "," else at
            at = skip(text, at + 1)
            yield Written(head[1], arguments)
            at += text[at : at + 1] == ","


_READERS: dict[type[Notation], Callable[..., Reader]] = {
    Objects: ObjectReader,
    Headed: HeadedReader,
    Pieces: PieceReader,
    Flat: FlatReader,
    Nested: NestedReader,
    Python: PythonReader,
}


@lru_cache(maxsize=64)
def reader_of(name: str, special: frozenset[str]) -> Reader:
    """The reader of a notation for a model with these special tokens."""
    notation = NOTATIONS[name]
    return _READERS[type(notation)](notation, special)


class Ending:
    """Finds the end of a call while it comes: no marker in one of its texts is an end."""

    def __init__(self, reader: Reader, *, bare: bool, over: str = "") -> None:
        """`bare` for a call without its beginning; `over` ends the thoughts in which it stands."""
        end = [reader.end, reader.bare_end if bare else ""]
        kinds = {"end": [one for one in end if one], "again": [reader.begin], "over": [over]}
        marks = [
            f"(?P<{kind}>{'|'.join(map(re.escape, texts))})" for kind, texts in kinds.items() if any(texts)
        ]
        self._marks = re.compile("|".join([*filter(None, [reader.opens]), *marks]))
        self._closes, self._longest = reader.closes, max(reader.longest, 2 * len(over))
        self._inside = False

    def find(self, held: str) -> tuple[int, re.Match[str] | None]:
        """How much of a text belongs to the call for certain, and the marker that stands there. The text
        begins where the one before was cut."""
        at = 0
        while (found := (self._closes if self._inside else self._marks).search(held, at)) is not None:
            if found.lastgroup not in ("open", "close", None):
                return found.start(), found
            if found.lastgroup is not None:
                self._inside = not self._inside
            at = found.end()
        return max(at, len(held) - self._longest), None


class Alone:
    """Reads an object that is a call because it is all of an answer, fenced or not: it has the name of a tool
    and arguments, in this order and nothing else."""

    def __init__(self, begun: str) -> None:
        """`begun` is the first character, which is read."""
        self._level, self._inside, self._closed = int(begun == "{"), False, False

    @staticmethod
    def begins(text: str, names: Collection[str]) -> bool | None:
        """Whether a text begins such an answer; None where it is too short to say."""
        if text[:1] not in ("{", "`"):
            return False
        told = "".join(text[:LONGEST].split())
        forms = [
            f'{fence}{{"name":"{name}","{key}":{{'
            for fence in ("", "```", "```json")
            for name in names
            for key in _GIVEN
        ]
        if told.startswith(tuple(forms)):
            return True
        return None if len(text) < LONGEST and any(form.startswith(told) for form in forms) else False

    def find(self, held: str) -> tuple[int, re.Match[str] | None]:
        """As `Ending.find`. The one marker is what follows the object and is no fence."""
        at = 0
        while not self._closed and (found := (_JSON_END if self._inside else _LEVELS).search(held, at)):
            at = found.end()
            if found[0] in "{}":
                self._level += 1 if found[0] == "{" else -1
                self._closed = self._level <= 0
            elif found.lastgroup is not None:
                self._inside = not self._inside
        if self._closed:
            follows = _FOLLOWS.search(held, at)
            return (len(held), None) if follows is None else (follows.start(), follows)
        return max(at, len(held) - 1), None  # a backslash stays with what it escapes

    def read(self, text: str) -> list[Written] | None:
        """As `Reader.read`."""
        if not self._closed:
            return None
        text = text.strip()
        if text.startswith("```"):
            text = text.removeprefix("```").removeprefix("json").removesuffix("```")
        try:
            (found,) = objects(text)
            name, given = found.values()
            return [Written(name.value, arguments_of(given))]
        except (ValueError, RecursionError):
            return None
