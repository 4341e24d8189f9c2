"""Side by side in one run, on the same model and cores: mlx-lm alone, its server, its pipeline, and ours.

Rounds take turns; whoever is not measured is stopped (sealring rings rest by themselves). Every system has
the same two cores, its HTTP server and scheduler included; the clients have the others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import AsyncExitStack
from typing import Any

from bench.clusters import Deployment, can_pin, cluster, pin
from bench.frame import Benchmark, Check, Result, Table, progress
from bench.models import by_name
from bench.rivals import Process, in_process, server
from bench.serve import load
from bench.summaries import median, summary
from cli.cluster import LocalCluster

OURS, PIPELINE = "sealring, 2 stages", "mlx_lm.server --pipeline, 2 ranks"


def run(options: argparse.Namespace) -> Result:
    if can_pin():
        os.sched_setaffinity(0, options.client_cores)
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> Result:
    model, cores = by_name(options.model), options.cores
    rounds: dict[str, list[Result]] = {}
    async with AsyncExitStack() as stack:
        systems: dict[str, Any] = {}
        progress("starting mlx-lm in process")
        systems["mlx-lm BatchGenerator, in process"] = await stack.enter_async_context(
            in_process(model, rows=options.requests, tokens=options.tokens, prompt=options.words, cores=cores)
        )
        progress("starting mlx_lm.server")
        systems["mlx_lm.server"] = await stack.enter_async_context(server(model, cores=cores))
        systems["mlx_lm.server"].pause()
        progress("starting mlx_lm.server --pipeline")
        systems[PIPELINE] = await stack.enter_async_context(server(model, cores=cores, ranks=2))
        systems[PIPELINE].pause()
        for name, stages in (("sealring, 1 stage", 1), (OURS, 2)):
            spec = {"max_rows": options.requests}
            made = await stack.enter_async_context(
                cluster([Deployment("bench", model, stages=stages, spec=spec)])
            )
            _pin(made, cores)
            systems[name] = made
        for number in range(options.rounds + 1):
            for name, system in systems.items():
                progress(f"round {number} of {options.rounds}: {name}")
                found = await _round(system, str(model), options, number)
                if number:
                    rounds.setdefault(name, []).append(found)
    return {"options": _given(options), "systems": {name: _sum_up(each) for name, each in rounds.items()}}


def _pin(made: LocalCluster, cores: list[int]) -> None:
    for index, name in enumerate(made.node_names):
        pin(made.processes[name], cores if len(made.node_names) == 1 else [cores[index]])
    for name in ("gateway", "coordinator"):
        pin(made.processes[name], cores)


async def _round(system: Any, model: str, options: argparse.Namespace, number: int) -> Result:
    """Prompts are new in every round: no system finds them in a cache."""
    if isinstance(system, Process) and not system.url:
        found = await system.round()
        return {"tokens_per_second": found["tokens"] / found["seconds"], "ttft": found["ttft"], "failed": 0}
    ours = isinstance(system, LocalCluster)
    if not ours:
        system.resume()
    try:
        replies, seconds = await load(
            system.http_url if ours else system.url,
            "bench" if ours else model,
            count=options.requests,
            rate=float("inf"),
            words=options.words,
            max_tokens=options.tokens,
            seed=number,
            seconds=options.round_seconds,
        )
    finally:
        if not ours:
            system.pause()
    good = [one for one in replies if one.ok]
    tokens = sum(one.completion_tokens for one in good)
    return {
        "tokens_per_second": tokens / seconds,
        "ttft": [one.ttft for one in good],
        "failed": len(replies) - len(good),
    }


def _sum_up(rounds: list[Result]) -> Result:
    rates = [one["tokens_per_second"] for one in rounds]
    return {
        "tokens_per_second": round(median(rates), 2),
        "rounds": [round(rate, 2) for rate in rates],
        "ttft_ms": summary([seconds * 1e3 for one in rounds for seconds in one["ttft"]]),
        "failed": sum(one["failed"] for one in rounds),
    }


def _given(options: argparse.Namespace) -> Result:
    return {key: value for key, value in vars(options).items() if key != "client_cores"}


def ratios(result: Result) -> dict[str, float]:
    """Tokens per second of ours on two stages against every other that answered, median over rounds."""
    ours = result["systems"][OURS]["rounds"]
    against = {
        name: [a / b for a, b in zip(ours, other["rounds"], strict=True) if b]
        for name, other in result["systems"].items()
        if name != OURS
    }
    return {name: round(median(each), 3) for name, each in against.items() if each}


def checks(result: Result) -> list[Check]:
    found = result["systems"]
    ours, theirs = (found[name]["ttft_ms"].get("p95") for name in (OURS, PIPELINE))
    delay = round(ours / theirs, 3) if ours and theirs else None
    return [
        Check("2 stages against mlx_lm.server --pipeline, tokens/s", ratios(result).get(PIPELINE), 1.7, True),
        Check("2 stages against mlx_lm.server --pipeline, TTFT p95", delay, 1.0),
        Check("failed requests", sum(each["failed"] for each in found.values()), 0),
    ]


def tables(result: Result) -> list[Table]:
    against = ratios(result)
    rows = [
        [
            name,
            each["tokens_per_second"],
            each["ttft_ms"].get("p50"),
            each["ttft_ms"].get("p95"),
            each["failed"],
            1.0 if name == OURS else against.get(name),
        ]
        for name, each in result["systems"].items()
    ]
    columns = ["system", "tok/s", "ttft p50 ms", "ttft p95 ms", "failed", "2 stages against it"]
    return [Table(f"{result['options']['requests']} requests", columns, rows)]


def chart(result: Result, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    names = list(result["systems"])
    left.barh(names, [result["systems"][name]["tokens_per_second"] for name in names])
    left.set_xlabel("tokens per second")
    right.barh(
        names, [result["systems"][name]["ttft_ms"].get("p95", 0) for name in names], color="tab:orange"
    )
    right.set_xlabel("TTFT p95, ms")
    right.set_yticks([])
    for axes in (left, right):
        axes.invert_yaxis()


def cores_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256-qwen2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=cores_of, default=[0, 1], help="of every server")
    parser.add_argument(
        "--round-seconds", type=float, default=90.0, help="what is not answered by then has failed"
    )
    parser.add_argument("--client-cores", type=cores_of, default=[2, 3])


BENCHMARK = Benchmark(
    "peers",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    checks,
    quick=("--rounds", "1", "--tokens", "16", "--round-seconds", "25"),
    quick_seconds=150,
)
