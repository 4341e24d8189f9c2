"""What a token costs the tail: the few highest of a vocabulary against a sort of all of it.

CPU time of one process by turns, or with `--gpu` time on the clock. Some logits fall off as a power of the
rank, as those of trained models roughly do; others are wider: their nucleus is larger than the few highest.
There, and on a GPU for every `top_p`, sums over the vocabulary stand for the few highest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable

import numpy as np

from bench.frame import Result, Table, numbers
from bench.verdict import Check, ratios

QUICK = ("--rounds", "1", "--steps", "3")
QUICK_SECONDS = 30.0

_TEMPERED = {"temperature": 0.7, "seed": 1}
KINDS = {
    "top_k 40": {**_TEMPERED, "top_k": 40},
    "top_p 0.9": {**_TEMPERED, "top_p": 0.9},
    "top_p 0.9, wide": {**_TEMPERED, "top_p": 0.9},
    "5 log-probabilities": {"logprobs": 5},
}


def run(options: argparse.Namespace) -> Result:
    """Milliseconds a step, of CPU or with `--gpu` on the clock, round by round, by kind and rows, of either
    way."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        for rows in options.rows:
            ways: dict[str, list[float]] = {"few": [], "all": []}
            for number in range(options.rounds):
                for way in ("few", "all") if number % 2 else ("all", "few"):
                    ways[way].append(_measure(kind, rows, way, options))
            found[f"{kind}, {rows} rows" if rows > 1 else f"{kind}, 1 row"] = ways
    return {"vocabulary": options.vocabulary, "steps": options.steps, "gpu": options.gpu, "kinds": found}


def _measure(kind: str, rows: int, way: str, options: argparse.Namespace) -> float:
    step = _step(kind, rows, options)
    clock = time.perf_counter if options.gpu else time.process_time
    if way == "few":
        return _timed(step, options.steps, clock)
    from sealring.node.engine import ranks

    usual = ranks.worthwhile
    try:
        ranks.worthwhile = _never
        return _timed(step, options.steps, clock)
    finally:
        ranks.worthwhile = usual


def _never(vocabulary: int) -> bool:
    return False


def _step(kind: str, rows: int, options: argparse.Namespace) -> Callable[[], None]:
    import mlx.core as mx

    from sealring.node.engine import RowParameters
    from sealring.node.engine.sampling import Sampler

    mx.set_default_device(mx.gpu if options.gpu else mx.cpu)
    vocabulary = options.vocabulary
    source = np.random.default_rng(0)
    fall = 0.5 if "wide" in kind else 2.0
    ranked = -fall * np.log(np.arange(1, vocabulary + 1))
    logits = mx.array(np.stack([source.permutation(ranked) for _ in range(rows)]).astype(np.float32))
    sampler = Sampler([RowParameters(**KINDS[kind])] * rows, [0] * rows)  # type: ignore[arg-type]

    def step() -> None:
        tokens = sampler(logits)
        report = sampler.report(logits, tokens)
        mx.eval(tokens if report is None else report)

    return step


def _timed(step: Callable[[], None], steps: int, clock: Callable[[], float]) -> float:
    step()
    begun = clock()
    for _ in range(steps):
        step()
    return round((clock() - begun) / steps * 1e3, 3)


def checks(result: Result) -> list[Check]:
    """Each round's worst kind on a CPU. On a GPU the sums stand against the sort in each kind of `top_p`."""
    if result.get("gpu"):
        sums = [kind for kind in result["kinds"] if "top_p" in kind]
        return [Check("time of sampling on a GPU, sums / a sort", _worst(result["kinds"], sums), 0.8)]
    kinds = result["kinds"]
    wide = [kind for kind in kinds if "wide" in kind]
    return [
        Check("CPU of sampling, few highest / a sort", _worst(kinds, kinds.keys() - wide), 0.6),
        Check("CPU of sampling, wide nucleus / a sort", _worst(kinds, wide), 1.0),
    ]


def _worst(kinds: dict[str, dict[str, list[float]]], names: Iterable[str]) -> list[float]:
    rounds = zip(*(ratios(kinds[name]["few"], kinds[name]["all"]) for name in names), strict=True)
    return [max(one or 0.0 for one in each) for each in rounds]


def tables(result: Result) -> list[Table]:
    rows = [
        [kind, *(" ".join(map(str, ways[way])) for way in ways)] for kind, ways in result["kinds"].items()
    ]
    what = "ms a step on a GPU" if result.get("gpu") else "ms of CPU a step"
    return [Table(f"{what}, round by round", ["rows", "the few highest or sums", "all sorted"], rows)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--gpu", action="store_true", help="the GPU's time on the clock, of MLX's first GPU")
    parser.add_argument("--rows", type=numbers, default=[1, 8], help="numbers of rows, such as 1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="tokens of each row and round")
