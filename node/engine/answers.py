"""Checks of what helper processes answer: ValueError, TypeError or KeyError for what is no answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 1 << 40


def text_in(answer: Mapping[str, Any], name: str, most: int, least: int = 0) -> str:
    """A text of `least` to `most` characters."""
    found = answer[name]
    if not isinstance(found, str) or not least <= len(found) <= most:
        raise ValueError(name)
    return found


def number_in(answer: Mapping[str, Any], name: str, most: int = MOST, least: int = 0) -> int:
    """A whole number from `least` to `most`."""
    return whole(answer[name], most, least)


def whole(found: Any, most: int = MOST, least: int = 0) -> int:
    if type(found) is not int or not least <= found <= most:
        raise ValueError
    return found


def list_in(answer: Mapping[str, Any], name: str, most: int, least: int = 0) -> list[Any]:
    """A list of `least` to `most` members, of whatever kind."""
    found = answer[name]
    if not isinstance(found, list) or not least <= len(found) <= most:
        raise ValueError(name)
    return found
