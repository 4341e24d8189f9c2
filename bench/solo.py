"""One request at a time through the gateway and a ring of one, against bare mlx-lm: time between tokens.

All hold the same model on the same cores and make as many tokens from prompts as long; gateway, coordinator
and client are elsewhere. They take turns, in another order every round, and ratios are medians over rounds.
mlx-lm is measured as it comes, and once more with the scheduling policy that an engine gives itself (Linux):
the second ratio is what the way through gateway, daemon and engine costs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench.clusters import Deployment, can_pin, cluster, family, kind, pin
from bench.frame import Benchmark, Result, Table, progress
from bench.models import by_name
from bench.openai_client import Reply
from bench.rivals import Process, in_process
from bench.serve import load
from bench.summaries import median, summary
from bench.verdict import Check
from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.errors import Unavailable

BARE, BATCHED, OURS = "mlx-lm", "mlx-lm, our scheduling policy", "sealring, ring of one"


@dataclass
class Series:
    """One system's rounds: seconds between tokens, and CPU seconds a token of each of its processes."""

    tokens: int
    measure: Callable[[int], Awaitable[list[float]]]
    processes: dict[str, psutil.Process]
    rounds: list[list[float]] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @property
    def means(self) -> list[float]:
        """Seconds a token by round, though two tokens may have come as one piece."""
        return [sum(gaps) / (self.tokens - 1) for gaps in self.rounds]

    @property
    def gaps_ms(self) -> list[float]:
        return [gap * 1e3 for gaps in self.rounds for gap in gaps]

    async def round(self, number: int) -> None:
        """The first one is not counted."""
        before = {name: sum(one.cpu_times()[:2]) for name, one in self.processes.items()}
        gaps = await self.measure(number)
        if number:
            self.rounds.append(gaps)
            for name, one in self.processes.items():
                spent = sum(one.cpu_times()[:2]) - before[name]
                self.cpu.setdefault(name, []).append(spent / self.tokens)


def run(options: argparse.Namespace) -> Result:
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> Result:
    model = by_name(options.model)
    cores, tokens = options.cores, options.tokens
    others = set(range(os.cpu_count() or 1)) - set(cores) or set(cores)
    if can_pin():
        os.sched_setaffinity(0, others)  # and what is started from here on
    async with cluster([Deployment("bench", model)]) as made, AsyncExitStack() as rivals:
        pin(made.processes[made.node_names[0]], cores)
        first: list[float] = []

        async def ours(number: int) -> list[float]:
            reply = await _ask(made, options, number)
            first.append(reply.ttft)
            return reply.gaps

        prompt = (await _ask(made, options, -1)).prompt_tokens
        systems = {OURS: Series(tokens, ours, _processes(made))}
        for name in (BARE, BATCHED) if hasattr(os, "SCHED_BATCH") else (BARE,):
            rival = await rivals.enter_async_context(
                in_process(
                    model, rows=1, tokens=tokens, prompt=prompt, cores=cores, in_batches=name == BATCHED
                )
            )
            systems[name] = Series(tokens, _rival(rival), {"mlx-lm": psutil.Process(rival.pid)})
        for number in range(options.rounds + 1):
            progress(f"round {number} of {options.rounds}")
            names = list(systems)
            start = number % len(names)
            for name in names[start:] + names[:start]:
                await systems[name].round(number)
    return {
        "model": options.model,
        "tokens": tokens,
        "prompt_tokens": prompt,
        "cores": cores,
        "ms": {
            name: summary([gap * 1e3 for gaps in one.rounds for gap in gaps]) for name, one in systems.items()
        },
        "cpu_ms": {
            name: {part: round(median(spent) * 1e3, 3) for part, spent in one.cpu.items()}
            for name, one in systems.items()
        },
        "ttft_ms": summary([seconds * 1e3 for seconds in first[1:]]),
        "against": {name: _ratios(systems[OURS], one) for name, one in systems.items() if name != OURS},
    }


def _rival(process: Process) -> Callable[[int], Awaitable[list[float]]]:
    async def measure(_: int) -> list[float]:
        gaps: list[float] = (await process.round())["gaps"]
        return gaps

    return measure


async def _ask(made: LocalCluster, options: argparse.Namespace, seed: int) -> Reply:
    """One whole answer. Raises Unavailable (BENCH_FAILED)."""
    replies, _ = await load(
        made.http_url,
        "bench",
        count=1,
        rate=float("inf"),
        words=options.words,
        max_tokens=options.tokens,
        seed=seed,
    )
    reply = replies[0]
    if reply.error or reply.completion_tokens != options.tokens:
        found = reply.error or f"{reply.completion_tokens} of {options.tokens} tokens came"
        raise Unavailable(f"a round cannot be counted: {found}", reason="BENCH_FAILED")
    return reply


def _processes(made: LocalCluster) -> dict[str, psutil.Process]:
    node = {kind(one): one for one in family(made.processes[made.node_names[0]])}
    return {**node, "gateway": psutil.Process(made.processes["gateway"])}


def _ratios(ours: Series, other: Series) -> dict[str, Any]:
    """Of means and of medians, by round; medians of both over the rounds."""
    means = [a / b for a, b in zip(ours.means, other.means, strict=True)]
    middles = [median(a) / median(b) for a, b in zip(ours.rounds, other.rounds, strict=True)]
    return {
        "ratio_of_means": round(median(means), 4),
        "ratio_of_medians": round(median(middles), 4),
        "rounds": [round(ratio, 4) for ratio in means],
    }


def checks(result: Result) -> list[Check]:
    return [
        Check(f"inter-token time, {OURS} / {name}", found["rounds"], 1.10)
        for name, found in result["against"].items()
    ]


def tables(result: Result) -> list[Table]:
    parts = ("mean", "p50", "p95", "p99", "max")
    rows = [[name, *(found[part] for part in parts)] for name, found in result["ms"].items()]
    ratios = [
        [name, found["ratio_of_means"], found["ratio_of_medians"], min(found["rounds"]), max(found["rounds"])]
        for name, found in result["against"].items()
    ]
    spent = [[name, part, ms] for name, found in result["cpu_ms"].items() for part, ms in found.items()]
    return [
        Table(
            f"one request, {result['model']}, cores {result['cores']}", ["ms between tokens", *parts], rows
        ),
        Table("sealring against", ["", "means", "medians", "best round", "worst round"], ratios),
        Table("CPU, prompt included", ["system", "process", "ms a token"], spent),
    ]


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    parts = ("mean", "p50", "p95", "p99")
    for index, (name, found) in enumerate(result["ms"].items()):
        places = [place + index * 0.27 for place in range(len(parts))]
        axes.bar(places, [found[part] for part in parts], width=0.25, label=name)
    axes.set_xticks([place + 0.27 for place in range(len(parts))], parts)
    axes.set_ylabel("ms between tokens")
    axes.set_title(f"one request: {result['against'][BARE]['ratio_of_means']:.3f} of bare mlx-lm")
    axes.legend()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--cores", type=lambda text: [int(part) for part in text.split(",")], default=[0], help="of the model"
    )


BENCHMARK = Benchmark(
    "solo", (__doc__ or "").splitlines()[0], options, run, tables, chart, checks, quick=("--rounds", "4")
)
