"""Side by side in one run, on the same model and cores: mlx-lm alone, its server, its pipeline, and ours.

Rounds take turns; whoever is not measured is stopped (sealring rings rest by themselves). Every system has
the same two cores, its HTTP server and scheduler included; the clients have the others. With --gpus nothing
is tied to cores: a stage has a GPU of its own, mlx-lm the first one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.clusters import Deployment, Meter, can_pin, cluster, pin
from bench.frame import Benchmark, Result, Table, progress, standalone
from bench.models import by_name
from bench.openai_client import Reply
from bench.rivals import Process, in_process, server
from bench.scaling import numbers, steady_rate
from bench.serve import load
from bench.summaries import median, percentile, summary
from bench.verdict import Check
from bench.verdict import ratios as round_ratios
from sealring.cli.local.cluster import LocalCluster

ALONE, SERVER = "mlx-lm BatchGenerator, in process", "mlx_lm.server"
OURS, PIPELINE = "sealring, 2 stages", "mlx_lm.server --pipeline, 2 ranks"
SYSTEMS = {"alone": ALONE, "server": SERVER, "pipeline": PIPELINE, "one": "sealring, 1 stage", "two": OURS}
_SAMPLE_SECONDS = 0.1


def run(options: argparse.Namespace) -> Result:
    if can_pin() and not options.gpus:
        os.sched_setaffinity(0, options.client_cores)
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> Result:
    model = by_name(options.model)
    rounds: dict[str, list[Result]] = {}
    async with AsyncExitStack() as stack:
        systems: dict[str, Any] = {}
        for short in options.systems:
            progress(f"starting {SYSTEMS[short]}")
            systems[SYSTEMS[short]] = await _start(stack, short, model, options)
        for number in range(options.rounds + 1):
            for name, system in systems.items():
                for rate in [float("inf"), *(options.rates if number else [])]:
                    if rate != float("inf") and isinstance(system, Process) and not system.url:
                        continue
                    label = name if rate == float("inf") else f"{name}, {rate:g} requests/s"
                    progress(f"round {number} of {options.rounds}: {label}")
                    found = await _round(system, str(model), options, number, rate)
                    if number:
                        rounds.setdefault(label, []).append(found)
    return {"options": _given(options), "systems": {name: _sum_up(each) for name, each in rounds.items()}}


async def _start(stack: AsyncExitStack, short: str, model: Path, options: argparse.Namespace) -> Any:
    cores = [] if options.gpus else options.cores
    if short == "alone":
        return await stack.enter_async_context(
            in_process(model, rows=options.requests, tokens=options.tokens, words=options.words, cores=cores)
        )
    if short in ("server", "pipeline"):
        ranks = 2 if short == "pipeline" else 1
        started = await stack.enter_async_context(
            server(model, cores=cores, ranks=ranks, rows=options.requests)
        )
        started.pause()
        return started
    spec = {"max_rows": options.requests, "prefill_chunk": options.prefill_chunk}
    deployment = Deployment("bench", model, stages=1 if short == "one" else 2, spec=spec)
    made = await stack.enter_async_context(cluster([deployment], gpus=options.gpus))
    if cores:
        _pin(made, cores)
    return made


def _pin(made: LocalCluster, cores: list[int]) -> None:
    for index, name in enumerate(made.node_names):
        pin(made.processes[name], cores if len(made.node_names) == 1 else [cores[index]])
    for name in ("gateway", "coordinator"):
        pin(made.processes[name], cores)


async def _round(system: Any, model: str, options: argparse.Namespace, number: int, rate: float) -> Result:
    """Prompts are new in every round: no system finds them in a cache."""
    if isinstance(system, Process) and not system.url:
        found = await system.round()
        rows = len(found["ttft"])
        return {
            "tokens_per_second": found["tokens"] / found["seconds"],
            "steady": rows / median(found["gaps"]) if found.get("gaps") else 0.0,
            "ttft": found["ttft"],
            "gaps": found.get("gaps", []),
            "failed": 0,
        }
    ours = isinstance(system, LocalCluster)
    meter = Meter(system) if ours else None
    sampling = asyncio.create_task(_sample(meter)) if meter is not None else None
    if not ours:
        system.resume()
    try:
        replies, seconds = await load(
            system.http_url if ours else system.url,
            "bench" if ours else model,
            count=options.requests if rate == float("inf") else options.arrivals,
            rate=rate,
            words=options.words,
            max_tokens=options.tokens,
            seed=round(number * 1000 + (0 if rate == float("inf") else rate)),
            seconds=options.round_seconds,
        )
    finally:
        if sampling is not None:
            sampling.cancel()
        if not ours:
            system.pause()
    good = [one for one in replies if one.ok]
    found = {
        "tokens_per_second": sum(one.completion_tokens for one in good) / seconds,
        "steady": _steady(good) if rate == float("inf") else 0.0,
        "ttft": [one.ttft for one in good],
        "gaps": [gap for one in good for gap in one.gaps],
        "prompt_tokens": median([one.prompt_tokens for one in good] or [0]),
        "failed": len(replies) - len(good),
    }
    if meter is not None and good:
        begun, ended = max(one.arrivals[0] for one in good), min(one.arrivals[-1] for one in good)
        if rate != float("inf"):
            begun, ended = good[0].begun, max(one.ended for one in good)
        found["cores"] = meter.cores(begun, ended)
    return found


def _steady(replies: list[Reply]) -> float:
    return steady_rate(replies, max(one.arrivals[0] for one in replies)) if replies else 0.0


async def _sample(meter: Meter) -> None:
    while True:
        meter.sample()
        await asyncio.sleep(_SAMPLE_SECONDS)


def _sum_up(rounds: list[Result]) -> Result:
    rates = [one["tokens_per_second"] for one in rounds]
    return {
        "tokens_per_second": round(median(rates), 2),
        "rounds": [round(rate, 2) for rate in rates],
        "steady_tokens_per_second": round(median([one["steady"] for one in rounds]), 2),
        "ttft_ms": summary([seconds * 1e3 for one in rounds for seconds in one["ttft"]]),
        "gap_ms": summary([seconds * 1e3 for one in rounds for seconds in one["gaps"]]),
        "cores": rounds[-1].get("cores", {}),
        "prompt_tokens": median([one.get("prompt_tokens", 0) for one in rounds]),
        "ttft_p95_ms": [percentile(one["ttft"], 0.95) * 1e3 if one["ttft"] else None for one in rounds],
        "failed_by_round": [one["failed"] for one in rounds],
        "failed": sum(one["failed"] for one in rounds),
    }


def _given(options: argparse.Namespace) -> Result:
    return {key: value for key, value in vars(options).items() if key != "client_cores"}


def ratios(result: Result) -> dict[str, float]:
    """Tokens per second of ours on two stages against every other that answered, median over rounds."""
    if OURS not in result["systems"]:
        return {}
    ours = result["systems"][OURS]["rounds"]
    against = {
        name: [a / b for a, b in zip(ours, other["rounds"], strict=True) if b]
        for name, other in result["systems"].items()
        if name in SYSTEMS.values() and name != OURS
    }
    return {name: round(median(each), 3) for name, each in against.items() if each}


def checks(result: Result) -> list[Check]:
    found = result["systems"]
    failures = zip(*(each["failed_by_round"] for each in found.values()), strict=True)
    failed = Check("failed requests", [sum(each) for each in failures], 0)
    if OURS not in found or PIPELINE not in found:
        return [failed]
    ours, theirs = found[OURS], found[PIPELINE]
    speed = round_ratios(ours["rounds"], theirs["rounds"])
    delay = round_ratios(ours["ttft_p95_ms"], theirs["ttft_p95_ms"])
    return [
        Check("2 stages against mlx_lm.server --pipeline, tokens/s", speed, 1.7, True),
        Check("2 stages against mlx_lm.server --pipeline, TTFT p95", delay, 1.0),
        failed,
    ]


def tables(result: Result) -> list[Table]:
    against = ratios(result)
    rows = [
        [
            name,
            each["tokens_per_second"],
            each["steady_tokens_per_second"],
            *(each["ttft_ms"].get(part) for part in ("p50", "p95")),
            *(each["gap_ms"].get(part) for part in ("p50", "p95")),
            each["failed"],
            1.0 if name == OURS else against.get(name),
        ]
        for name, each in result["systems"].items()
    ]
    columns = ["system", "tok/s", "tok/s, all rows decoding", "ttft p50 ms", "ttft p95 ms"]
    columns += ["gap p50 ms", "gap p95 ms", "failed", "2 stages against it"]
    found = [Table(f"{result['options']['requests']} requests", columns, rows)]
    for name, each in result["systems"].items():
        if each["cores"]:
            found.append(Table(f"{name}: cores used", list(each["cores"]), [list(each["cores"].values())]))
    return found


def chart(result: Result, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    names = [name for name in result["systems"] if name in SYSTEMS.values()]
    left.barh(names, [result["systems"][name]["tokens_per_second"] for name in names])
    left.set_xlabel("tokens per second")
    right.barh(
        names, [result["systems"][name]["ttft_ms"].get("p95", 0) for name in names], color="tab:orange"
    )
    right.set_xlabel("TTFT p95, ms")
    right.set_yticks([])
    for axes in (left, right):
        axes.invert_yaxis()


def systems(text: str) -> list[str]:
    found = text.split(",")
    if unknown := set(found) - set(SYSTEMS):
        raise argparse.ArgumentTypeError(f"there is no system {sorted(unknown)[0][:32]}")
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256-qwen2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--systems", type=systems, default=list(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--rates", type=numbers, default=[], help="requests/s of further, open loads, ...")
    parser.add_argument("--arrivals", type=int, default=64, help="requests of each of those")
    parser.add_argument("--gpus", type=int, default=0, help="node n computes on GPU n modulo this")
    parser.add_argument("--prefill-chunk", type=int, default=0, help="of sealring; 0: the default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=numbers, default=[0, 1], help="of every server")
    parser.add_argument(
        "--round-seconds", type=float, default=90.0, help="what is not answered by then has failed"
    )
    parser.add_argument("--client-cores", type=numbers, default=[2, 3])


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


if __name__ == "__main__":
    standalone(BENCHMARK)
