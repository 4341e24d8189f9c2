"""A request's schema as a grammar holds an answer to it."""

from __future__ import annotations

from typing import Any

_LISTS = ("anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ONES = ("items", "additionalProperties", "contains")
_OTHERS = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
_JOINED = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Those that llguidance's grammars hold."""


def closed(schema: Any, *, tool: bool = False) -> Any:
    """The schema with objects closed that name properties and say nothing of others, which a model would make
    up. The arguments of a `tool` are closed without properties as well.

    It lacks keywords that say nothing: a `propertyNames` for every name, and formats that no grammar
    knows, which are annotations (JSON Schema 2020-12, Validation, 7.2.1).
    """
    joined = isinstance(schema, dict) and _mentions(schema, "allOf")
    return _closed(schema, 64, tool=tool, definitions=not joined)


def _closed(
    schema: Any, levels: int, *, tool: bool = False, definitions: bool = True, inside: bool = False
) -> Any:
    """`inside` an allOf, where another part may have properties of its own, nothing is closed."""
    if not isinstance(schema, dict) or not levels:
        return schema
    made = dict(schema)
    if made.get("propertyNames") in ({}, True, {"type": "string"}):
        del made["propertyNames"]
    if isinstance(made.get("format"), str) and made["format"] not in _FORMATS:
        del made["format"]
    for name in (*_LISTS, "allOf"):
        if isinstance(found := made.get(name), list):
            below = inside or name == "allOf" or (name != "prefixItems" and "properties" in made)
            made[name] = [_closed(one, levels - 1, definitions=definitions, inside=below) for one in found]
    for name in _MAPS:
        if isinstance(found := made.get(name), dict):
            below = name in ("$defs", "definitions") and not definitions
            made[name] = {
                key: _closed(one, levels - 1, definitions=definitions, inside=below)
                for key, one in found.items()
            }
    for name in _ONES:
        if name in made:
            made[name] = _closed(made[name], levels - 1, definitions=definitions)
    needed, named = made.get("required"), made.get("properties") or {}
    free = inside or any(name in made for name in (*_OTHERS, *_JOINED, "minProperties"))
    if isinstance(needed, list) and not all(name in named for name in needed if isinstance(name, str)):
        free = True
    if not free and (tool or "properties" in made):
        made["additionalProperties"] = False
    return made


def _mentions(value: Any, name: str) -> bool:
    """Whether a name of a keyword stands anywhere in a schema."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            if name in found:
                return True
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
    return False
