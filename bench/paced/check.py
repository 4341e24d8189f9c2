"""The instrument's check: a real model on this CPU, and then engines paced by the times of its steps.

Whatever else goes into a rate, a first token or a gap is the product's own in both. So the paced run has to
give the real one's figures.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.frame import Result, progress
from bench.mixed import figures as figures_of
from bench.models import by_name
from bench.paced import loads
from bench.paced.clusters import Macs, macs
from bench.paced.node import Pace
from bench.scaling import Requests

WITHIN = 0.1
FIGURES = ("tokens_per_second", "ttft_ms", "gap_ms")
_STAGES = (1, 2)
_WORDS, _TOKENS, _AT_ONCE, _EACH = 4, 1024, 4, 2


async def check(model: str, rows: Sequence[int], seconds: float) -> list[Result]:
    """The figures of each scenario, of the real model and of its times."""
    found: list[Result] = []
    spec = {"max_rows": max(*rows, _AT_ONCE)}
    for stages in _STAGES:
        pace = Pace("", "", "", 1.0, records=True)
        async with macs([""] * stages, pace, spec, by_name(model)) as ring:
            real = await _scenarios(ring, rows, seconds)
            tables = _tables(ring.reports)
        paced = Pace("", "", "", 1.0, tables=tables)
        async with macs([""] * stages, paced, spec) as ring:
            again = await _scenarios(ring, rows, seconds)
        for name, figures in real.items():
            found.append({"scenario": f"{stages} stages, {name}", "real": figures, "simulated": again[name]})
            progress(str(found[-1]))
    return found


def _tables(reports: Path) -> dict[str, Any]:
    found = [json.loads(file.read_text()) for file in reports.glob("*.json")]
    return {one["place"]: one["times"] for one in found}


async def _scenarios(ring: Macs, rows: Sequence[int], seconds: float) -> dict[str, Result]:
    found = {}
    given = argparse.Namespace(words=_WORDS, tokens=_TOKENS, seconds=seconds)
    for each in rows:
        rate = await Requests(given, random.Random(each)).rate(ring.url, each)
        found[f"{each} rows"] = {"tokens_per_second": round(rate, 2)}
    replies = await loads.requests_of(
        ring.url, "mixed", at_once=_AT_ONCE, count=_AT_ONCE * _EACH, seed=1, slower=1.0
    )
    made = figures_of(replies, _AT_ONCE, {})
    found[f"mixed, {_AT_ONCE} at a time"] = {
        "tokens_per_second": made["tokens_per_second"],
        "ttft_ms": made["ttft_ms"].get("p50"),
        "gap_ms": made["gap_ms"].get("p50"),
    }
    return found


def off(scenario: Result) -> float:
    """The largest part by which a simulated figure differs from the real one."""
    real, simulated = scenario["real"], scenario["simulated"]
    return max(abs(simulated[name] / real[name] - 1) for name in FIGURES if real.get(name))
