"""The data plane alone: engines and carriers of a ring without gateway and daemons, against one process.

Engines and carriers are the product's processes; weights are random and made where they are used, so a ring
can be of any shape and on any device. Steps are announced as a gateway does, per lane the one in flight and
one more. The baseline is mlx-lm's BatchGenerator with the same weights in one process. Everything is measured
by turns in each round, so that its ratios hold whatever else the machine does.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from bench import ring_steps
from bench.frame import Result, Table, numbers, progress
from bench.models import SHAPES, configuration
from bench.ring_processes import Ring, device_environment
from bench.rivals import Baseline, baseline
from bench.verdict import Check, ratios

QUICK = ("--shape", "4x64", "--steps", "32", "--baseline", "8,1")

TARGETS = {
    ("70b", "2 stages, 2 x 32 rows / one process, 64 rows"): 0.90,
    ("8b", "2 stages, 2 x 32 rows / one process, 64 rows"): 0.85,
    ("70b", "4 stages, 4 x 32 rows / one process, 128 rows"): 0.80,
    ("70b", "2 stages, 2 x 32 rows / 2 stages, 1 x 1 rows"): 45,
    ("8b", "2 stages, 2 x 32 rows / 2 stages, 1 x 1 rows"): 45,
    ("70b", "2 stages, 2 x 32 rows / 2 stages, 2 x 32 rows, unsealed"): 0.98,
    ("8b", "2 stages, 2 x 32 rows / 2 stages, 2 x 32 rows, unsealed"): 0.98,
}
"""Ratios that are asked for, of the shapes that are meant for GPUs."""


@dataclass(frozen=True)
class Run:
    """Lanes x rows with `context` tokens each; `stages` 0: every ring; `context` 0: that of --prompt."""

    stages: int
    lanes: int
    rows: int
    context: int


def run(options: argparse.Namespace) -> Result:
    shape = SHAPES[options.shape]
    config = configuration(dataclasses.replace(shape, layers=options.layers or shape.layers))
    with ExitStack() as stack:
        rings = [Ring(options, config, stages, stack) for stages in options.stages]
        alone = None
        if options.baseline:
            gpu = device_environment(options.gpus, options.baseline_gpu)
            cores = options.cores[:1]
            alone = stack.enter_context(baseline(json.dumps(config), cores=cores, environment=gpu))
            alone.answer()
        for ring in rings:
            ring.wait_loaded()
        progress(f"loaded, layers {', '.join(str(ring.split) for ring in rings)}")
        measured = []
        for number in range(options.rounds):
            for found in one_round(options, rings, alone):
                progress(f"round {number}: {found['name']}: {found['tokens_per_second']:.1f} tokens/s")
                for rank, stage in enumerate(found.get("stages", [])):
                    progress(f"    stage {rank}: {stage}")
                measured.append({"round": number} | found)
    return {"shape": options.shape, "splits": [ring.split for ring in rings]} | digest(measured)


def one_round(
    options: argparse.Namespace, rings: list[Ring], alone: Baseline | None
) -> Iterator[dict[str, Any]]:
    """Everything once."""
    times = {"warm": options.warm, "steps": options.steps}

    def labelled(name: str, wanted: Run, found: dict[str, Any]) -> dict[str, Any]:
        name += f", {wanted.context} tokens" if wanted.context not in (0, options.prompt) else ""
        return {"name": name, "context": wanted.context or options.prompt} | found

    for wanted in options.baseline:
        assert alone is not None
        context = wanted.context or options.prompt
        found = alone.run(do="decode", rows=wanted.rows, context=context, **times)
        yield labelled(f"one process, {wanted.rows} rows", wanted, found)
    for ring, wanted, sealed in itertools.product(rings, options.runs, (True, False)):
        if wanted.stages in (0, ring.size) and (sealed or options.unsealed):
            sizes = {"lanes": wanted.lanes, "rows": wanted.rows, "context": wanted.context or options.prompt}
            work = partial(ring_steps.decode, **sizes, **times)
            found, left = ring.run(work, wanted.lanes * wanted.rows, sealed)
            found |= summary(left, found.pop("decode_from"))
            name = f"{ring.size} stages, {wanted.lanes} x {wanted.rows} rows"
            yield labelled(name if sealed else f"{name}, unsealed", wanted, found)


def summary(left: list[dict[str, Any]], decode_from: int) -> dict[str, Any]:
    """Medians of every stage's decode steps in ms: between the marks of a step ("fed-launched"), between
    steps, and of the hop from the end of a stage's compute to the next stage's input, if that waited."""
    by_step = [{one["step"]: one for one in each["trace"] if one["step"] >= decode_from} for each in left]
    stages = []
    for rank, steps in enumerate(by_step):
        ordered = [steps[number] for number in sorted(steps)]
        names = [name for name in ordered[0] if name != "step"]
        entry = {
            f"{before}-{after}": _middle([one[after] - one[before] for one in ordered])
            for before, after in [*itertools.pairwise(names), ("fed", "ready")]
        }
        entry["period"] = _middle([b["ready"] - a["ready"] for a, b in itertools.pairwise(ordered)])
        if rank + 1 < len(by_step):
            pairs = [(one, by_step[rank + 1].get(number)) for number, one in steps.items()]
            hops = [
                there["fed"] - one["ready"]
                for one, there in pairs
                if there and there["started"] < one["ready"]
            ]
            entry["hop"] = _middle(hops)
        stages.append(entry)
    tokens = {int(row): each for row, each in left[0]["tokens"].items()}
    return {
        "stages": stages,
        "tokens": [tokens[row] for row in sorted(tokens)],
        "peak_memory": [each["peak_memory"] for each in left],
    }


def _middle(seconds: list[float]) -> float | None:
    """Milliseconds."""
    return round(median(seconds) * 1000, 3) if seconds else None


def digest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, their ratios, and whether all made the same tokens for the same rows."""
    rates: dict[str, list[float]] = {}
    for one in found:
        rates.setdefault(one["name"], []).append(one["tokens_per_second"])
    contexts = {one["name"]: one["context"] for one in found}
    rounds = {
        f"{a} / {b}": ratios(rates[a], rates[b])
        for a, b in itertools.permutations(rates, 2)
        if "stages" in a and contexts[a] == contexts[b]
    }
    return {
        "tokens_per_second": {name: round(median(each), 1) for name, each in rates.items()},
        "rounds": rounds,
        "ratios": {name: round(median([one for one in each if one]), 3) for name, each in rounds.items()},
        "same_tokens": same_tokens(found),
        "runs": found,
    }


def same_tokens(found: list[dict[str, Any]]) -> float:
    """The part of all rows that have the tokens of the same row in the run with most rows of its kind."""
    same: list[bool] = []
    for context in {one["context"] for one in found}:
        alike: list[list[list[int]]] = [
            one.pop("tokens") for one in found if one["context"] == context and "tokens" in one
        ]
        reference = max(alike, key=len, default=[])
        for tokens in alike:
            same += [a[: len(b)] == b[: len(a)] for a, b in zip(reference, tokens, strict=False)]
    return round(sum(same) / max(1, len(same)), 3)


def checks(result: Result) -> list[Check]:
    return [
        Check(f"{shape}: {name}", result["rounds"][name], target, True)
        for (shape, name), target in TARGETS.items()
        if shape == result["shape"] and name in result["rounds"]
    ]


def tables(result: Result) -> list[Table]:
    title = f"{result['shape']}, layers {', '.join(map(str, result['splits']))}"
    return [
        Table(title, ["what", "tokens/s"], list(result["tokens_per_second"].items())),
        Table("ratios", ["what", "ratio"], list(result["ratios"].items())),
    ]


def runs(text: str) -> list[Run]:
    """[STAGES/]LANESxROWS[@TOKENS],... or, of one process, ROWS[@TOKENS],..."""
    found = []
    for part in filter(None, text.split(",")):
        stages, _, rest = part.rpartition("/")
        shape, _, context = rest.partition("@")
        lanes, _, rows = shape.rpartition("x")
        found.append(Run(int(stages or 0), int(lanes or 1), int(rows), int(context or 0)))
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="12x512")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own number")
    parser.add_argument("--stages", type=numbers, default=[2], help="of each ring, ...")
    parser.add_argument(
        "--runs",
        type=runs,
        default=runs("2x4,1x1"),
        help="LANESxROWS, with STAGES/ in front for one ring only and @TOKENS behind for longer prompts, ...",
    )
    parser.add_argument("--baseline", type=runs, default=[], help="rows of one process, or ROWS@TOKENS, ...")
    parser.add_argument("--unsealed", action="store_true", help="each ring a second time without sealing")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--warm", type=int, default=8, help="steps of each lane before the measurement")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=0, help="engine r computes on GPU r modulo this")
    parser.add_argument("--baseline-gpu", type=int, default=0)
    parser.add_argument("--cores", type=numbers, default=[], help="a stage's processes on one core each")
    parser.add_argument("--carrier-path", default="", help="where carriers find their packages, if elsewhere")
