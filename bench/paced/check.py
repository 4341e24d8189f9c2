"""The instrument's check: a real model on this CPU, and then engines paced by the times of its steps.

Whatever else goes into a rate, a first token or a gap is the product's own in both. So the paced run has to
give the real one's figures. Each stage, with its engine and carrier, has a core of its own in both, for two
stages that compute on one core take each other's time. The paced model is the real one with tiny matrices: as
many layers, tokens and positions, so graphs, plans and samplers are alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.clusters import can_pin, pin_cluster
from bench.frame import Result, progress
from bench.mixed import figures as figures_of
from bench.models import SHAPES, Shape, random_model
from bench.openai_client import Reply
from bench.paced import loads
from bench.paced.clusters import TINY, Macs, macs
from bench.paced.node import Pace
from bench.steady import Requests

WITHIN = 0.1
FIGURES = {"tokens_per_second": "tok/s", "ttft_ms": "TTFT mean, ms", "gap_ms": "gap p50, ms"}
_WORDS, _TOKENS, _TAUGHT = 4, 1024, 1000


async def check(options: argparse.Namespace) -> list[Result]:
    """The figures of each scenario by rounds, of the real model and of its times.

    Both rings are up at once and take turns, so that whatever else runs on this machine meets both.
    """
    shape = SHAPES[options.check]
    alike = dataclasses.replace(
        shape, **{name: getattr(TINY, name) for name in ("hidden", "intermediate", "heads", "kv_heads")}
    )
    found: list[Result] = []
    for stages in options.stages:
        async with _ring(stages, Pace("", "", "", 1.0, records=True), options, shape) as real:
            progress(f"{_stages(stages)}: the times of the real model's steps")
            for measure in _scenarios(options).values():
                await measure(real, _TAUGHT)
            paced = Pace("", "", "", 1.0, tables=_tables(real.reports))
            async with _ring(stages, paced, options, alike) as simulated:
                for name, measure in _scenarios(options).items():
                    rounds = [
                        (await measure(real, seed), await measure(simulated, seed))
                        for seed in range(options.check_rounds)
                    ]
                    found.append(_outcome(f"{_stages(stages)}, {name}", rounds))
                    progress(f"{found[-1]}, load {os.getloadavg()[0]:.1f}")
    return found


def _outcome(scenario: str, rounds: Sequence[tuple[Result, Result]]) -> Result:
    """Medians of the rounds, and the rounds."""
    made: Result = {"scenario": scenario}
    for kind, each in zip(("real", "simulated"), zip(*rounds, strict=True), strict=True):
        made[kind] = {key: round(median(one[key] for one in each), 2) for key in each[0]}
        made[f"{kind}_rounds"] = list(each)
    return made


def _stages(count: int) -> str:
    return f"{count} stage{'s' if count > 1 else ''}"


@asynccontextmanager
async def _ring(stages: int, pace: Pace, options: argparse.Namespace, shape: Shape) -> AsyncIterator[Macs]:
    """A ring whose stages have a core each."""
    at_once = [count for _, count, _ in options.scenarios]
    spec = {"max_rows": max(*options.rows, *at_once, 1)}
    async with macs([""] * stages, pace, spec, random_model(shape)) as ring:
        cores = sorted(os.sched_getaffinity(0)) if can_pin() else range(os.cpu_count() or 1)
        pin_cluster(ring.made, cores, cores)
        yield ring


def _tables(reports: Path) -> dict[str, Any]:
    found = [json.loads(file.read_text()) for file in reports.glob("*.json")]
    return {one["place"]: {name: one[name] for name in ("loading", "serving")} for one in found}


def _scenarios(options: argparse.Namespace) -> dict[str, Callable[[Macs, int], Awaitable[Result]]]:
    """Measurements of a ring's figures, by name. A seed is used once: kept prefixes would be found again."""

    async def steady(rows: int, ring: Macs, seed: int) -> Result:
        given = argparse.Namespace(words=_WORDS, tokens=_TOKENS, seconds=options.seconds)
        return {
            "tokens_per_second": round(
                await Requests(given, random.Random(f"{rows} {seed}")).rate(ring.url, rows), 2
            )
        }

    async def loop(name: str, at_once: int, count: int, ring: Macs, seed: int) -> Result:
        replies = await loads.requests_of(ring.url, name, at_once=at_once, count=count, seed=seed, slower=1.0)
        return _figures(replies, at_once)

    return {
        **{f"{rows} row{'s' if rows > 1 else ''}": partial(steady, rows) for rows in options.rows},
        **{
            f"{name}, {at_once} at a time": partial(loop, name, at_once, count)
            for name, at_once, count in options.scenarios
        },
    }


def _figures(replies: Sequence[Reply], at_once: int) -> Result:
    """TTFT by its mean: of ten requests half may have waited for a lane and half not, and then the median is
    one or the other by chance."""
    made = figures_of(replies, at_once, {})
    return {
        "tokens_per_second": made["tokens_per_second"],
        "ttft_ms": made["ttft_ms"].get("mean", 0.0),
        "gap_ms": made["gap_ms"].get("p50", 0.0),
    }


def scenarios(text: str) -> list[tuple[str, int, int]]:
    """An option's value, "mixed:4:8": a list, requests at a time, and their number."""
    found = []
    for part in text.split(",") if text else []:
        name, at_once, count = part.split(":")
        found.append((name, int(at_once), int(count)))
    return found


def ratio(scenario: Result, name: str) -> float | None:
    """A simulated figure by the real one: the median of the rounds' own ratios, because both sides of a round
    come from the same minute of the machine. None if the scenario does not have it."""
    pairs = zip(scenario["real_rounds"], scenario["simulated_rounds"], strict=True)
    found = [simulated[name] / real[name] for real, simulated in pairs if real.get(name)]
    return median(found) if found else None


def off(scenario: Result) -> float:
    """The largest part by which a simulated figure differs from the real one."""
    ratios = [ratio(scenario, name) for name in FIGURES]
    return max(abs(one - 1) for one in ratios if one is not None)
