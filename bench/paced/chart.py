"""The chart of docs/performance/macs.md, from what was written beside it: `python -m bench.paced.chart`.

Every panel says that its figures are simulated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.frame import Result
from bench.paced import check

FOLDER = Path(__file__).parents[2] / "docs" / "performance" / "simulated"
SECTIONS, CHECKS, CHART = "macs-all-*.json", "macs-check-*.json", "macs.png"


def sections(folder: Path = FOLDER) -> list[Result]:
    """The sections of all runs of `--all`, by name the last one."""
    found: dict[str, Result] = {}
    for file in sorted(folder.glob(SECTIONS)):
        for one in json.loads(file.read_text())["data"]["sections"]:
            found[one["name"]] = one
    return list(found.values())


def scenarios(folder: Path = FOLDER) -> list[Result]:
    """The scenarios of all checks of the instrument, each named by its file too."""
    found = []
    for file in sorted(folder.glob(CHECKS)):
        kind = file.stem.rpartition("-")[2]
        for one in json.loads(file.read_text())["data"]["check"]:
            found.append(one | {"scenario": f"{kind}: {one['scenario']}"})
    return found


def draw(folder: Path = FOLDER) -> None:
    """Writes the chart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    rates, turns, checks = figure.subplots(3)
    _rates(rates, sections(folder))
    _turns(turns, sections(folder))
    _checks(checks, scenarios(folder))
    figure.suptitle("SIMULATED: Macs by the clock. Nothing here was measured on a Mac.")
    figure.savefig(folder / CHART, dpi=110, metadata={"Software": None})


def _rates(axes: Any, found: list[Result]) -> None:
    """Tokens per second of rows and prompts: by the product, and by figures alone."""
    names, made, alone = [], [], []
    for section in found:
        for one in section["runs"]:
            for load in one["loads"]:
                if section["options"]["list"] == "static":
                    names.append(f"{one['cluster']}\n{load['load']}")
                    made.append(load["tokens_per_second"])
                    alone.append(load["arithmetic"])
    places = range(len(names))
    axes.bar([place - 0.2 for place in places], made, 0.4, label="the product on paced engines, SIMULATED")
    axes.bar([place + 0.2 for place in places], alone, 0.4, label="by figures alone")
    axes.set_xticks(places, names, fontsize=6)
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize=7)


def _turns(axes: Any, found: list[Result]) -> None:
    """Milliseconds to the first token, by turn of agents."""
    for section in found:
        for one in section["runs"]:
            for load in one["loads"]:
                if "turns" in load:
                    worst = [turn["ttft_ms"].get("max") for turn in load["turns"]]
                    middle = [turn["ttft_ms"].get("p50") for turn in load["turns"]]
                    label = f"{one['cluster']}, {load['load']}"
                    axes.plot(range(1, len(worst) + 1), worst, "o--", label=f"{label}, worst")
                    axes.plot(range(1, len(middle) + 1), middle, "o-", label=f"{label}, p50")
    axes.set_xlabel("turn of agents, SIMULATED")
    axes.set_ylabel("TTFT, ms")
    axes.set_yscale("log")
    axes.legend(fontsize=7)


def _checks(axes: Any, found: list[Result]) -> None:
    """Paced against real, by scenario."""
    for key, name in check.FIGURES.items():
        ratios = [check.ratio(one, key) for one in found]
        axes.plot(range(len(found)), ratios, "o", label=name)
    axes.axhspan(1 - check.WITHIN, 1 + check.WITHIN, alpha=0.2)
    axes.set_xticks(range(len(found)), [one["scenario"].replace(", ", "\n", 1) for one in found], fontsize=6)
    axes.set_ylabel("check: SIMULATED by real")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    draw()
