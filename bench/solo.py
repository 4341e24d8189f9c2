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
from contextlib import ExitStack
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench.clusters import Deployment, can_pin, cluster, cpu_seconds, pin
from bench.frame import Result, Table, numbers, progress
from bench.models import by_name
from bench.openai_client import Reply
from bench.rivals import baseline
from bench.serve import load
from bench.summaries import summary
from bench.verdict import Check
from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.errors import Unavailable

BARE, BATCHED, OURS = "mlx-lm", "mlx-lm, our scheduling policy", "sealring, ring of one"

QUICK = ("--rounds", "4")


async def run(options: argparse.Namespace) -> Result:
    """ms between tokens by system; CPU ms a token by system and process. The first round is not counted."""
    model, cores, tokens = by_name(options.model), options.cores, options.tokens
    gaps: dict[str, list[list[float]]] = {}
    cpu: dict[str, dict[str, list[float]]] = {}
    if can_pin():  # and what is started from here on
        os.sched_setaffinity(0, set(range(os.cpu_count() or 1)) - set(cores) or set(cores))
    async with cluster([Deployment("bench", model)]) as made:
        pin(made.processes[made.node_names[0]], cores)
        prompt = (await _ask(made, options, -1)).prompt_tokens
        with ExitStack() as stack:
            rivals = {}
            for name in (BARE, BATCHED) if hasattr(os, "SCHED_BATCH") else (BARE,):
                batched = name == BATCHED
                rivals[name] = stack.enter_context(baseline(str(model), cores=cores, in_batches=batched))
                rivals[name].answer()
            names = [OURS, *rivals]
            for number in range(options.rounds + 1):
                progress(f"round {number} of {options.rounds}")
                start = number % len(names)
                for name in names[start:] + names[:start]:
                    rival = rivals.get(name)
                    before = _used(made, rival)
                    if rival is None:
                        found = (await _ask(made, options, number)).gaps
                    else:
                        found = (await asyncio.to_thread(rival.run, do="solo", tokens=tokens, prompt=prompt))[
                            "gaps"
                        ]
                    if number:
                        gaps.setdefault(name, []).append([gap * 1e3 for gap in found])
                        for part, seconds in _used(made, rival).items():
                            spent = (seconds - before.get(part, 0.0)) / tokens * 1e3
                            cpu.setdefault(name, {}).setdefault(part, []).append(spent)
    return {
        "model": options.model,
        "tokens": tokens,
        "prompt_tokens": prompt,
        "cores": cores,
        "ms": {name: summary([gap for one in each for gap in one]) for name, each in gaps.items()},
        "cpu_ms": {
            name: {part: round(median(spent), 3) for part, spent in each.items()}
            for name, each in cpu.items()
        },
        "against": {name: _against(gaps[OURS], gaps[name]) for name in rivals},
    }


async def _ask(made: LocalCluster, options: argparse.Namespace, seed: int) -> Reply:
    """One whole answer. Raises Unavailable (BENCH_FAILED)."""
    replies, _ = await load(
        made.http_url, "bench", count=1, words=options.words, max_tokens=options.tokens, seed=seed
    )
    reply = replies[0]
    if reply.error or reply.completion_tokens != options.tokens:
        found = reply.error or f"{reply.completion_tokens} of {options.tokens} tokens came"
        raise Unavailable(f"a round cannot be counted: {found}", reason="BENCH_FAILED")
    return reply


def _used(made: LocalCluster, rival: Any) -> dict[str, float]:
    """CPU seconds so far, of the cluster or of mlx-lm."""
    if rival is None:
        return cpu_seconds(made)
    return {"mlx-lm": sum(psutil.Process(rival.process.pid).cpu_times()[:2])}


def _against(ours: list[list[float]], other: list[list[float]]) -> dict[str, Any]:
    """Ratios of the time of all tokens by round (two may come as one piece), and their median; and of medians
    between pieces."""
    means = [sum(a) / sum(b) for a, b in zip(ours, other, strict=True)]
    middles = [median(a) / median(b) for a, b in zip(ours, other, strict=True)]
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
    title = f"one request, {result['model']}, cores {result['cores']}"
    rows = [[name, *(found[part] for part in parts)] for name, found in result["ms"].items()]
    ratios = [
        [name, found["ratio_of_means"], found["ratio_of_medians"], min(found["rounds"]), max(found["rounds"])]
        for name, found in result["against"].items()
    ]
    spent = [[name, part, ms] for name, found in result["cpu_ms"].items() for part, ms in found.items()]
    return [
        Table(title, ["ms between tokens", *parts], rows),
        Table("sealring against", ["", "means", "medians", "best round", "worst round"], ratios),
        Table("CPU, prompt included", ["system", "process", "ms a token"], spent),
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cores", type=numbers, default=[0], help="of the model")
