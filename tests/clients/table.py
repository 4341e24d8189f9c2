"""Writes the table of programs in docs/clients.md from what the last `make clients` noted of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from programs import INSTALLED, KITS, PROGRAMS, ROOT, versions

BEGIN, END = "<!-- made by `make clients` -->\n", "<!-- end of what it made -->\n"

ELSEWHERE = [
    ("crush 0.96.1", "not installed: its installation downloads from elsewhere"),
    ("openclaw 2026.9.6", "not installed: needs Node 24.16"),
]
"""Programs that have been looked at and cannot be run here."""


def rows() -> list[str]:
    """A line for each program. A way that was not run keeps no claim."""
    pins = versions()
    named = {name: (f"{one.title} {pins[one.package]}", one.remark) for name, one in PROGRAMS.items()}
    for name, kit in KITS.items():
        named[name] = (f"{kit.title} {', '.join(pins[package] for package in kit.packages)}", "")
    found = []
    for name, (title, remark) in named.items():
        said = []
        for way in ("clear", "sealed"):
            file = INSTALLED / "rows" / f"{name}.{way}.json"
            said.append(json.loads(file.read_bytes()) if file.exists() else {"miss": "not run", "tools": ""})
        ways = " | ".join("no" if one["miss"] else "yes" for one in said)
        tools = next((one["tools"] for one in said if one["tools"]), "")
        notes = "; ".join(filter(None, [*sorted({one["miss"] for one in said}), remark]))
        found.append(f"| {title} | {ways} | {tools} | {notes} |\n")
    return found + [f"| {name} | no | no | | {why} |\n" for name, why in ELSEWHERE]


def main() -> None:
    page = ROOT / "docs" / "clients.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    head = "| program | clear | sealed | its own tools | to know |\n|---|---|---|---|---|\n"
    page.write_text("".join([before, BEGIN, head, *rows(), END, after]))


if __name__ == "__main__":
    main()
