"""The data plane alone: engines and carriers of a ring without gateway and daemons, against one process.

Engines and carriers are the product's processes; weights are random and made where they are used, so a ring
can be of any shape and on any device. Steps are announced as a gateway does, per lane the one in flight and
one more. The baseline is mlx-lm with the same weights in one process: BatchGenerator for decoding,
generate_step for one prompt. Everything is measured by turns in each round, so that its ratios hold whatever
else the machine does.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import ring_steps
from bench.frame import Benchmark, Result, Table, progress, standalone
from bench.ring_processes import SHAPES, Baseline, Ring
from bench.verdict import Check, ratios
from sealring.mesh.crypto.suites import Suite

PREFILL_TIMES = 3


@dataclass(frozen=True)
class Run:
    """Lanes x rows with so many tokens each; `stages` 0: of every ring."""

    stages: int
    lanes: int
    rows: int
    context: int


def run(options: argparse.Namespace) -> Result:
    if options.split and len(options.stages) > 1:
        raise SystemExit("--split is for one ring")
    with ExitStack() as stack:
        begun = time.perf_counter()
        rings = [Ring(options, stages, stack) for stages in options.stages]
        wanted = options.baseline or options.batch or (options.prefill and not options.only_rings)
        baseline = Baseline(options, stack) if wanted else None
        for ring in rings:
            ring.wait_loaded()
        if baseline is not None:
            baseline.wait_loaded()
        layers = ", ".join(str(ring.split) for ring in rings)
        progress(f"loaded in {time.perf_counter() - begun:.1f} s, layers {layers}")
        measured = Measured(options, rings, baseline)
        for number in range(options.rounds):
            measured.round(number)
    return (
        {"shape": options.shape, "dtype": options.dtype, "splits": [ring.split for ring in rings]}
        | digest(measured.decoded)
        | {"prefill": prefill_rates(measured.prefilled), "batch": measured.batched}
    )


class Measured:
    """What has been measured so far, round by round."""

    def __init__(self, options: argparse.Namespace, rings: list[Ring], baseline: Baseline | None) -> None:
        self._options, self._rings, self._baseline = options, rings, baseline
        self.decoded: list[dict[str, Any]] = []
        self.prefilled: dict[str, list[float]] = {}
        self.batched: list[dict[str, Any]] = []

    def round(self, number: int) -> None:
        for rows, context in self._options.baseline:
            self._decode_alone(number, rows, context or self._options.prompt)
        for ring, wanted in itertools.product(self._rings, self._options.runs):
            if wanted.stages in (0, ring.size):
                for sealed in [True, False] if self._options.unsealed else [True]:
                    self._decode(number, ring, wanted, sealed)
        for ring in self._rings if self._options.varying else []:
            self._varying(number, ring)
        for tokens in self._options.prefill:
            self._prefill(tokens)
        if self._options.batch and not number:
            self._batch()

    def _decode_alone(self, number: int, rows: int, context: int) -> None:
        assert self._baseline is not None
        given = {"rows": rows, "context": context, "steps": self._options.steps, "warm": self._options.warm}
        found = self._baseline.run(do="decode", **given)
        self._note(number, f"one process, {rows} rows", context, found)

    def _decode(self, number: int, ring: Ring, wanted: Run, sealed: bool) -> None:
        context = wanted.context or self._options.prompt
        work = partial(
            ring_steps.decode,
            lanes=wanted.lanes,
            rows=wanted.rows,
            context=context,
            warm=self._options.warm,
            steps=self._options.steps,
            chunk=max(self._options.chunks),
        )
        found, left = ring.run(work, wanted.lanes * wanted.rows, sealed)
        found |= summary(left, found.pop("decode_from"))
        name = f"{ring.size} stages, {wanted.lanes} x {wanted.rows} rows" + ("" if sealed else ", unsealed")
        self._note(number, name, context, found)

    def _varying(self, number: int, ring: Ring) -> None:
        rows, longest, requests = self._options.varying
        work = partial(ring_steps.varying, lanes=ring.size, rows=rows, longest=longest, requests=requests)
        found, left = ring.run(work, 2 * ring.size * rows)
        found |= {"stages": [], "peak_memory": [each["peak_memory"] for each in left]}
        self._note(number, f"{ring.size} stages, rows that come and go", 0, found)

    def _note(self, number: int, name: str, context: int, found: dict[str, Any]) -> None:
        if context not in (0, self._options.prompt):
            name += f", {context} tokens"
        self.decoded.append({"round": number, "name": name, "context": context} | found)
        progress(line(self.decoded[-1]))

    def _prefill(self, tokens: int) -> None:
        chunks, found = self._options.chunks, {}
        for ring in self._rings:
            work = partial(ring_steps.prefill, tokens=tokens, chunks=chunks, times=PREFILL_TIMES)
            seconds, _ = ring.run(work, 2)
            found |= {
                f"{ring.size} stages, {tokens} tokens in {chunk}": seconds[str(chunk)] for chunk in chunks
            }
        if self._baseline is not None and not self._options.only_rings:
            for chunk in chunks:
                runs = [
                    self._baseline.run(do="prefill", tokens=tokens, chunk=chunk)["seconds"]
                    for _ in range(PREFILL_TIMES + 1)
                ]
                found[f"one process, {tokens} tokens in {chunk}"] = runs[1:]
        for name, seconds in found.items():
            self.prefilled.setdefault(name, []).extend(seconds)
            progress(f"{name}: {statistics.median(seconds):.3f} s")

    def _batch(self) -> None:
        assert self._baseline is not None
        for tokens, rows in itertools.product(self._options.lengths, self._options.batch):
            found = self._baseline.run(do="batch", rows=rows, tokens=tokens)
            self.batched.append({"tokens": tokens, "rows": rows} | found)
            gain = found["one_by_one"] / found["together"]
            progress(f"{rows} prompts of {tokens}: {gain:.2f} times faster together")


def summary(left: list[dict[str, Any]], decode_from: int) -> dict[str, Any]:
    """Medians of every stage's decode steps in ms, and of the way of records between stages."""
    by_step = [{one["step"]: one for one in each["trace"] if one["step"] >= decode_from} for each in left]
    names = ("started", "built", "fed", "launched", "ready", "sent")
    stages = []
    for rank, steps in enumerate(by_step):
        entry: dict[str, Any] = {}
        kept = [name for name in names if steps and name in next(iter(steps.values()))]
        for before, after in itertools.pairwise(kept):
            entry[f"{before}-{after}"] = middle([one[after] - one[before] for one in steps.values()])
        ordered = [steps[number] for number in sorted(steps)]
        entry["period"] = middle([b["ready"] - a["ready"] for a, b in itertools.pairwise(ordered)])
        entry["fed-ready"] = middle([one["ready"] - one["fed"] for one in ordered])
        if len(by_step) > 1:
            entry["hop"] = hop(by_step, rank)
        stages.append(entry)
    tokens = {int(row): each for row, each in left[0]["tokens"].items()}
    return {
        "stages": stages,
        "tokens": [tokens[row] for row in sorted(tokens)],
        "peak_memory": [each["peak_memory"] for each in left],
    }


def hop(by_step: list[dict[int, Any]], rank: int) -> float | None:
    """From the end of a step's compute to its input on the next stage, where that one waited for it."""
    after = by_step[(rank + 1) % len(by_step)]
    ways = []
    if rank + 1 < len(by_step):
        pairs = [(one, after[number]) for number, one in by_step[rank].items() if number in after]
    else:
        pairs = []
    for one, there in pairs:
        if there["started"] < one["ready"]:
            ways.append(there["fed"] - one["ready"])
    return middle(ways) if ways else None


def middle(values: list[float]) -> float:
    return round(statistics.median(values) * 1000, 3) if values else 0.0


def line(one: dict[str, Any]) -> str:
    parts = [f"round {one['round']}: {one['name']}: {one['tokens_per_second']:.1f} tokens/s"]
    parts += [f"    steps: {one['step_ms']}"] if "step_ms" in one else []
    parts += [f"    stage {rank}: {stage}" for rank, stage in enumerate(one.get("stages", []))]
    return "\n  ".join(parts)


def digest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, their ratios, and whether all made the same tokens for the same rows."""
    rates: dict[str, list[float]] = {}
    contexts: dict[str, int] = {}
    for one in found:
        rates.setdefault(one["name"], []).append(one["tokens_per_second"])
        contexts[one["name"]] = one["context"]
    medians = {name: statistics.median(each) for name, each in rates.items()}
    rounds = {
        f"{a} / {b}": ratios(rates[a], rates[b])
        for a in rates
        for b in rates
        if a != b and "stages" in a and contexts[a] == contexts[b]
    }
    return {
        "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "rounds": rounds,
        "ratios": {
            name: round(statistics.median([one for one in each if one]), 3) for name, each in rounds.items()
        },
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


def prefill_rates(found: dict[str, list[float]]) -> dict[str, Any]:
    """Median seconds by what was measured, and how many times faster than one stage with the same chunk."""
    medians = {name: statistics.median(each) for name, each in found.items()}
    rates: dict[str, Any] = {}
    for name, seconds in medians.items():
        one = medians.get("1 stages" + name[name.index(",") :])
        rates[name] = {
            "seconds": round(seconds, 4),
            "spread": [round(min(found[name]), 4), round(max(found[name]), 4)],
            "times_one_stage": round(one / seconds, 3) if one else None,
        }
    return rates


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


def checks(result: Result) -> list[Check]:
    return [
        Check(f"{shape}: {name}", result["rounds"][name], target, True)
        for (shape, name), target in TARGETS.items()
        if shape == result["shape"] and name in result["rounds"]
    ]


def tables(result: Result) -> list[Table]:
    title = f"{result['shape']}, layers {', '.join(map(str, result['splits']))}, {result['dtype']}"
    rates = [[name, rate] for name, rate in result["tokens_per_second"].items()]
    found = [Table(title, ["what", "tokens/s"], rates)]
    found.append(Table("ratios", ["what", "ratio"], [[*pair] for pair in result["ratios"].items()]))
    if result["prefill"]:
        rows = [
            [name, one["seconds"], one["times_one_stage"] or ""] for name, one in result["prefill"].items()
        ]
        found.append(Table("prefill", ["what", "s", "times one stage"], rows))
    if result["batch"]:
        rows = [
            [
                one["tokens"],
                one["rows"],
                round(one["one_by_one"] * 1e3, 2),
                round(one["together"] * 1e3, 2),
                round(one["one_by_one"] / one["together"], 2),
            ]
            for one in result["batch"]
        ]
        found.append(
            Table("prompts together", ["tokens", "prompts", "one by one ms", "together ms", "gain"], rows)
        )
    return found


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    names = list(result["tokens_per_second"])
    axes.barh(names[::-1], [result["tokens_per_second"][name] for name in names[::-1]])
    axes.set_xlabel("tokens per second")
    axes.set_title(f"{result['shape']}, layers {', '.join(map(str, result['splits']))}")


def runs(text: str) -> list[Run]:
    found = []
    for part in text.split(","):
        stages, slash, rest = part.rpartition("/")
        shape, _, context = rest.partition("@")
        lanes, _, rows = shape.partition("x")
        found.append(Run(int(stages) if slash else 0, int(lanes), int(rows), int(context or 0)))
    return found


def baselines(text: str) -> list[tuple[int, int]]:
    found = []
    for part in text.split(","):
        rows, _, context = part.partition("@")
        found.append((int(rows), int(context or 0)))
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")] if text else []


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="12x512")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own number")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--stages", type=numbers, default=[2], help="of each ring, ...")
    parser.add_argument("--split", type=numbers, help="layers of each stage, instead of an even share")
    parser.add_argument(
        "--runs",
        type=lambda text: runs(text) if text else [],
        default=runs("2x4,1x1"),
        help="LANESxROWS, with STAGES/ in front for one ring only and @TOKENS behind for longer prompts, ...",
    )
    parser.add_argument(
        "--baseline", type=baselines, default=[], help="rows of one process, or ROWS@TOKENS, ..."
    )
    parser.add_argument("--unsealed", action="store_true", help="each ring a second time without sealing")
    parser.add_argument(
        "--varying", type=numbers, default=[], help="ROWS,LONGEST,REQUESTS: of a lane, of a prompt, of all"
    )
    parser.add_argument("--prefill", type=numbers, default=[], help="tokens of one prompt alone, ...")
    parser.add_argument("--chunks", type=numbers, default=[2048], help="tokens of its chunks, up to 2048")
    parser.add_argument("--only-rings", action="store_true", help="prefill without mlx-lm in one process")
    parser.add_argument("--batch", type=numbers, default=[], help="prompts together in one process, ...")
    parser.add_argument("--lengths", type=numbers, default=[8, 32, 128, 512], help="tokens of those prompts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--warm", type=int, default=8, help="steps of each lane before the measurement")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--suite", default=Suite.HYBRID_AES256GCM.value)
    parser.add_argument("--gpus", type=int, default=0, help="engine r computes on GPU r modulo this")
    parser.add_argument("--baseline-gpu", type=int, default=0)
    parser.add_argument("--cores", type=numbers, default=[], help="a stage's processes on one core each")
    parser.add_argument("--carrier-path", default="", help="where carriers find their packages, if elsewhere")


BENCHMARK = Benchmark(
    "ring",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    checks,
    quick=("--shape", "4x64", "--steps", "32", "--baseline", "8,1"),
)


if __name__ == "__main__":
    standalone(BENCHMARK)
