"""Tables and charts of docs/performance.md, made of the measurements that are committed beside it; and the
table of docs/reliability.md, made of what `make faults` wrote.

Measurements are what `python -m bench NAME --json docs/performance/data/NAME.json` writes. Figures of earlier
days that have no measurement beside them stand in `earlier.json`: they can say that a target was missed, and
never that it is met.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.frame import write_png
from bench.verdict import MET, OPEN, Check
from sealring.mesh.errors import ConfigError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "performance"
PAGE, FIGURES = FOLDER.with_suffix(".md"), FOLDER / "figures.md"
EARLIER = "earlier.json"
RELIABILITY = ROOT / "docs" / "reliability.md"
FAULTS = ROOT / "docs" / "reliability" / "faults.json"
BEGIN, END = "<!-- made by: python -m bench report -->", "<!-- end of what is made -->"
_PAUSE = 1.0
"""Seconds without a token that a reader of an answer notices."""

_COLUMNS = ("target", "wanted", "worst", "verdict")
_FAULT_COLUMNS = (
    *("what, when", "clients saw", "no token for, s", "whole after, s", "lost", "wrong", "left"),
    *("rounds", "verdict"),
)
ALL_COLUMNS = ("target", "wanted", "worst", "rounds", "verdict", "measured by", "when and on what")


@dataclass(frozen=True)
class Row:
    """One target. `measured`: there is data beside it."""

    check: Check
    command: str
    when: str
    measured: bool

    @property
    def verdict(self) -> str:
        return OPEN if self.check.verdict == MET and not self.measured else self.check.verdict

    def cells(self) -> dict[str, str]:
        check = self.check
        return {
            "target": check.name,
            "wanted": f"{'≥' if check.at_least else '≤'} {check.target:g}",
            "worst": "" if check.worst is None else f"{check.worst:g}",
            "rounds": str(len(check.rounds)) if self.measured else "no data",
            "verdict": self.verdict,
            "measured by": f"`{self.command}`",
            "when and on what": self.when,
        }


def reports() -> list[dict[str, Any]]:
    """The committed measurements, in the order of their files' names."""
    return [json.loads(path.read_text()) for path in _paths()]


def _paths() -> list[Path]:
    return [path for path in sorted((FOLDER / "data").glob("*.json")) if path.name != EARLIER]


def rows(measured: list[dict[str, Any]], earlier: dict[str, Any]) -> list[Row]:
    """The last measurement of every target, or its earlier figure if it has no data."""

    def check(data: dict[str, Any]) -> Check:
        return Check(data["name"], data["rounds"], data["target"], data["at_least"])

    found = []
    for report in measured:
        machine = report["machine"]
        when = (
            f"{report['date'][:10]}, {report['commit']}, {machine['cores']} cores of {machine['processor']}, "
            f"load {machine['load_before']:g} before"
        )
        found += [Row(check(one), report["command"], when, measured=True) for one in report["checks"]]
    named = {row.check.name for row in found}
    return found + [
        Row(check(one), one["command"], f"{earlier['date']}, {one['said']}", measured=False)
        for one in earlier["figures"]
        if one["name"] not in named
    ]


def table(found: list[Row], columns: Sequence[str] = _COLUMNS) -> str:
    cells = [row.cells() for row in found]
    lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in cells)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def faults(runs: list[dict[str, Any]]) -> str:
    """A row for each case: the worst of its rounds. Nothing may be lost, wrong or left."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for name, outcome in run["cases"].items():
            rounds.setdefault(name, []).append(outcome)
    lines: list[Sequence[str]] = [_FAULT_COLUMNS, ["---"] * len(_FAULT_COLUMNS)]
    for name, found in sorted(rounds.items()):
        done = [one for one in found if not one["lacking"]]
        bad = [one["lost"] + one["wrong"] + len(one["left"]) + bool(one["broken"]) for one in done]
        saw = {error for one in done for error in one["errors"]} | {"broken" for one in done if one["broken"]}
        worst = [max((one[key] for one in done), default=0) for key in ("pause", "back", "lost", "wrong")]
        left = {thing for one in done for thing in one["left"]}
        quiet = "asked again" if any(one.get("again") for one in done) else ""
        quiet = quiet or ("a pause" if worst[0] >= _PAUSE else "nothing")
        cells = (", ".join(sorted(saw)) or quiet, *(f"{one:.3g}" for one in worst), ", ".join(sorted(left)))
        verdict = Check(name, bad, 0).verdict
        lines.append((name, *(cells if done else ("",) * len(cells)), str(len(done)), verdict))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def made() -> dict[Path, str]:
    """What stands between the marks of each page."""
    earlier = json.loads((FOLDER / "data" / EARLIER).read_text())
    found = rows(reports(), earlier)
    return {
        PAGE: table(found),
        FIGURES: table(found, ALL_COLUMNS),
        RELIABILITY: faults(json.loads(FAULTS.read_text())),
    }


def put(page: str, text: str) -> str:
    """The page with this between its marks. Raises ConfigError (BAD_PAGE)."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(
            "the page has no place for the table",
            hint=f"put the lines {BEGIN} and {END} where it belongs",
            reason="BAD_PAGE",
        )
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> None:
    for page, text in made().items():
        page.write_text(put(page.read_text(), text))
    for path in _paths():
        try:
            write_png(json.loads(path.read_text()), FOLDER / f"{path.stem}.png")
        except ConfigError as error:
            sys.exit(f"the table is made, charts are not: {error.message} (hint: {error.hint})")


if __name__ == "__main__":
    main()
