"""A long prompt's first token from memory and from disk against cold, and what writing prefixes costs.

A round asks for a prompt that no member has seen, and then for the same with another last token: its prefix
is in memory. Once the prefix is on disk, every process is ended and started again, and the prompt is asked
for a third time. Tokens a second are those of closed loops of new prompts on two rings by turns. One writes
what it keeps to disk and one does not. Other load has less influence on the CPU time of a ring's processes,
which is measured as well. `--tokens 0` and `--requests 0` leave one half out.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.clusters import Deployment, cluster, cpu_seconds, family, restarted
from bench.frame import Result, Table, progress
from bench.models import SHAPES, random_model
from bench.openai_client import Reply, ask
from bench.serve import prompt, send
from bench.verdict import Check, ratios
from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.errors import DeadlineExceeded, Unavailable

QUICK = ("--tokens", "2000", "--rounds", "1", "--requests", "8")
QUICK_SECONDS = 180.0
DISK, MEMORY, WRITING = 0.2, 0.07, 0.98
"""Targets: first tokens against cold, and tokens a second against a ring that writes nothing."""

LOOPS = 4
"""Loops of each ring in a round."""

_SIDES = ("writing", "not writing")
_CONTEXT = 65_536
_IDS = range(300, 1300)
"""Ids of tokens that prompts are drawn of."""

_SECONDS, _LOOK_SECONDS, _STILL = 900.0, 0.5, 4
"""A folder is written when its size has been the same for `_STILL` looks."""


async def run(options: argparse.Namespace) -> Result:
    """`prompts`: by round, tokens, seconds to the first token and cached tokens of each way. `rates`: tokens
    a second with and without writing."""
    model = random_model(dataclasses.replace(SHAPES[options.shape], context=_CONTEXT, vocabulary=0))
    spec = {"max_rows": options.at_once, "context": _CONTEXT}
    wanted = [Deployment("bench", model, options.stages, spec=spec)]
    found: Result = {"prompts": [], "rates": []}
    async with cluster(wanted) as made, cluster(wanted, node={"prefix_disk": 0}) as silent:
        rings = dict(zip(_SIDES, (made, silent), strict=True))
        for number in range(options.rounds):
            if options.tokens:
                found["prompts"].append(await _prompts(made, options, number))
                progress(f"round {number}: {found['prompts'][-1]}")
            if options.requests:
                found["rates"].append(await _rates(rings, options, number) | {"written_mib": _mib(made)})
                progress(f"round {number}: {found['rates'][-1]}")
        if stored(silent):
            raise Unavailable("a ring without a disk of prefixes has written some", reason="BENCH_FAILED")
    return found


async def _prompts(made: LocalCluster, options: argparse.Namespace, number: int) -> Result:
    drawn = random.Random(f"stored {options.seed} {number}")
    tokens = drawn.choices(_IDS, k=options.tokens)
    body: dict[str, Any] = {"model": "bench", "max_tokens": 2, "temperature": 0}
    body["stream_options"] = {"include_usage": True}

    async def first(more: int) -> Reply:
        asked = body | {"prompt": [*tokens, more]}
        reply = await ask(made.http_url, asked, path="/v1/completions", seconds=_SECONDS)
        if not reply.ok:
            raise Unavailable(f"a prompt was not answered: {reply.error}", reason="BENCH_FAILED")
        return reply

    before = stored(made)
    ways = {"cold": await first(_IDS[0]), "memory": await first(_IDS[1])}
    await _written(made, before)
    await restarted(made, "bench")
    ways["disk"] = await first(_IDS[2])
    return {
        "tokens": ways["cold"].prompt_tokens,
        **{f"{name}_s": round(each.ttft, 3) for name, each in ways.items()},
        **{f"{name}_cached": each.cached_tokens for name, each in ways.items()},
    }


async def _rates(rings: dict[str, LocalCluster], options: argparse.Namespace, number: int) -> Result:
    """Each ring's tokens a second and CPU ms a token, the means of LOOPS loops by turns. Each is first in
    half of them, for the second is faster."""
    order = list(rings)[:: 1 - 2 * (number % 2)]
    for name in order:
        await _rate(rings[name], options, f"warm {number}", 2 * options.at_once)
    loops: dict[str, list[tuple[float, float]]] = {name: [] for name in rings}
    for part in range(LOOPS):
        for name in order[:: 1 - 2 * (part % 2)]:
            loops[name].append(await _rate(rings[name], options, f"{number} {part}", options.requests))
    found: Result = {}
    for name, each in loops.items():
        found[name], found[f"{name}_cpu_ms"] = (round(mean(one), 3) for one in zip(*each, strict=True))
    return found | {"loops": loops}


async def _rate(
    made: LocalCluster, options: argparse.Namespace, seed: str, count: int
) -> tuple[float, float]:
    """Answers' tokens a second of a closed loop of new prompts, and CPU ms of all processes for each. Each
    ring gets the same prompts."""
    drawn = random.Random(f"written {options.seed} {seed}")
    asked = [(prompt(drawn, options.words), options.answer) for _ in range(count)]
    processes = [one for pid in made.processes.values() for one in family(pid)]
    before = cpu_seconds(processes)
    replies, seconds = await send(
        made.http_url, "bench", asked, [0.0] * len(asked), options.at_once, path="/v1/completions"
    )
    if bad := [one.error for one in replies if not one.ok]:
        raise Unavailable(f"a request was not answered: {bad[0]}", reason="BENCH_FAILED")
    await asyncio.sleep(_LOOK_SECONDS)  # for what is written behind the last prompts
    tokens = sum(one.completion_tokens for one in replies)
    return round(tokens / seconds, 2), round(1e3 * (cpu_seconds(processes) - before) / tokens, 3)


def _mib(made: LocalCluster) -> float:
    return round(stored(made) / 2**20, 1)


def stored(made: LocalCluster) -> int:
    """Bytes of blocks on all nodes' disks."""
    blocks: list[Path] = []
    for name in made.node_names:
        blocks += Path(made.settings_of(name)["state_dir"]).glob("prefixes/*/*/*.block")
    return sum(block.stat().st_size for block in blocks if block.exists())


async def _written(made: LocalCluster, before: int) -> None:
    """Returns when more is stored than `before` and nothing more is written. Raises DeadlineExceeded."""
    seen, still = before, 0
    for _ in range(round(_SECONDS / _LOOK_SECONDS)):
        now = stored(made)
        still = still + 1 if now == seen else 0
        seen = now
        if now > before and still >= _STILL:
            return
        await asyncio.sleep(_LOOK_SECONDS)
    raise DeadlineExceeded("nothing of a prompt was written to disk", reason="BENCH_FAILED")


def checks(result: Result) -> list[Check]:
    def against(side: str, other: str, of: str) -> list[float | None]:
        return ratios(*([one[name] for one in result[of]] for name in (side, other)))

    found = []
    for tokens in {one["tokens"] for one in result["prompts"]}:
        for way, where, target in (("disk", "disk, all restarted,", DISK), ("memory", "memory", MEMORY)):
            name = f"first token of {tokens} from {where} against cold"
            found.append(Check(name, against(f"{way}_s", "cold_s", "prompts"), target))
    if result["rates"]:
        rate, cpu = against(*_SIDES, "rates"), against(*(f"{one}_cpu_ms" for one in _SIDES[::-1]), "rates")
        found.append(Check("tokens/s while prefixes are written against without", rate, WRITING, True))
        found.append(Check("the same for each second of CPU time", cpu, WRITING, True))
    return found


def tables(result: Result) -> list[Table]:
    ways = ("cold", "memory", "disk")
    body = [
        [one["tokens"], *(one[f"{way}_s"] for way in ways), *(one[f"{way}_cached"] for way in ways[1:])]
        for one in result["prompts"]
    ]
    names = [*_SIDES, *(f"{side}_cpu_ms" for side in _SIDES), "written_mib"]
    rates = {name: median(one[name] for one in result["rates"]) for name in names if result["rates"]}
    columns = ["tokens", *(f"{way}, s" for way in ways), *(f"cached from {way}" for way in ways[1:])]
    return [Table("first token", columns, body), Table("tokens/s", list(rates), [list(rates.values())])]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="2x64")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=20_000, help="of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=4, help="requests of the closed loop")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--words", type=int, default=300, help="of each of its prompts")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each of its answers")
    parser.add_argument("--seed", type=int, default=0)
