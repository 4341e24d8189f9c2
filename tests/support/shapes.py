"""The shapes of what programs send: fields, roles, blocks, order and sizes, and none of their texts.

`python tests/support/shapes.py` makes tests/clients/shapes/*.json from what the last `make clients` recorded.
A text is kept as its length, and `filled` makes it of words of our own. Names of fields and tools stay.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from programs import INSTALLED, KITS, LOADS, OPEN_WEBUI, PROGRAMS, ROOT, versions

FOLDER = ROOT / "tests" / "clients" / "shapes"
RECORDED = INSTALLED / "bodies"

KEPT = {"type", "role", "name", "tool_name", "model", "tool_choice", "effort", "display", "syntax", "ttl"}
KEPT |= {"status", "phase", "format", "required", "include", "stop"}
"""Fields whose texts are words of the API."""

IDS = {"id", "call_id", "tool_use_id", "tool_call_id"}
HEADERS = {"anthropic-beta", "anthropic-version"}
GRAMMAR = 'start: "*** Begin" LF line+ "*** End" LF?\nline: /[+ -]/ /[a-z ]+/ LF\n%import common.LF\n'
_WORD = re.compile(r"[A-Za-z0-9_./-]{1,64}")
_WORDS = "plain words of our own that stand where theirs have been and say nothing at all about it; "


def shape(value: Any, field: str = "", names: dict[str, str] | None = None) -> Any:
    """The value without its texts. `names` are the ids so far, of which equal ones stay equal."""
    names = {} if names is None else names
    if isinstance(value, dict):
        return {name: shape(one, name, names) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(one, field, names) for one in value]
    if not isinstance(value, str):
        return value
    if field in IDS:
        return names.setdefault(value, f"id_{len(names)}")
    if field in KEPT and _WORD.fullmatch(value):
        return value
    if field == "definition":
        return {"grammar": len(value)}
    if field == "arguments":
        return {"json": shape(json.loads(value))}
    return {"text": len(value)}


def filled(value: Any, numbers: Iterator[int] | None = None) -> Any:
    """A body with words of our own, no two texts of it equal as far as their length allows."""
    numbers = itertools.count() if numbers is None else numbers
    if isinstance(value, list):
        return [filled(one, numbers) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"text"} and isinstance(value["text"], int):
        length = value["text"]
        begun = f"{next(numbers)} {_WORDS}"
        return (begun * (length // len(begun) + 1))[:length]
    if value.keys() == {"grammar"}:
        return GRAMMAR
    if value.keys() == {"json"}:
        return json.dumps(filled(value["json"], numbers))
    return {name: filled(one, numbers) for name, one in value.items()}


def requests(name: str) -> list[dict[str, Any]]:
    """A program's requests as they would go over the wire: path, headers and body of each."""
    kept = json.loads((FOLDER / f"{name}.json").read_bytes())["requests"]
    bodies = [{**kept[one["like"]]["body"], **one["body"]} if "like" in one else one["body"] for one in kept]
    return [{**one, "body": filled(body)} for one, body in zip(kept, bodies, strict=True)]


def _chosen(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first request with each set of tools, and the last with it, which holds the session."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in recorded:
        tools = [
            tool.get("name") or tool.get("function", {}).get("name") for tool in one["body"].get("tools", [])
        ]
        groups.setdefault(json.dumps([one["path"], tools]), []).append(one)
    return [one for group in groups.values() for one in (group if len(group) == 1 else (group[0], group[-1]))]


def compact(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The shapes of the chosen requests; what a request shares with the one before is left out."""
    found: list[dict[str, Any]] = []
    bodies: list[dict[str, Any]] = []
    for one in _chosen(recorded):
        body = shape(one["body"])
        kept: dict[str, Any] = {"path": one["path"], "body": body}
        if headers := {name: text for name, text in one["headers"].items() if name in HEADERS}:
            kept["headers"] = headers
        if found and bodies[-1].keys() <= body.keys() and "like" not in found[-1]:
            kept["like"] = len(found) - 1
            kept["body"] = {name: part for name, part in body.items() if bodies[-1].get(name) != part}
        found.append(kept)
        bodies.append(body)
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    pins = versions()
    titles = {name: f"{one.title} {pins[one.package]}" for name, one in PROGRAMS.items()}
    titles |= {
        name: f"{one.title} {', '.join(pins[each] for each in one.packages)}" for name, one in KITS.items()
    }
    titles |= {name: title.format(pins[package]) for name, (package, title) in LOADS.items()}
    titles[OPEN_WEBUI] = f"Open WebUI {pins[OPEN_WEBUI]}"
    for name, title in titles.items():
        recorded = [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]
        served = [one for one in recorded if one["path"].startswith(("/v1/", "/api/"))]
        kept = {"program": title, "requests": compact(served)}
        (FOLDER / f"{name}.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
