"""Tokens per second of 1, 2 and 3 stages at 1 to 64 rows, each stage with its processes on a core of its own.

A stage's daemon, engine and carrier share one core; gateway, coordinator and client have the others. The
rings are up together, and rounds take turns, so that other load on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import AsyncExitStack
from typing import Any

from bench.clusters import Deployment, can_pin, cluster, pin_stages
from bench.frame import Benchmark, Check, Result, Table, progress
from bench.models import by_name
from bench.openai_client import Reply
from bench.serve import load
from bench.summaries import median
from cli.cluster import LocalCluster


def run(options: argparse.Namespace) -> Result:
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> Result:
    model = by_name(options.model)
    cores = os.cpu_count() or 1
    rates: dict[int, dict[int, list[float]]] = {}
    async with AsyncExitStack() as stack:
        rings: dict[int, LocalCluster] = {}
        for stages in options.stages:
            deployment = Deployment("bench", model, stages=stages, spec={"max_rows": max(options.rows)})
            made = await stack.enter_async_context(cluster([deployment]))
            rest = list(range(max(options.stages), cores)) or [cores - 1]
            pin_stages(made, list(range(stages)), rest)
            rings[stages] = made
        if can_pin():
            os.sched_setaffinity(0, list(range(max(options.stages), cores)) or [cores - 1])
        for number in range(options.rounds + 1):
            for rows in options.rows[:1] if not number else options.rows:
                for stages, made in rings.items():
                    progress(f"round {number} of {options.rounds}: {stages} stages, {rows} rows")
                    rate = await _rate(made.http_url, rows, options)
                    if number:
                        rates.setdefault(stages, {}).setdefault(rows, []).append(rate)
    return {
        "model": options.model,
        "tokens": options.tokens,
        "tokens_per_second": {
            str(stages): {str(rows): round(median(each), 2) for rows, each in by_rows.items()}
            for stages, by_rows in rates.items()
        },
        "rounds": {
            str(stages): {str(rows): [round(one, 2) for one in each] for rows, each in by_rows.items()}
            for stages, by_rows in rates.items()
        },
    }


async def _rate(url: str, rows: int, options: argparse.Namespace) -> float:
    """Tokens per second while all rows decode: from the last row's first token to the first row's last."""
    replies, _ = await load(
        url, "bench", count=rows, rate=float("inf"), words=options.words, max_tokens=options.tokens
    )
    return steady_rate(replies)


def steady_rate(replies: list[Reply]) -> float:
    """Pieces per second between the moment when all have begun and that when the first one ends."""
    begun = max(one.arrivals[0] for one in replies)
    ended = min(one.arrivals[-1] for one in replies)
    count = sum(begun < arrival <= ended for one in replies for arrival in one.arrivals)
    return count / max(ended - begun, 1e-9)


def speedup(result: Result, stages: int, rows: int) -> float | None:
    """Against one stage in the same run, median over rounds; None where no moment had all rows decoding."""
    rounds = result["rounds"]
    try:
        one, several = rounds["1"][str(rows)], rounds[str(stages)][str(rows)]
    except KeyError:
        return None
    ratios = [a / b for a, b in zip(several, one, strict=True) if a and b]
    return round(median(ratios), 3) if ratios else None


def checks(result: Result) -> list[Check]:
    rows = [int(each) for each in next(iter(result["tokens_per_second"].values()))]
    found = []
    for stages, target in ((2, 1.85), (3, 2.6)):
        values = [value for each in rows if (value := speedup(result, stages, each)) is not None]
        if values:
            found.append(Check(f"{stages} stages against one core, best of rows", max(values), target, True))
    return found


def tables(result: Result) -> list[Table]:
    by_stage = result["tokens_per_second"]
    rows = list(next(iter(by_stage.values())))
    body: list[list[object]] = []
    for stages, rates in by_stage.items():
        body.append([f"{stages} stages, tok/s", *(rates[each] for each in rows)])
        if stages != "1":
            body.append(
                [f"{stages} stages, times one", *(speedup(result, int(stages), int(each)) for each in rows)]
            )
    return [Table(f"{result['model']}, one core per stage", ["rows", *rows], body)]


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    for stages, rates in result["tokens_per_second"].items():
        axes.plot([int(each) for each in rates], list(rates.values()), marker="o", label=f"{stages} stages")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.set_title(f"{result['model']}, one core per stage")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x512")
    parser.add_argument("--stages", type=numbers, default=[1, 2, 3])
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--words", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)


BENCHMARK = Benchmark(
    "scaling",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    checks,
    quick=("--rounds", "1", "--rows", "1,16"),
    quick_seconds=150,
)
