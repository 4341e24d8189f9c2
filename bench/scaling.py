"""Tokens per second of 1, 2 and 3 stages at 1 to 64 rows, each stage with its processes on a core of its own.

Only the time in which all rows decode is measured. Requests for long answers are sent; the measurement begins
after the second token of each and ends --seconds later, and the requests are then cancelled. The prefill of
their prompts, one after the other, is over before it begins.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from bench.clusters import rings
from bench.frame import Result, Table, numbers, progress
from bench.models import by_name
from bench.openai_client import LOOK_SECONDS, Reply, ask, still_coming, streams
from bench.serve import prompt
from bench.verdict import Check, ratios

_GAPS = 3
"""The least number of gaps between pieces that a measurement has for each row, however slow rows are."""

_STRETCH = 4.0
"""Times --seconds that a measurement takes at most for that."""

QUICK = ("--rounds", "1", "--rows", "1,16", "--seconds", "5")
QUICK_SECONDS = 90.0


async def run(options: argparse.Namespace) -> Result:
    """`rounds`: tokens per second of each round, by stages and rows. The first round is not counted."""
    rates: dict[str, dict[str, list[float]]] = {}
    requests = Requests(options)
    model, spec = by_name(options.model), {"max_rows": max(options.rows)}
    async with rings(model, options.stages, spec=spec) as made:
        for number in range(options.rounds + 1):
            for rows in options.rows if number else options.rows[:1]:
                for stages, each in made.items():
                    progress(f"round {number} of {options.rounds}: {stages} stages, {rows} rows")
                    rate = await requests.rate(each.http_url, rows)
                    if number:
                        by_rows = rates.setdefault(str(stages), {})
                        by_rows.setdefault(str(rows), []).append(round(rate, 2))
    return {"model": options.model, "seconds": options.seconds, "rounds": rates}


class Requests:
    """The requests of all measurements, each with a prompt of its own."""

    def __init__(self, options: argparse.Namespace, generator: random.Random | None = None) -> None:
        self._options = options
        self._generator = generator or random.Random(0)

    async def rate(self, url: str, rows: int) -> float:
        """Tokens per second of `rows` rows together. Raises Unavailable if an answer ends."""
        return (await self.rate_and_cost(url, rows, lambda: 0.0))[0]

    async def rate_and_cost(self, url: str, rows: int, spent: Callable[[], float]) -> tuple[float, float]:
        """The `rate`, and the growth of `spent` per token."""
        async with streams(url, [self._body(self._options.tokens) for _ in range(rows)]) as replies:
            begun, before = time.perf_counter(), spent()
            for _ in range(round(self._options.seconds * _STRETCH / LOOK_SECONDS)):
                fewest = min(sum(arrival > begun for arrival in one.arrivals) for one in replies)
                if time.perf_counter() >= begun + self._options.seconds and fewest > _GAPS:
                    break
                still_coming(replies)
                await asyncio.sleep(LOOK_SECONDS)
            cost = spent() - before
            tokens = sum(arrival > begun for one in replies for arrival in one.arrivals)
        await ask(url, self._body(1), path="/v1/completions")  # what was under way is over
        return steady_rate(replies, begun), cost / max(1, tokens)

    def _body(self, tokens: int) -> dict[str, Any]:
        text = prompt(self._generator, self._options.words)
        return {"model": "bench", "max_tokens": tokens, "temperature": 0, "prompt": text}


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


def speedups(result: Result, stages: str, rows: str) -> list[float | None]:
    """Against one stage in the same round; None where no moment had all rows decoding, nothing of stages that
    were not measured."""
    rounds = result["rounds"]
    if "1" not in rounds or stages not in rounds:
        return []
    return ratios([one or None for one in rounds[stages][rows]], rounds["1"][rows])


def checks(result: Result) -> list[Check]:
    """For every number of rows that can be several lanes."""
    return [
        Check(f"{stages} stages against one core, {rows} rows", found, target, True)
        for stages, target in (("2", 1.85), ("3", 2.6))
        for rows in next(iter(result["rounds"].values()))
        if rows != "1" and (found := speedups(result, stages, rows))
    ]


def tables(result: Result) -> list[Table]:
    """Medians over the rounds."""
    rows = list(next(iter(result["rounds"].values())))
    body: list[list[object]] = []
    for stages, rates in result["rounds"].items():
        body.append([f"{stages} stages, tok/s", *(round(median(rates[each]), 2) for each in rows)])
        against = [[one for one in speedups(result, stages, each) if one is not None] for each in rows]
        body.append([f"{stages} stages, times one", *(median(one) if one else None for one in against)])
    return [Table(f"{result['model']}, one core per stage", ["rows", *rows], body)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x512")
    parser.add_argument("--stages", type=numbers, default=[1, 2, 3])
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="that all rows decode and are measured")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer, at most")
    parser.add_argument("--words", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
