"""How Harmony (gpt-oss) and DeepSeek models write calls, for which mlx-lm has no parsers.

Harmony: an answer is of messages. A message has a header with its channel, in a call also the tool's name
(openai/harmony, docs/format.md). DeepSeek: V3, V3.1 and V3.2 as in their chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")
_CALLED = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]+)")

_DSML = "｜DSML｜"
_CALL = re.compile("<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*)\n```", re.DOTALL)
_INVOKE = re.compile(f'<{_DSML}invoke name="(.*?)">(.*?)</{_DSML}invoke>', re.DOTALL)
_PARAMETER = re.compile(
    f'<{_DSML}parameter name="(.*?)" string="(true|false)">(.*?)</{_DSML}parameter>', re.DOTALL
)


def parse_deepseek(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """V3: the kind, then name and JSON in a fence; V3.1: the name, then JSON. Raises ValueError."""
    calls = []
    for name, rest in _CALL.findall(text):
        fenced = _FENCED.fullmatch(rest.strip())
        name, rest = (fenced[1], fenced[2]) if fenced else (name, rest)
        calls.append({"name": name.strip(), "arguments": json.loads(rest)})
    return _some(calls)


def parse_dsml(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """V3.2: parameters one by one, strings as they are and all else as JSON. Raises ValueError."""
    calls = []
    for name, rest in _INVOKE.findall(text):
        found = _PARAMETER.findall(rest)
        arguments = {key: value if text == "true" else json.loads(value) for key, text, value in found}
        calls.append({"name": name, "arguments": arguments})
    return _some(calls)


def _some(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not calls:
        raise ValueError("no call")
    return calls


PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "deepseek_v3": parse_deepseek,
    "deepseek": parse_deepseek,
    "dsml": parse_dsml,
}
"""Parsers of tool calls, by name."""


def deepseek_format(source: str, vocabulary: Collection[str]) -> tuple[str, tuple[str, str]] | None:
    """Name of the parser and markers by a model's chat template and tokens; None for models of others."""
    if "<｜tool▁calls▁begin｜>" in source:
        name = "deepseek_v3" if "```json" in source else "deepseek"
        return name, ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    if _DSML in vocabulary:
        return "dsml", (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>")
    return None


def harmony_section(header: str) -> tuple[str, str]:
    """The kind of a message with this header, and the name of the tool that it calls."""
    called = _CALLED.search(header)
    if called is not None:
        return "call", called[1]
    return ("reasoning" if "<|channel|>analysis" in header else "text"), ""
