"""Tokens per second of 1, 2 and 3 stages at 1 to 64 rows, each stage with its processes on a core of its own.

A stage's daemon, engine and carrier share one core; gateway, coordinator and client have the others. The
rings are up together, and rounds take turns, so that other load on the machine hits all alike.

What counts is the time in which all rows decode: requests for long answers are sent, a measurement begins
when each of them has had its second token and ends --seconds later, and then they are given up. So prompts,
which are prefilled one after the other, take their time before it, however many rows there are.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from bench.clusters import Deployment, can_pin, cluster, pin_stages
from bench.frame import Benchmark, Result, Table, progress
from bench.models import by_name
from bench.openai_client import Reply, ask
from bench.serve import prompt
from bench.summaries import median
from bench.verdict import Check, ratios
from sealring.cli.local.cluster import LocalCluster

_BEGIN_SECONDS = 240.0
"""In which all of a measurement's answers have to begin."""

_GAPS = 3
"""Between pieces of each row that a measurement has at least, however slow the rows are."""

_STRETCH = 4.0
"""Times --seconds that a measurement takes at most for that."""

_LOOK_SECONDS = 0.02


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
        requests = Requests(options)
        for number in range(options.rounds + 1):
            for rows in options.rows[:1] if not number else options.rows:
                for stages, made in rings.items():
                    progress(f"round {number} of {options.rounds}: {stages} stages, {rows} rows")
                    rate = await requests.rate(made.http_url, rows)
                    if number:
                        rates.setdefault(stages, {}).setdefault(rows, []).append(rate)
    return {
        "model": options.model,
        "seconds": options.seconds,
        "tokens_per_second": {
            str(stages): {str(rows): round(median(each), 2) for rows, each in by_rows.items()}
            for stages, by_rows in rates.items()
        },
        "rounds": {
            str(stages): {str(rows): [round(one, 2) for one in each] for rows, each in by_rows.items()}
            for stages, by_rows in rates.items()
        },
    }


class Requests:
    """Those of all measurements, each with a prompt of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._generator = random.Random(0)

    async def rate(self, url: str, rows: int) -> float:
        """Tokens per second of so many rows. Raises ValueError when an answer breaks off."""
        replies = [Reply(time.perf_counter()) for _ in range(rows)]
        asked = [asyncio.ensure_future(self._ask(url, self._options.tokens, one)) for one in replies]
        try:
            await _until(lambda: _fewest(replies) > 1, replies, _BEGIN_SECONDS)
            begun, most = time.perf_counter(), self._options.seconds * _STRETCH
            ends = begun + self._options.seconds
            await _until(
                lambda: time.perf_counter() >= ends and _fewest(replies, begun) > _GAPS, replies, most
            )
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        await self._ask(url, 1, Reply(time.perf_counter()))  # what was under way is over
        return steady_rate(replies, begun)

    async def _ask(self, url: str, tokens: int, into: Reply) -> None:
        body = {
            "model": "bench",
            "max_tokens": tokens,
            "temperature": 0,
            "prompt": prompt(self._generator, self._options.words),
        }
        await ask(url, body, path="/v1/completions", into=into)


async def _until(holds: Callable[[], bool], replies: Sequence[Reply], seconds: float) -> None:
    """Waits until `holds`, an answer has ended, or so many seconds are over."""
    for _ in range(round(seconds / _LOOK_SECONDS)):
        if holds() or any(one.ended for one in replies):
            break
        await asyncio.sleep(_LOOK_SECONDS)
    if errors := sorted({one.error for one in replies if one.error}):
        raise ValueError(f"answers broke off: {', '.join(errors)}")


def _fewest(replies: Sequence[Reply], begun: float = 0.0) -> int:
    """Pieces since then of the answer that has had fewest."""
    return min(sum(arrival > begun for arrival in one.arrivals) for one in replies)


def steady_rate(replies: Sequence[Reply], begun: float) -> float:
    """Pieces per second after the moment when all had begun and up to when the first one ended, 0 if it has
    then ended.

    Each row from a piece of its own to a piece of its own, for a lane brings one for all of its rows at once
    and seconds between two.
    """
    ended = min((one.ended for one in replies if one.ended), default=float("inf"))
    rate = 0.0
    for one in replies:
        steady = [arrival for arrival in one.arrivals if begun < arrival <= ended]
        if len(steady) < 2:
            return 0.0
        rate += (len(steady) - 1) / (steady[-1] - steady[0])
    return rate


def speedup(result: Result, stages: int, rows: int) -> float | None:
    """Against one stage in the same run, median over rounds; None where no moment had all rows decoding."""
    found = [one for one in speedups(result, stages, rows) if one is not None]
    return round(median(found), 3) if found else None


def speedups(result: Result, stages: int, rows: int) -> list[float | None]:
    """By round; none of stages that were not measured."""
    rounds = result["rounds"]
    if "1" not in rounds or str(stages) not in rounds:
        return []
    return ratios([one or None for one in rounds[str(stages)][str(rows)]], rounds["1"][str(rows)])


def checks(result: Result) -> list[Check]:
    """For every number of rows that can be several lanes."""
    rows = [int(each) for each in next(iter(result["tokens_per_second"].values())) if each != "1"]
    return [
        Check(f"{stages} stages against one core, {each} rows", speedups(result, stages, each), target, True)
        for stages, target in ((2, 1.85), (3, 2.6))
        for each in rows
        if speedups(result, stages, each)
    ]


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
    parser.add_argument("--seconds", type=float, default=10.0, help="that all rows decode and are measured")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer, at most")
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
    quick=("--rounds", "1", "--rows", "1,16", "--seconds", "5"),
    quick_seconds=90,
)
