"""Side by side in one run, on the same model and cores: mlx-lm alone, its server, its pipeline, and ours.

mlx-lm alone is BatchGenerator in a process, or generate_step for one request. Systems take turns, in another
order every round, and the first round is not counted. Systems that are not measured are stopped (sealring
rings rest by themselves). Every system has the same two cores, including its HTTP server and scheduler; the
clients have the others. With --gpus no process is pinned: each stage has a GPU of its own, and mlx-lm the
first.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

from bench.clusters import Deployment, can_pin, cluster, cores_after, pin_cluster
from bench.frame import Result, Table, names_of, numbers, progress
from bench.models import by_name
from bench.rivals import Baseline, Server, baseline, server
from bench.serve import load
from bench.steady import steady_rate
from bench.summaries import percentile, summary
from bench.verdict import Check, ratios
from sealring.cli.local.cluster import LocalCluster

ALONE, BATCHED, SERVER = "mlx-lm", "mlx-lm, our scheduling policy", "mlx_lm.server"
OURS, PIPELINE = "sealring, 2 stages", "mlx_lm.server --pipeline, 2 ranks"
TENSOR, THEIR_TENSOR = "sealring, tensor, 2 nodes", "mlx_lm.server, tensor, 2 ranks"
DEFAULT = ["alone", "server", "pipeline", "one", "two"]
SYSTEMS = {
    **{"alone": ALONE, "batched": BATCHED, "server": SERVER, "pipeline": PIPELINE},
    **{"one": "sealring, ring of one", "two": OURS},
    **{"tensor": TENSOR, "their-tensor": THEIR_TENSOR},
}

QUICK = ("--rounds", "1", "--tokens", "16", "--round-seconds", "25")
QUICK_SECONDS = 150.0


async def run(options: argparse.Namespace) -> Result:
    if can_pin() and not options.gpus:
        os.sched_setaffinity(0, options.client_cores)
    rounds: dict[str, list[Result]] = {}
    async with AsyncExitStack() as stack:
        systems: dict[str, Any] = {}
        for short in options.systems:
            progress(f"starting {SYSTEMS[short]}")
            systems[SYSTEMS[short]] = await start(stack, short, options)
        names = list(systems)
        for number in range(options.rounds + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                system = systems[name]
                for rate in [math.inf, *(options.rates if number else [])]:
                    if rate < math.inf and isinstance(system, Baseline):
                        continue
                    label = name if rate == math.inf else f"{name}, {rate:g} requests/s"
                    progress(f"round {number} of {options.rounds}: {label}")
                    if isinstance(system, Baseline):
                        found = await asyncio.to_thread(_alone, system, options)
                    else:
                        found = await _round(system, options, number, rate)
                    if number:
                        rounds.setdefault(label, []).append(found)
    given = {key: value for key, value in vars(options).items() if key != "client_cores"}
    return {"options": given, "systems": {name: _sum_up(each) for name, each in rounds.items()}}


async def start(stack: AsyncExitStack, short: str, options: argparse.Namespace) -> Any:
    """One of SYSTEMS, up until the stack is closed, for `options.requests` rows."""
    model, cores = by_name(options.model), [] if options.gpus else options.cores
    if short in ("alone", "batched"):
        alone = stack.enter_context(baseline(str(model), cores=cores, in_batches=short == "batched"))
        await asyncio.to_thread(alone.answer)
        return alone
    backend = "nccl" if options.gpus > 1 else "ring"
    if short in ("server", "pipeline", "their-tensor"):
        ranks, how = 1 if short == "server" else 2, {"pipeline": short == "pipeline"}
        if short == "their-tensor":
            how["backend"] = backend
        started = await stack.enter_async_context(
            server(model, cores=cores, ranks=ranks, rows=options.requests, **how)
        )
        started.pause()
        return started
    spec: dict[str, Any] = {"max_rows": options.requests, "prefill_chunk": options.prefill_chunk}
    if short == "tensor":
        spec |= {"strategy": "tensor", "clear_links": True, "backend": backend}
    deployment = Deployment("bench", model, stages=1 if short == "one" else 2, spec=spec)
    made = await stack.enter_async_context(cluster([deployment], gpus=options.gpus))
    if cores:
        pin_cluster(made, cores, options.gateway_cores or cores)
    return made


def _alone(system: Baseline, options: argparse.Namespace) -> Result:
    found = system.run(do="together", rows=options.requests, tokens=options.tokens, words=options.words)
    return {
        "tokens_per_second": found["tokens"] / found["seconds"],
        "steady": options.requests / median(found["gaps"]) if found["gaps"] else 0.0,
        "ttft": found["ttft"],
        "gaps": found["gaps"],
        "token": sum(found["gaps"]) / (options.tokens - 1),
        "failed": 0,
    }


async def _round(
    system: Server | LocalCluster, options: argparse.Namespace, number: int, rate: float
) -> Result:
    """Prompts are new in every round: no system finds them in a cache."""
    at_once = rate == math.inf
    if isinstance(system, Server):
        url, model = system.url, str(by_name(options.model))
        system.resume()
    else:
        url, model = system.http_url, "bench"
    try:
        replies, seconds = await load(
            url,
            model,
            count=options.requests if at_once else options.arrivals,
            rate=rate,
            words=options.words,
            max_tokens=options.tokens,
            seed=round(number * 1000 + (0 if at_once else rate)),
            seconds=options.round_seconds,
        )
    finally:
        if isinstance(system, Server):
            system.pause()
    good = [one for one in replies if one.ok]
    steady = steady_rate(good, max(one.arrivals[0] for one in good)) if good and at_once else 0.0
    return {
        "tokens_per_second": sum(one.completion_tokens for one in good) / seconds,
        "steady": steady,
        "ttft": [one.ttft for one in good],
        "gaps": [gap for one in good for gap in one.gaps],
        "token": median([one.tpot for one in good] or [0.0]),
        "prompt_tokens": median([one.prompt_tokens for one in good] or [0]),
        "failed": len(replies) - len(good),
    }


def _sum_up(rounds: list[Result]) -> Result:
    """`token_ms`: by round, time a token after the first of the median answer (two may come as one piece)."""
    rates = [one["tokens_per_second"] for one in rounds]
    return {
        "tokens_per_second": round(median(rates), 2),
        "rounds": [round(rate, 2) for rate in rates],
        "steady_tokens_per_second": round(median([one["steady"] for one in rounds]), 2),
        "ttft_ms": summary([seconds * 1e3 for one in rounds for seconds in one["ttft"]]),
        "gap_ms": summary([seconds * 1e3 for one in rounds for seconds in one["gaps"]]),
        "token_ms": [round(one["token"] * 1e3, 3) for one in rounds],
        "prompt_tokens": median([one.get("prompt_tokens", 0) for one in rounds]),
        "ttft_p95_ms": [percentile(one["ttft"], 0.95) * 1e3 if one["ttft"] else None for one in rounds],
        "failed_by_round": [one["failed"] for one in rounds],
    }


def against(result: Result) -> dict[str, float]:
    """Tokens per second of ours on two stages against every other that answered, median over rounds."""
    systems = result["systems"]
    if OURS not in systems:
        return {}
    found = {
        name: [one for one in ratios(systems[OURS]["rounds"], other["rounds"]) if one is not None]
        for name, other in systems.items()
        if name in SYSTEMS.values() and name != OURS
    }
    return {name: median(each) for name, each in found.items() if each}


def checks(result: Result) -> list[Check]:
    found = result["systems"]
    failures = zip(*(each["failed_by_round"] for each in found.values()), strict=True)
    failed = Check("failed requests", [sum(each) for each in failures], 0)
    tensor = []
    if TENSOR in found and THEIR_TENSOR in found:
        ratio = ratios(found[TENSOR]["rounds"], found[THEIR_TENSOR]["rounds"])
        tensor = [Check("tensor against mlx_lm.server's, tokens/s", ratio, 1.0, True)]
    if OURS not in found or PIPELINE not in found:
        return [*tensor, failed]
    ours, theirs = found[OURS], found[PIPELINE]
    speed = ratios(ours["rounds"], theirs["rounds"])
    delay = ratios(ours["ttft_p95_ms"], theirs["ttft_p95_ms"])
    return [
        *tensor,
        Check("2 stages against mlx_lm.server --pipeline, tokens/s", speed, 1.7, True),
        Check("2 stages against mlx_lm.server --pipeline, TTFT p95", delay, 1.0),
        failed,
    ]


def tables(result: Result) -> list[Table]:
    ours = against(result)
    rows = [
        [
            name,
            each["tokens_per_second"],
            each["steady_tokens_per_second"],
            *(each["ttft_ms"].get(part) for part in ("p50", "p95")),
            *(each["gap_ms"].get(part) for part in ("p50", "p95")),
            sum(each["failed_by_round"]),
            ours.get(name),
        ]
        for name, each in result["systems"].items()
    ]
    columns = ["system", "tok/s", "tok/s, all rows decoding", "ttft p50 ms", "ttft p95 ms"]
    columns += ["gap p50 ms", "gap p95 ms", "failed", "2 stages against it"]
    return [Table(f"{result['options']['requests']} requests", columns, rows)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256-qwen2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument(
        "--systems", type=names_of("system", SYSTEMS), default=DEFAULT, help=", ".join(SYSTEMS)
    )
    parser.add_argument("--rates", type=numbers, default=[], help="requests/s of further, open loads, ...")
    parser.add_argument("--arrivals", type=int, default=64, help="requests of each of those")
    parser.add_argument("--gpus", type=int, default=0, help="node n computes on GPU n modulo this")
    parser.add_argument("--prefill-chunk", type=int, default=0, help="of sealring; 0: the default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=numbers, default=[0, 1], help="of every server")
    parser.add_argument("--gateway-cores", type=numbers, default=[], help="if not the same")
    parser.add_argument("--round-seconds", type=float, default=90.0, help="what takes longer has failed")
    parser.add_argument("--client-cores", type=numbers, default=cores_after(2))
