"""What becomes of each field of a body: one table for each API, one line for each field.

A table says as what a field is taken, when it asks for nothing, or why it is refused. A field without a line
is refused, unless its value asks for nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from sealring.mesh.errors import InvalidInput, SealringError

MAX_STRING = 256

NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""What a field that nobody knows may say."""

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Rule:
    """What becomes of one field; null always asks for nothing."""

    taken_as: str = ""
    """The field of the chat's body that asks the same."""

    convert: Callable[[Any, str], Any] | None = None
    """Makes that field's value from this one's value and name. Raises InvalidInput."""

    spread: Callable[[Any, str], dict[str, Any]] | None = None
    """Makes several fields of the chat's body from this one's value and name. Raises InvalidInput."""

    parts: Rules | None = None
    """The table of an object's own fields."""

    own: bool = False
    """The API's own code reads it."""

    ignored_when: tuple[Any, ...] | None = ()
    """Values that ask for nothing; None: all."""

    refused_because: str = ""
    """The hint to a client that sends any other value."""

    schema: Mapping[str, Any] | None = None
    """The JSON Schema of the value that clients send, where it differs from that of the chat's field."""

    def asks_nothing(self, item: Any) -> bool:
        """Whether this value is taken and means nothing."""
        if item is None or self.ignored_when is None:
            return True
        return any(_same(item, value) for value in self.ignored_when)

    @property
    def refuses(self) -> bool:
        """Whether a value that asks for something is refused."""
        return not (self.taken_as or self.spread or self.parts is not None or self.own)


Rules: TypeAlias = Mapping[str, Rule]

_NAMED: dict[str, str] = {}
"""Fields at the top of bodies, with an API that has each."""


def table(api: str, rules: Rules) -> Rules:
    """The rules of an API's body. Other APIs then refuse its fields by name."""
    for name in rules:
        _NAMED.setdefault(name, api)
    return rules


BOOKKEEPING = Rule(ignored_when=None)
"""No answer depends on it here."""


def taken_as(
    name: str, convert: Callable[[Any, str], Any] | None = None, *ignored: Any, **schema: Any
) -> Rule:
    """The rule of a field that asks the same as the chat's field of this name."""
    return Rule(name, convert, ignored_when=ignored, schema=schema or None)


def same(*names: str) -> dict[str, Rule]:
    """The rules of fields that ask the same as the chat's fields of these names, in one order for any set."""
    return {name: Rule(name) for name in sorted(names)}


def own(**schema: Any) -> Rule:
    """The rule of a field that the API's own code reads."""
    return Rule(own=True, schema=schema)


def only(*values: Any, because: str = "") -> Rule:
    """The rule of a field that would change the answer, and does not with these values."""
    return Rule(ignored_when=values, refused_because=because)


@dataclass
class Translated:
    """The fields of a chat's body that ask the same as another API's body.

    `names` tells which field of that body each comes from, by the beginnings of their paths.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    loaded: set[str] = field(default_factory=set)
    """Tools that are defined in a message; the chat's template is not shown them."""

    def put(self, name: str, item: Any, source: str) -> None:
        """Sets a field of the chat's body. Raises InvalidInput (BAD_FIELD) where two fields disagree."""
        before = self.fields.get(name)
        if isinstance(before, dict) and isinstance(item, dict):
            item = {**before, **item}
        elif before is not None and before != item:
            raise bad(source, f"{self.names[name]} asks for something else")
        self.fields[name] = item
        self.names[name] = source

    def add_message(
        self, message: dict[str, Any], source: str, parts: Mapping[str, str] | None = None
    ) -> None:
        """Appends a message of the chat; `parts` are paths inside it, with those where they come from."""
        messages = self.fields.setdefault("messages", [])
        place = f"messages[{len(messages)}]"
        messages.append(message)
        self.names[place] = source
        for inside, path in (parts or {}).items():
            self.names[f"{place}.{inside}"] = path

    def go_on(self) -> None:
        """Has the answer go on behind the last message, if that is a text of the assistant."""
        last = (self.fields.get("messages") or [{}])[-1]
        if last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls"):
            self.fields["continue_final_message"] = True

    def add_tool(self, function: dict[str, Any], source: str, parts: Mapping[str, str]) -> None:
        """Appends a function; `parts` are its fields that have another name there."""
        tools = self.fields.setdefault("tools", [])
        place = f"tools[{len(tools)}]"
        tools.append({"type": "function", "function": function})
        self.names |= {place: source, f"{place}.function": source}
        for name, other in parts.items():
            self.names |= {
                f"{place}.{name}": f"{source}.{other}",
                f"{place}.function.{name}": f"{source}.{other}",
            }

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Gives errors the names that the client knows."""
        try:
            yield
        except SealringError as error:
            raise renamed(error, self.names) from None


def translate(
    value: dict[str, Any], rules: Rules, inside: str = "", into: Translated | None = None
) -> Translated:
    """The fields of a chat's body that ask what this body does, but for those that the API reads itself.

    Raises InvalidInput with `param`: UNSUPPORTED_FIELD, UNKNOWN_FIELD, BAD_FIELD.
    """
    made = into or Translated()
    for name, item in value.items():
        path, rule = f"{inside}{name[:64]}", rules.get(name)
        if rule is None:
            if not any(_same(item, nothing) for nothing in NOTHING):
                raise unknown(path)
        elif rule.own or rule.asks_nothing(item):
            continue
        elif rule.taken_as:
            made.put(rule.taken_as, rule.convert(item, path) if rule.convert else item, path)
        elif rule.spread is not None:
            for taken, one in rule.spread(item, path).items():
                made.put(taken, one, path)
        elif rule.parts is not None:
            translate(as_object(item, path), rule.parts, f"{path}.", made)
        else:
            raise unsupported(path, rule.refused_because)
    return made


class Body(BaseModel):
    """A part of a body: of the right types, with no fields but those that are known or have a rule."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    rules: ClassVar[Rules] = {}
    """Rules for fields that are not attributes of the class."""

    @model_validator(mode="before")
    @classmethod
    def _by_rules(cls, value: Any) -> Any:
        known = _field_names(cls)
        if not isinstance(value, dict) or value.keys() <= known:
            return value
        found = {name: item for name, item in value.items() if name in known}
        for name, item in value.items():
            rule = cls.rules.get(name)
            if name in known:
                continue
            if rule is None:
                if not any(_same(item, nothing) for nothing in NOTHING):
                    found[name] = item  # is refused as unknown
            elif not rule.asks_nothing(item):
                _apply(rule, name, item, known, found)
        return found

    @classmethod
    def names(cls, value: dict[str, Any]) -> dict[str, str]:
        """Fields of a body that stand for others, by the names of those others."""
        found: dict[str, str] = {}
        for name, item in value.items():
            rule = cls.rules.get(name)
            if rule is not None and name not in _field_names(cls):
                with suppress(InvalidInput):
                    found |= translate({name: item}, {name: rule}).names
        return {name: source for name, source in found.items() if name not in value}


def _apply(rule: Rule, name: str, item: Any, known: frozenset[str], found: dict[str, Any]) -> None:
    """Puts what a field with a rule is taken as to the fields that were `found`."""
    made = Translated(found, dict.fromkeys(found, ""))
    try:
        translate({name: item}, {name: rule}, into=made)
    except InvalidInput as error:
        raise PydanticCustomError("ruled", "refused", {"error": error}) from None
    if not made.fields.keys() <= known:
        raise PydanticCustomError("ruled", "refused", {"error": unsupported(name)})


@functools.cache
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(each.alias or name for name, each in model.model_fields.items())


def check_body(value: dict[str, Any], model: type[B]) -> B:
    """Raises InvalidInput with `param`: UNSUPPORTED_FIELD, UNKNOWN_FIELD, BAD_FIELD, MISSING_FIELD."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_error(error) from None


def renamed(error: SealringError, names: Mapping[str, str]) -> SealringError:
    """The error with the client's own name of the field in its message and metadata."""
    param = error.metadata.get("param", "")
    name = path_of(param, names)
    if name == param:
        return error
    told = copy.copy(error)
    told.message = error.message.replace(param, name, 1)
    told.args = (told.message,)
    told.metadata = {**error.metadata, "param": name}
    return told


def path_of(path: str, names: Mapping[str, str]) -> str:
    """The client's own path of a field, by the longest beginning that has a name."""
    begin = max((one for one in names if _begins(path, one)), key=len, default=None)
    return path if begin is None else names[begin] + path[len(begin) :]


def _begins(path: str, begin: str) -> bool:
    return path.startswith(begin) and path[len(begin) :][:1] in ("", ".", "[")


def bad(param: str, why: str) -> InvalidInput:
    """The refusal of a field that is malformed."""
    return InvalidInput(f"{param} is refused: {why}", reason="BAD_FIELD", param=param)


def as_object(value: Any, param: str) -> dict[str, Any]:
    """Raises InvalidInput (BAD_FIELD)."""
    if not isinstance(value, dict):
        raise bad(param, "it is not an object")
    return value


def as_list(value: Any, param: str) -> list[Any]:
    """Raises InvalidInput (BAD_FIELD)."""
    if not isinstance(value, list):
        raise bad(param, "it is not a list")
    return value


def as_text(value: Any, param: str) -> str:
    """Raises InvalidInput (BAD_FIELD)."""
    if not isinstance(value, str):
        raise bad(param, "it is not a text")
    return value


def unsupported(name: str, hint: str = "") -> InvalidInput:
    """The refusal of what would change the answer."""
    return InvalidInput(
        f"{name} is not supported", hint=hint or f"leave {name} out", reason="UNSUPPORTED_FIELD", param=name
    )


def unknown(name: str) -> InvalidInput:
    """The refusal of a field without a rule."""
    import sealring.api.whole  # noqa: F401  # the tables of all APIs, whichever is in use

    if name in _NAMED:
        return unsupported(name, f"it is a field of {_NAMED[name]}, and not of this API")
    return InvalidInput(
        f"unknown field {name!r}", hint="check its spelling", reason="UNKNOWN_FIELD", param=name
    )


def _same(item: Any, value: Any) -> bool:
    """Equal, and of one type; 1 and 1.0 are."""
    numbers = (int, float)
    alike = type(item) in numbers if type(value) in numbers else type(item) is type(value)
    return alike and bool(item == value)


def _first_error(error: ValidationError) -> InvalidInput:
    errors = error.errors(include_input=False, include_url=False)
    first = max(errors, key=lambda each: (not _of_type(each["type"]), len(each["loc"])))
    param = _param(first["loc"])
    if first["type"] == "ruled":
        ruled: InvalidInput = first["ctx"]["error"]
        name = ruled.metadata["param"]
        told = renamed(ruled, {name: f"{param}.{name}" if param else name})
        assert isinstance(told, InvalidInput)
        return told
    if first["type"] == "extra_forbidden":
        return unknown(param)
    if first["type"] == "missing":
        return InvalidInput(f"{param} is missing", reason="MISSING_FIELD", param=param)
    said = first["msg"][:1].lower() + first["msg"][1:]
    return InvalidInput(f"{param} is refused: {said}", reason="BAD_FIELD", param=param)


def _of_type(kind: str) -> bool:
    """Whether an error is of a value's type. The branches of a union that a value is not meant for have such
    errors alone."""
    return kind == "missing" or kind.endswith("_type")


def _param(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; the names of a union's branches and token ids are left out."""
    param = ""
    if location and location[0] == "logit_bias":
        return "logit_bias"
    for part in location:
        if isinstance(part, int):
            param += f"[{part}]"
        elif "[" not in part and part not in ("str", "constrained-str", "NamedTool", "Document"):
            param += f".{part[:64]}" if param else part[:64]
    return param[:128]
