"""What it costs to copy a lane's caches when rows join it, leave it or are parked, by length of context.

One engine on its own; the caches of `--rows` rows are filled with as many tokens as there are of context,
each change is carried out as a step does it and evaluated whole. Times are medians in milliseconds, beside
the decode step of the same lane.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from bench.frame import Benchmark, Result, Table, progress, standalone
from bench.loop import load
from bench.models import by_name
from bench.ring_processes import SHAPES, configuration
from sealring.mesh.prompt.composition import Admission, Change, Eviction, Parking
from sealring.node.engine import device
from sealring.node.engine.lanes import Lanes, Row
from sealring.node.engine.staging import Stage, random_stage

CHUNK = 512


def prefilled(stage: Stage, number: int, tokens: int) -> Row:
    row = Row(number, stage.make_cache())
    for start in range(0, tokens, CHUNK):
        stage([mx.zeros((1, min(CHUNK, tokens - start)), mx.uint32)], row.cache)
        mx.eval([part.state for part in row.cache])
    return row


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds until all that is returned is there."""
    begun = time.perf_counter()
    mx.eval(work())
    return (time.perf_counter() - begun) * 1e3


def one_context(stage: Stage, rows: int, tokens: int, rounds: int) -> Result:
    lanes = Lanes()
    original = prefilled(stage, 1, tokens)
    for number in range(1, rows + 1):
        lanes.start(original.copy(number, tokens))
    lanes.apply([Admission(number, 0) for number in range(1, rows + 1)])

    def states(*alone: int) -> list[Any]:
        held = [part.state for part in lanes.check(0, tuple(members)).cache]
        return held + [[part.state for part in lanes.alone(row)] for row in alone]

    def change(*changes: Change, alone: tuple[int, ...] = ()) -> float:
        return timed(lambda: (lanes.apply(changes), states(*alone))[1])  # type: ignore[arg-type, func-returns-value]

    members = list(range(1, rows + 1))
    times: dict[str, list[float]] = {"decode": [], "park": [], "admit": [], "evict": []}
    mx.eval(states())
    for number in range(rounds):
        inputs = mx.zeros((rows, 1), mx.uint32)
        times["decode"].append(timed(lambda: stage([inputs], lanes.check(0, tuple(members)).cache)))  # noqa: B023
        first = members.pop(0)
        times["park"].append(change(Parking(first, 0, 0), alone=(first,)))
        members.append(first)
        times["admit"].append(change(Admission(first, 0)))
        gone = members.pop(0)
        times["evict"].append(change(Eviction(gone, 0, 0)))
        members.append(rows + number + 1)
        lanes.start(original.copy(members[-1], tokens))
        lanes.apply([Admission(members[-1], 0)])
        mx.eval(states())
    return {"context": tokens, **{what: round(statistics.median(each), 2) for what, each in times.items()}}


def stage_of(options: argparse.Namespace) -> Stage:
    if options.shape:
        config = configuration(options.shape, 0, options.dtype)
        layers = options.layers or config["num_hidden_layers"]
        dtype = getattr(mx, options.dtype)
        return random_stage(config, 0, layers, seed=0, dtype=dtype, kv_bits=options.kv_bits)
    model = options.model if "#" in options.model else str(by_name(options.model))
    return load(model, 0, options.kv_bits)[0]


def run(options: argparse.Namespace) -> Result:
    device.prepare()
    stage = stage_of(options)
    found = []
    for tokens in options.contexts:
        progress(f"{tokens} tokens")
        found.append(one_context(stage, options.rows, tokens, options.rounds))
    model = f"{options.layers or 'all'} layers of {options.shape}" if options.shape else options.model
    return {"model": model, "rows": options.rows, "kv_bits": options.kv_bits, "contexts": found}


def tables(result: Result) -> list[Table]:
    title = f"{result['model']}, {result['rows']} rows, ms"
    return [Table(title, list(result["contexts"][0]), [list(one.values()) for one in result["contexts"]])]


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    for what in ("decode", "park", "admit", "evict"):
        axes.plot(
            [one["context"] for one in result["contexts"]],
            [one[what] for one in result["contexts"]],
            marker="o",
            label=what,
        )
    axes.set(xlabel="tokens of context", ylabel="ms", xscale="log", ylim=(0, None))
    axes.legend()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="demo", help="folder, shape, or CONFIG.json#KEY")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of `bench ring`, instead of a model")
    parser.add_argument("--layers", type=int, default=0, help="the first ones of the shape; 0: all of them")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-bits", type=int, choices=(0, 4, 8), default=0)


BENCHMARK = Benchmark(
    "copies",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    quick=("--contexts", "256", "1024", "--rounds", "3"),
)


if __name__ == "__main__":
    standalone(BENCHMARK)
