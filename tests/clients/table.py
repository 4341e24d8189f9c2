"""Writes the tables of programs in docs/clients.md from what the last `make clients` noted of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from programs import (
    BREAKS,
    HABITS,
    INSTALLED,
    KITS,
    LOADS,
    MAKERS,
    OPEN_WEBUI,
    PROGRAMS,
    ROOT,
    SURVIVORS,
    versions,
)

BEGIN, END = "<!-- made by `make clients` -->\n", "<!-- end of what it made -->\n"
WAYS = ("clear", "sealed")

ELSEWHERE = [
    ("crush 0.96.1", "not installed: its installation downloads from elsewhere"),
    ("openclaw 2026.9.6", "not installed: needs Node 24.16"),
]
"""Programs that have been looked at and cannot be run here."""


def _noted(name: str) -> list[dict[str, str]]:
    """What was noted of a program in each way. A way that was not run keeps no claim."""
    files = [INSTALLED / "rows" / f"{name}.{way}.json" for way in WAYS]
    return [
        json.loads(one.read_bytes()) if one.exists() else {"miss": "not run", "tools": ""} for one in files
    ]


def _programs() -> list[str]:
    pins = versions()
    named = {name: (f"{one.title} {pins[one.package]}", one.remark) for name, one in PROGRAMS.items()}
    named[OPEN_WEBUI] = (f"Open WebUI {pins[OPEN_WEBUI]}", "its server, by what its page sends")
    for name, kit in KITS.items():
        named[name] = (f"{kit.title} {', '.join(pins[package] for package in kit.packages)}", "")
    named |= {name: (title.format(pins[package]), "") for name, (package, title) in LOADS.items()}
    found = []
    for name, (title, remark) in named.items():
        said = _noted(name)
        ways = " | ".join("no" if one["miss"] else "yes" for one in said)
        tools = next((one["tools"] for one in said if one["tools"]), "")
        notes = "; ".join(filter(None, [*sorted({one["miss"] for one in said}), remark]))
        found.append(f"| {title} | {ways} | {tools} | {notes} |\n")
    head = "| program | clear | sealed | what it did | to know |\n|---|---|---|---|---|\n"
    return [head, *found, *(f"| {name} | no | no | | {why} |\n" for name, why in ELSEWHERE)]


def _survivors() -> list[str]:
    head = "| program | killed in mid-answer | clear | sealed |\n|---|---|---|---|\n"
    found = []
    for name in SURVIVORS:
        for part in BREAKS:
            said = [one["miss"] or one["tools"] for one in _noted(f"{name}.{part}")]
            found.append(f"| {PROGRAMS[name].title} | {part} | {' | '.join(said)} |\n")
    return [head, *found]


def _habits() -> list[str]:
    head = "| program | what else was run | clear | sealed |\n|---|---|---|---|\n"
    found = []
    titles = {name: one.title for name, one in (PROGRAMS | KITS).items()}
    titles |= {OPEN_WEBUI: "Open WebUI"} | {f"{name}-python": f"{name} for Python" for name in MAKERS}
    for name, what in HABITS.items():
        said = [one["miss"] or "yes" for one in _noted(name)]
        found.append(f"| {titles[name.partition('.')[0]]} | {what} | {' | '.join(said)} |\n")
    return [head, *found]


def main() -> None:
    page = ROOT / "docs" / "clients.md"
    before, *others = page.read_text().split(BEGIN)
    made = [before]
    for table, rest in zip((_programs(), _habits(), _survivors()), others, strict=True):
        made += [BEGIN, *table, END, rest.partition(END)[2]]
    page.write_text("".join(made))


if __name__ == "__main__":
    main()
