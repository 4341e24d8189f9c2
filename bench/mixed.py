"""Requests of different lengths that come and go: ours, mlx_lm.server, its pipeline, BatchGenerator alone.

All systems get the same seeded list of requests. In a closed loop, a fixed number of requests is under way
until the list ends; in an open loop, they arrive at a rate. A closed loop is measured until its last request
is sent, since fewer are under way after that. Systems take turns, in another order every round. Each is
started for its turn and ends with it, so that it has the machine and all of a GPU's memory to itself.

**Efficiency** is the time for the same tokens at the ring's own steady rates, divided by the measured time.
Steady rates are measured in the same round: prompt tokens for one prompt alone, answer tokens for the same
number of rows without arrivals and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from statistics import mean, median
from typing import Any

from bench import agents
from bench.clusters import can_pin, cores_after, cpu_seconds, family, kind, restarted
from bench.drawn import Drawn
from bench.frame import Result, Table, names_of, numbers, progress
from bench.models import by_name
from bench.openai_client import Reply, ask
from bench.peers import ALONE, OURS, PIPELINE, SERVER, start
from bench.rivals import Baseline, Server
from bench.serve import arrivals, prompt, send
from bench.steady import Requests
from bench.summaries import percentile, summary
from bench.verdict import Check, ratios
from sealring.cli.local.cluster import LocalCluster
from sealring.cli.tracing import SHOWN, member_shares
from sealring.mesh.errors import SealringError, Unavailable

SYSTEMS = {"two": OURS, "server": SERVER, "pipeline": PIPELINE, "alone": ALONE}
QUICK = ("--model", "12x256-qwen2", "--systems", "two", "--at-once", "4", "--seconds", "3", "--rounds", "1")
QUICK_SECONDS = 120.0
AGENTS, AGAIN = "agents", 0.03
"""A list of its own, and the share of prefix tokens that it may compute again."""

_SOLO_WORDS, _SOLO_TIMES = 600, 3
_STEADY_WORDS, _STEADY_TOKENS = 60, 1024


LISTS = {
    "mixed": (Drawn(60, 1.0, 4, 900), Drawn(110, 0.7, 8, 400)),
    # means of 161 and 338, as of ShareGPT in "Efficient Memory Management for Large Language Model Serving
    # with PagedAttention" (Kwon et al. 2023), figure 11
    "sharegpt": (Drawn(65, 1.35, 4, 1000), Drawn(225, 0.9, 8, 1000)),
    "long": (Drawn(1500, 0.5, 500, 3500), Drawn(60, 0.6, 8, 200)),
}
"""Words of prompts and tokens of answers."""


def requests(name: str, count: int, seed: int) -> list[tuple[str, int]]:
    """Prompts and the tokens of their answers; no two lists share a prompt."""
    generator, (words, tokens) = random.Random(f"{name} {seed}"), LISTS[name]
    return [(prompt(generator, words.draw(generator)), tokens.draw(generator)) for _ in range(count)]


async def run(options: argparse.Namespace) -> Result:
    """`rounds`: by load and system, the `figures` of each; `rates`: the ring's own, round by round;
    `missing`: why other systems did not run."""
    if can_pin() and not options.gpus:
        os.sched_setaffinity(0, options.client_cores)
    options.requests = options.rows or max(options.at_once, default=options.open_rows)
    if options.list == AGENTS:
        options.systems = [short for short in options.systems if short != "alone"]  # it has no server
    found: dict[str, dict[str, list[Result]]] = {}
    rates: list[dict[str, float]] = []
    missing: dict[str, str] = {}
    for number in range(options.rounds):
        first = number % len(options.systems)
        for short in options.systems[first:] + options.systems[:first]:
            name = SYSTEMS[short]
            progress(f"round {number + 1} of {options.rounds}: starting {name}")
            try:
                async with AsyncExitStack() as stack:
                    system = await start(stack, short, options)
                    turn = await _turn(system, options, number, rates)
            except Unavailable as error:
                if name == OURS:
                    raise
                progress(f"{name}: {error}")
                missing[name] = str(error)
                continue
            for label, one in turn:
                rate, cost = one["tokens_per_second"], one["cpu_ms_per_token"]
                progress(f"{name}, {label}: {rate} tok/s, {cost} ms CPU/token")
                found.setdefault(label, {}).setdefault(name, []).append(one)
    given = {key: value for key, value in vars(options).items() if key != "client_cores"}
    return {"options": given, "rates": rates, "rounds": found, "missing": missing}


async def _turn(
    system: Any, options: argparse.Namespace, number: int, rates: list[dict[str, float]]
) -> list[tuple[str, Result]]:
    """All loads of a round, by what each is called; `rates` gets our ring's own."""
    own: dict[str, float] = {}
    if isinstance(system, Server):
        system.resume()
    elif isinstance(system, LocalCluster) and options.list != AGENTS:
        progress("steady rates")
        own = await _steady(system, options)
        rates.append(own)
    found = []
    loads = [*((rows, math.inf) for rows in options.at_once), *((0, rate) for rate in options.rates)]
    for rows, rate in loads:
        if options.list == AGENTS:
            found.append((f"{rows} agents", await _agents(system, options, rows, number)))
            continue
        label = f"{rows} at a time" if rows else f"{rate:g} requests/s"
        progress(label)
        count = rows * options.each if rows else options.arrivals
        seed = number * 1000 + rows + round(rate * 1000 if not rows else 0)
        asked = requests(options.list, count, seed)
        times = arrivals(random.Random(seed), count, rate, 1.0)
        found.append((label, await _load(system, options, asked, times, rows, own)))
    return found


async def _agents(system: Any, options: argparse.Namespace, count: int, seed: int) -> Result:
    """Sessions of `count` agents at a time at a server; ours is restarted between two turns if asked for."""
    progress(f"{count} agents of {options.turns} turns, tokens divided by {options.scale:g}")
    ours = isinstance(system, LocalCluster)
    before = _cpu(system)
    sessions = await agents.run(
        system.http_url if ours else system.url,
        "bench" if ours else str(by_name(options.model)),
        count=count,
        turns=options.turns,
        scale=options.scale,
        seed=seed,
        seconds=options.answer_seconds,
        restart=partial(restarted, system, "bench") if ours and options.restart else None,
    )
    cpu = {part: round(spent - before.get(part, 0.0), 2) for part, spent in _cpu(system).items()}
    found = figures(
        [reply for session in sessions for reply in session], 0, {}, {} if options.restart else cpu
    )
    made = agents.figures(sessions, ours and options.restart)
    return found | made | {"shares": {}, "cpu_ms_per_token": found.get("cpu_ms_per_token")}


async def _steady(made: LocalCluster, options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second: `prefill` of one prompt alone, and by number of rows of answers; and as `cpu` of the
    same, processors' seconds for each token."""
    url = made.http_url

    def spent() -> float:
        return sum(_cpu(made).values())

    body: dict[str, Any] = {
        "model": "bench",
        "max_tokens": 2,
        "temperature": 0,  # else most tokens are of those that show nothing
        "stream_options": {"include_usage": True},
    }
    generator, alone, tokens = random.Random(secrets.randbits(64)), [], 0
    before = spent()
    for _ in range(_SOLO_TIMES):
        reply = await ask(url, body | {"prompt": prompt(generator, _SOLO_WORDS)}, path="/v1/completions")
        if not reply.ok:
            raise Unavailable(f"a prompt was not answered: {reply.error}", reason="BENCH_FAILED")
        alone.append(reply.prompt_tokens / reply.ttft)
        tokens += reply.prompt_tokens
    found = {"prefill": median(alone), "cpu prefill": (spent() - before) / tokens}
    rows = Requests(
        argparse.Namespace(words=_STEADY_WORDS, tokens=_STEADY_TOKENS, seconds=options.seconds), generator
    )
    for each in options.at_once:
        found[str(each)], found[f"cpu {each}"] = await rows.rate_and_cost(url, each, spent)
    return found


def _cpu(system: Any) -> dict[str, float]:
    """Processors' seconds of a system's processes until now, by what they are."""
    if not isinstance(system, LocalCluster):
        own = family(system.process.pid) if isinstance(system, Baseline) else system.servers
        return {"all": cpu_seconds(own)}
    found: dict[str, float] = {}
    for name, pid in system.processes.items():
        for one in family(pid):
            part = kind(one) if name in system.node_names else name
            found[part] = found.get(part, 0.0) + cpu_seconds([one])
    return found


async def _load(
    system: Any,
    options: argparse.Namespace,
    asked: list[tuple[str, int]],
    times: list[float],
    rows: int,
    rates: dict[str, float],
) -> Result:
    shares: dict[str, float] = {}
    before = _cpu(system)
    if isinstance(system, Baseline):
        work = {"do": "requests", "asked": asked, "times": times, "rows": rows or options.open_rows}
        answers = (await asyncio.to_thread(system.run, **work))["replies"]
        replies = [Reply(**each) for each in answers]
    else:
        ours = isinstance(system, LocalCluster)
        watched = asyncio.ensure_future(_shares(system, options)) if ours else None
        url, model = (system.http_url, "bench") if ours else (system.url, str(by_name(options.model)))
        replies, _ = await send(url, model, asked, times, rows, seconds=options.answer_seconds)
        if watched:
            shares = await watched
    after = _cpu(system)
    cpu = {part: round(spent - before.get(part, 0.0), 2) for part, spent in after.items()}
    return figures(replies, rows, rates, cpu) | {"shares": shares}


async def closed_loop(
    system: Any, options: argparse.Namespace, asked: list[tuple[str, int]], rows: int
) -> Result:
    """The figures of these requests, `rows` at a time, at a system that serves."""
    return await _load(system, options, asked, [0.0] * len(asked), rows, {})


async def _shares(made: LocalCluster, options: argparse.Namespace) -> dict[str, float]:
    """Mean shares of the members' time by activity, in percent; empty if no trace can be fetched."""
    await asyncio.sleep(options.seconds)
    try:
        call = made.admin.call("TraceRing", milliseconds=round(options.seconds * 1000), seconds=90)
        members = member_shares(await call)
    except SealringError as error:
        progress(f"no trace: {error}")
        return {}
    if not members:
        return {}
    shares = {name: mean(one.shares[name] for one in members) for name in SHOWN}
    return {
        name: round(share, 1) for name, share in (shares | {"idle": mean(m.idle for m in members)}).items()
    }


def figures(
    replies: Sequence[Reply], rows: int, rates: dict[str, float], cpu: dict[str, float] | None = None
) -> Result:
    """Figures of one load: `efficiency` if `rates` has one for `rows`; `cpu` in seconds for the whole
    load."""
    good = [one for one in replies if one.ok]
    begun = min(one.begun for one in replies)
    until = max(one.begun if rows else one.ended for one in replies)
    seconds = max(until - begun, 1e-9)
    prompts = sum(one.prompt_tokens for one in good if one.arrivals[0] <= until)
    answers = sum(
        one.completion_tokens * sum(moment <= until for moment in one.arrivals) / len(one.arrivals)
        for one in good
    )
    gaps = summary([gap * 1e3 for one in good for gap in one.gaps])
    made: Result = {
        "seconds": round(seconds, 3),
        "prompt_tokens": prompts,
        "tokens": round(answers),
        "tokens_per_second": round(answers / seconds, 2),
        "ttft_ms": summary([one.ttft * 1e3 for one in good]),
        "gap_ms": gaps,
        "failed": len(replies) - len(good),
    }
    if rates.get(str(rows)):
        made["efficiency"] = round((prompts / rates["prefill"] + answers / rates[str(rows)]) / seconds, 3)
    if cpu:
        taken = sum(one.prompt_tokens for one in good)
        given = sum(one.completion_tokens for one in good)
        made |= {"cpu": cpu, "cpu_ms_per_token": round(sum(cpu.values()) / max(1, taken + given) * 1e3, 3)}
        if rates.get(f"cpu {rows}"):
            least = taken * rates["cpu prefill"] + given * rates[f"cpu {rows}"]
            made["cpu_efficiency"] = round(least / sum(cpu.values()), 3)
    return made


def checks(result: Result) -> list[Check]:
    given, found = result["options"], []
    for load, systems in result["rounds"].items():
        what = f"{given['list']}, {load}, {given['model']}" + (" (GPU)" if given["gpus"] else "")
        ours = systems.get(OURS)
        if ours is None:
            continue
        target = 0.6 if given["gpus"] else 0.75
        if "efficiency" in ours[0]:
            found.append(Check(f"efficiency, {what}", [one.get("efficiency") for one in ours], target, True))
        if any("cpu_efficiency" in one for one in ours):
            least = [one.get("cpu_efficiency") for one in ours]
            found.append(Check(f"efficiency by processors' time, {what}", least, target, True))
        gaps = [one["gap_ms"] for one in ours]
        even = ratios([one.get("p95") for one in gaps], [one.get("p50") for one in gaps])
        found.append(Check(f"between tokens, p95 over p50, {what}", even, 2.0))
        if ALONE in systems:
            speed = ratios(_each(ours, "tokens_per_second"), _each(systems[ALONE], "tokens_per_second"))
            found.append(Check(f"tokens/s against BatchGenerator, {what}", speed, 4.0, True))
        if SERVER in systems:
            p50s = [[one["ttft_ms"].get("p50") for one in each] for each in (ours, systems[SERVER])]
            found.append(Check(f"TTFT p50 against mlx_lm.server, {what}", ratios(*p50s), 0.7))
        if given["list"] == AGENTS:
            again = _each(ours, "computed_again")
            found.append(Check(f"prefix tokens computed again, {what}", again, AGAIN))
        found.append(Check(f"failed requests, {what}", _each(ours, "failed"), 0))
    return found


def _each(rounds: Sequence[Result], name: str) -> list[float]:
    return [one[name] for one in rounds]


_EFFICIENT = ("efficiency", "efficiency, CPU", "CPU ms/token")


def tables(result: Result) -> list[Table]:
    """Medians over the rounds."""
    body: list[list[object]] = []
    shares: list[list[object]] = []
    spent: dict[str, dict[str, float]] = {}
    for load, systems in result["rounds"].items():
        for name, rounds in systems.items():
            parts = [
                ("ttft_ms", "p50"),
                ("ttft_ms", "p95"),
                *(("gap_ms", part) for part in ("p50", "p95", "p99")),
            ]
            each = [percentile([one[key].get(part, math.nan) for one in rounds], 0.5) for key, part in parts]
            efficient = [
                median(found) if (found := [one[key] for one in rounds if key in one]) else ""
                for key in ("efficiency", "cpu_efficiency", "cpu_ms_per_token")
            ]
            body.append(
                [
                    *(load, name, median(_each(rounds, "tokens_per_second")), *each),
                    *(sum(_each(rounds, "failed")), *efficient),
                ]
            )
            if name == OURS:
                spent[load] = rounds[-1].get("cpu", {})
            if rounds[-1]["shares"]:
                shares.append([load, *(rounds[-1]["shares"].get(part, "") for part in (*SHOWN, "idle"))])
    columns = [
        "load",
        "system",
        "tok/s",
        "ttft p50 ms",
        "ttft p95 ms",
        "gap p50 ms",
        "gap p95 ms",
        "gap p99 ms",
    ]
    given = result["options"]
    made = [Table(f"{given['list']} requests, {given['model']}", [*columns, "failed", *_EFFICIENT], body)]
    made += _agents_tables(result)
    if shares:
        made.append(Table("where members' time went, %", ["load", *SHOWN, "idle"], shares))
    if parts := list(dict.fromkeys(part for each in spent.values() for part in each)):
        rows = [[load, *(each.get(part, "") for part in parts)] for load, each in spent.items()]
        made.append(Table("processors' seconds of ours", ["load", *parts], rows))
    return made


def _agents_tables(result: Result) -> list[Table]:
    """Tables of agents' turns, from the last round; nothing for other lists."""
    given = result["options"]
    if given["list"] != AGENTS:
        return []
    turns, shares = [], []
    for load, each in result["rounds"].items():
        for name, rounds in each.items():
            turns += agents.rows(f"{load}, {name}", rounds[-1])
            shares.append([load, name, rounds[-1]["computed_again"], rounds[-1].get("after_restart")])
    columns = ["load", "system", "prefix tokens computed again", "in the first turn after a restart"]
    title = f"agents' turns, tokens divided by {given['scale']:g}"
    return [Table(title, agents.COLUMNS, turns), Table("shares", columns, shares)]


def several(text: str) -> int:
    """Parses a number of at least 2: a shorter closed loop has no time between its requests to measure."""
    if int(text) < 2:
        raise argparse.ArgumentTypeError("a closed loop needs 2 requests for each under way")
    return int(text)


def rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")] if text else []


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x512-qwen2")
    parser.add_argument("--list", choices=[*LISTS, AGENTS], default="mixed")
    parser.add_argument("--turns", type=int, default=agents.TURNS, help="of each agent")
    parser.add_argument("--scale", type=float, default=16.0, help="agents' tokens are divided by this")
    parser.add_argument("--rows", type=int, default=0, help="of a ring; 0: as many as requests under way")
    parser.add_argument("--restart", action="store_true", help="every process, between two turns of agents")
    parser.add_argument(
        "--systems", type=names_of("system", SYSTEMS), default=list(SYSTEMS), help=", ".join(SYSTEMS)
    )
    parser.add_argument(
        "--at-once", type=numbers, default=[8, 16, 64], help="requests under way, closed loops"
    )
    parser.add_argument(
        "--each", type=several, default=4, help="requests of a closed loop for each under way, 2 at least"
    )
    parser.add_argument("--rates", type=rates, default=[], help="requests/s of open loops")
    parser.add_argument("--arrivals", type=int, default=64, help="requests of each of those")
    parser.add_argument("--open-rows", type=int, default=64, help="rows of BatchGenerator in them, at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a steady rate, and of a trace")
    parser.add_argument("--answer-seconds", type=float, default=900.0, help="what takes longer has failed")
    parser.add_argument("--gpus", type=int, default=0, help="node n computes on GPU n modulo this")
    parser.add_argument("--prefill-chunk", type=int, default=0, help="of sealring; 0: the default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=numbers, default=[0, 1], help="of every server")
    parser.add_argument("--gateway-cores", type=numbers, default=[], help="if not the same")
    parser.add_argument("--client-cores", type=numbers, default=cores_after(2))
