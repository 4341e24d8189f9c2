"""One request at a time through the gateway and a ring of one, against bare mlx-lm: time between tokens.

Both hold the same model on the same cores; rounds take turns, and the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from bench.clusters import Deployment, can_pin, cluster, pin
from bench.frame import Benchmark, Check, Result, Table, progress
from bench.models import by_name
from bench.rivals import in_process
from bench.serve import load
from bench.summaries import median, summary


def run(options: argparse.Namespace) -> Result:
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> Result:
    model = by_name(options.model)
    cores = options.cores
    bare: list[list[float]] = []
    ours: list[list[float]] = []
    first: list[float] = []
    async with (
        in_process(model, rows=1, tokens=options.tokens, prompt=options.words, cores=cores) as mlx,
        cluster([Deployment("bench", model)]) as made,
    ):
        if can_pin():
            everything = set(range(os.cpu_count() or 1))
            pin(made.processes["node-0"], cores)
            pin(made.processes["gateway"], everything - set(cores) or everything)
        for number in range(options.rounds + 1):
            progress(f"round {number} of {options.rounds}")
            found = await mlx.round()
            replies, _ = await load(
                made.http_url,
                "bench",
                count=1,
                rate=float("inf"),
                words=options.words,
                max_tokens=options.tokens,
                seed=number,
            )
            if number:
                bare.append(found["gaps"])
                ours.append(replies[0].gaps)
                first.append(replies[0].ttft)
    ratios = [median(a) / median(b) for a, b in zip(ours, bare, strict=True)]
    whole = [sum(a) / len(a) / (sum(b) / len(b)) for a, b in zip(ours, bare, strict=True)]
    return {
        "model": options.model,
        "tokens": options.tokens,
        "cores": cores,
        "mlx_lm_ms": summary([gap * 1e3 for each in bare for gap in each]),
        "sealring_ms": summary([gap * 1e3 for each in ours for gap in each]),
        "ttft_ms": summary([seconds * 1e3 for seconds in first]),
        "ratio_of_medians": round(median(ratios), 4),
        "ratio_of_means": round(median(whole), 4),
        "rounds": [round(ratio, 4) for ratio in whole],
    }


def checks(result: Result) -> list[Check]:
    return [Check("inter-token time against bare mlx-lm", result["ratio_of_means"], 1.10)]


def tables(result: Result) -> list[Table]:
    rows = [
        [name, *(result[key][part] for part in ("mean", "p50", "p95", "p99", "max"))]
        for name, key in (("mlx-lm", "mlx_lm_ms"), ("sealring, ring of one", "sealring_ms"))
    ]
    columns = ["ms between tokens", "mean", "p50", "p95", "p99", "max"]
    return [Table(f"one request, {result['model']}, cores {result['cores']}", columns, rows)]


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    parts = ("mean", "p50", "p95", "p99")
    for index, (name, key) in enumerate((("mlx-lm", "mlx_lm_ms"), ("sealring", "sealring_ms"))):
        places = [place + index * 0.4 for place in range(len(parts))]
        axes.bar(places, [result[key][part] for part in parts], width=0.38, label=name)
    axes.set_xticks([place + 0.2 for place in range(len(parts))], parts)
    axes.set_ylabel("ms between tokens")
    axes.set_title(f"one request: {result['ratio_of_means']:.3f} of bare mlx-lm")
    axes.legend()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--cores", type=lambda text: [int(part) for part in text.split(",")], default=[0], help="of the model"
    )


BENCHMARK = Benchmark(
    "solo", (__doc__ or "").splitlines()[0], options, run, tables, chart, checks, quick=("--rounds", "5")
)
