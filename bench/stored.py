"""A long prompt's first token from memory and from disk against cold, and what writing prefixes costs.

A round asks for a conversation that no member has seen, and then for the same with another last message: its
prefix is in memory. Once the prefix is on disk, every process is ended and started again, and the third
answer is timed.

Tokens a second are those of closed loops of new conversations on one ring, which writes what it computes to
disk in every second loop. The folders are cleared before each other loop, after which an engine writes
nothing until its next epoch. Two rings would not do: each plans by the times that it measured when its
weights were loaded, and one may have lanes that are twice as fast. Other load has less influence on the CPU
time of a ring's processes, which is measured as well. `--tokens 0` and `--requests 0` leave one half out.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.clusters import Deployment, answering, cluster, cpu_seconds, family, restarted
from bench.frame import Result, Table, progress
from bench.models import SHAPES, random_model
from bench.openai_client import Reply, ask
from bench.serve import prompt, send
from bench.verdict import Check, ratios
from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.errors import DeadlineExceeded, Unavailable
from sealring.node.stored.keys import FOLDER, forget

QUICK = ("--tokens", "2000", "--rounds", "1", "--requests", "8")
QUICK_SECONDS = 180.0
DISK, MEMORY, WRITING = 0.2, 0.07, 0.98
"""Targets: first tokens against cold, and tokens a second against a ring that writes nothing."""

LOOPS = 4
"""Pairs of loops in a round."""

_SIDES = ("writing", "not writing")
_CONTEXT = 65_536
_WORD_TOKENS = 1.86
_GOES_ON = ({"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."})
"""Only of conversations is everything written when it is computed for the first time."""

_SECONDS, _LOOK_SECONDS, _STILL = 900.0, 0.5, 4
"""A folder is written when its size has been the same for `_STILL` looks."""


async def run(options: argparse.Namespace) -> Result:
    """`prompts`: by round, tokens, seconds to the first token and cached tokens of each way. `rates`: tokens
    a second with and without writing."""
    model = random_model(dataclasses.replace(SHAPES[options.shape], context=_CONTEXT, vocabulary=0))
    spec = {"max_rows": options.at_once, "context": _CONTEXT}
    wanted = [Deployment("bench", model, options.stages, spec=spec)]
    found: Result = {"prompts": [], "rates": []}
    async with cluster(wanted) as made:
        for number in range(options.rounds):
            if options.tokens:
                found["prompts"].append(await _prompts(made, options, number))
                progress(f"round {number}: {found['prompts'][-1]}")
            if options.requests:
                found["rates"].append(await _rates(made, options, number))
                progress(f"round {number}: {found['rates'][-1]}")
    return found


async def _prompts(made: LocalCluster, options: argparse.Namespace, number: int) -> Result:
    drawn = random.Random(f"stored {options.seed} {number}")
    text = prompt(drawn, round(options.tokens / _WORD_TOKENS))
    body: dict[str, Any] = {"model": "bench", "max_tokens": 2, "temperature": 0}
    body["stream_options"] = {"include_usage": True}

    async def first(more: int) -> Reply:
        last = {"role": "user", "content": str(more)}
        asked = body | {"messages": [{"role": "user", "content": text}, *_GOES_ON[:1], last]}
        reply = await ask(made.http_url, asked, seconds=_SECONDS)
        if not reply.ok:
            raise Unavailable(f"a prompt was not answered: {reply.error}", reason="BENCH_FAILED")
        return reply

    before = stored(made)
    ways = {"cold": await first(1), "memory": await first(2)}
    await _written(made, before)
    await restarted(made, "bench")
    ways["disk"] = await first(3)
    return {
        "tokens": round(ways["cold"].prompt_tokens, -3),
        **{f"{name}_s": round(each.ttft, 3) for name, each in ways.items()},
        **{f"{name}_cached": each.cached_tokens for name, each in ways.items()},
    }


async def _rates(made: LocalCluster, options: argparse.Namespace, number: int) -> Result:
    """The ring's tokens a second and CPU ms a token with and without writing, means of LOOPS pairs of loops.
    Each way is first in half of them."""
    loops: dict[str, list[tuple[float, float]]] = {side: [] for side in _SIDES}
    written = 0
    for part in range(LOOPS):
        clear(made)
        await anew(made, "bench")
        for side in _SIDES[:: 1 - 2 * (part % 2)]:
            if side == _SIDES[1]:
                clear(made)
            elif part % 2:
                await anew(made, "bench")
            await _rate(made, options, f"warm {number} {part}", options.at_once)
            loops[side].append(await _rate(made, options, f"{number} {part}", options.requests, side))
            written += stored(made) if side == _SIDES[0] else 0
            if side == _SIDES[1] and stored(made):
                raise Unavailable(
                    "something was written after the folders were cleared", reason="BENCH_FAILED"
                )
    found: Result = {"written_mib": round(written / 2**20, 1)}
    for name, each in loops.items():
        found[name], found[f"{name}_cpu_ms"] = (round(mean(one), 3) for one in zip(*each, strict=True))
    return found | {"loops": loops}


async def anew(made: LocalCluster, model: str) -> None:
    """Has the ring begin another epoch; its engines keep their weights, and the times that they plan by.

    Raises DeadlineExceeded.
    """
    await made.children.stop_one("gateway")
    await made.start_one("gateway")
    await answering(made, model)


def clear(made: LocalCluster) -> None:
    """Removes what is stored, and the secret of it."""
    for name in made.node_names:
        forget(_folder(made, name))


async def _rate(
    made: LocalCluster, options: argparse.Namespace, seed: str, count: int, scope: str = ""
) -> tuple[float, float]:
    """Answers' tokens a second of a closed loop of new prompts, and CPU ms of all processes for each. Prompts
    of one seed and `scope` are the same."""
    drawn = random.Random(f"written {options.seed} {seed} {scope}")
    asked = [(prompt(drawn, options.words), options.answer) for _ in range(count)]
    processes = [one for pid in made.processes.values() for one in family(pid)]
    before = cpu_seconds(processes)
    replies, seconds = await send(
        made.http_url, "bench", asked, [0.0] * len(asked), options.at_once, goes_on=_GOES_ON
    )
    if bad := [one.error for one in replies if not one.ok]:
        raise Unavailable(f"a request was not answered: {bad[0]}", reason="BENCH_FAILED")
    await asyncio.sleep(_LOOK_SECONDS)  # for what is written behind the last prompts
    tokens = sum(one.completion_tokens for one in replies)
    return round(tokens / seconds, 2), round(1e3 * (cpu_seconds(processes) - before) / tokens, 3)


def stored(made: LocalCluster) -> int:
    """Bytes of blocks on all nodes' disks."""
    blocks: list[Path] = []
    for name in made.node_names:
        blocks += _folder(made, name).glob("*/*/*.block")
    return sum(block.stat().st_size for block in blocks if block.exists())


def _folder(made: LocalCluster, node: str) -> Path:
    return Path(made.settings_of(node)["state_dir"]) / FOLDER


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
