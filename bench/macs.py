"""Simulated: the whole product on engines that take as long as named Macs (bench/macs.toml) would.

Coordinator, daemons, carriers, gateway, handshakes and sealing are the product's processes. Each engine
computes a tiny model and hands results over when the named Mac would have had them. So schedule, lanes, hops
and chunks are measured, and arithmetic is not. No figure stands for a measurement of a Mac.

With `--list restart` the ring of agents is started again in the middle of their sessions. That is computed in
virtual time, by the scheduler alone: a disk of this machine is none of a Mac.

A run refuses itself where this machine's own work takes half of the paced time or more; `--slower K`
multiplies all paced times by K, and figures are given back on the Macs' own time.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from statistics import mean

from bench import agents, drafted
from bench.clusters import restarted
from bench.frame import Result, Table, numbers, progress
from bench.mixed import figures as figures_of
from bench.mixed import rates
from bench.models import SHAPES, random_model
from bench.openai_client import Reply
from bench.paced import check, loads, restart
from bench.paced.alone import Alone, alone, together
from bench.paced.clusters import NAME, TINY, Cost, Macs, macs
from bench.paced.figures import StageTime, cluster, figures
from bench.paced.node import Pace
from bench.steady import Requests
from bench.summaries import summary
from bench.verdict import Check, joined
from sealring.cli.calls.gateway import inference
from sealring.mesh.errors import FailedPrecondition, SealringError

SIMULATED = "simulated"
RESTART = "restart"
"""A list that needs no ring: it is computed in virtual time."""

QUICK = ("--rows", "1,8", "--seconds", "4")
QUICK_SECONDS = 180.0

MOST_OWN = 0.5
"""Part of the paced time that this machine's own work may take."""

_TOLERANCE, _GOOD = 0.1, 0.8
SECTION_SECONDS = 480.0
"""The longest time of one section of --all."""

_WORDS, _TOKENS, _SOLO_TOKENS = 4, 4096, 1024
_DRAFTED_LAYERS = 11
"""Layers of the model that is computed, which a head and one or two others share as the large one's."""

MTP = "mtp"
"""The source of drafts that is no model of its own."""

_DRAFTED_ROWS = 4
_OPEN_ROWS = 16
"""Rows of a ring in an open loop, where requests arrive at a rate of their own."""
_FAULTS = ("carrier", "engine")


async def run(options: argparse.Namespace) -> Result:
    """`sections`: of each set of options, by cluster and model, the figures of each load. A section of
    `--all` that fails says why. Raises FailedPrecondition (PACE_TOO_FAST)."""
    if options.check:
        return {"what": SIMULATED, "options": vars(options), "check": await check.check(options)}
    known = figures()
    if not options.all:
        sections = [await _section(options)]
    else:
        sections = [await _target(name) for name in options.parts or known.targets]
    return {"what": SIMULATED, "options": vars(options), "sources": known.sources, "sections": sections}


async def _target(name: str) -> Result:
    """A row of the data file's targets, in bounded time."""
    target = figures().targets[name]
    parser = argparse.ArgumentParser(name)
    options(parser)
    given = parser.parse_args(target["arguments"].split())
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(SECTION_SECONDS):
            found = await _section(given)
    except (SealringError, TimeoutError) as error:
        progress(f"{SIMULATED}: {name}: {error}")
        found = {"options": vars(given), "runs": [], "failed": str(error) or "it took too long"}
    seconds = round(time.perf_counter() - begun)
    return found | {"name": name, "wanted": target["wanted"], "seconds": seconds}


async def _section(options: argparse.Namespace) -> Result:
    if options.list == RESTART:
        runs = [
            {"cluster": text, "model": options.model, "macs": len(cluster(text))}
            | restart.run(text, options.model, options.at_once, options.turns)
            for text in options.cluster
        ]
        return {"options": vars(options), "network": "virtual time", "published": [], "runs": runs}
    clusters = list(options.cluster)
    if not (options.no_alone or options.list == "drafts"):  # one Mac alone guesses nothing
        clusters += [
            one for one in dict.fromkeys(cluster(text)[0] for text in clusters) if one not in clusters
        ]
    runs = [await _run(text, options.model, options) for text in clusters]
    published = [dict(one) for one in figures().published if one["model"] == options.model]
    return {"options": vars(options), "network": runs[0]["network"], "published": published, "runs": runs}


async def _run(text: str, model: str, options: argparse.Namespace) -> Result:
    progress(f"{SIMULATED}: {text}, {model}, {options.link}, {options.list}")
    pace = Pace("", model, options.link, options.slower, namespaces=options.namespaces)
    at_once = max([*options.at_once, *([_OPEN_ROWS] if options.rates else [])], default=1)
    spec = {"max_rows": max(options.rows) if options.list == "static" else at_once}
    if options.prefill_chunk:
        spec["prefill_chunk"] = options.prefill_chunk
    found: Result = {"cluster": text, "model": model, "macs": len(cluster(text)), "loads": []}
    computed = None
    if len(options.split) == found["macs"] > 1:
        spec["split"] = found["split"] = options.split
        if options.prompt_split:
            spec["prompt_split"] = found["prompt_split"] = options.prompt_split
        computed = random_model(dataclasses.replace(TINY, layers=sum(options.split)))
    if options.list == "drafts":
        large = dataclasses.replace(TINY, layers=_DRAFTED_LAYERS)
        spec = {"speculate": True, "max_rows": _DRAFTED_ROWS}
        if options.draft == MTP:
            computed = drafted.model_with_head(large)
            split = spread_evenly(_DRAFTED_LAYERS, len(cluster(text)))
        else:
            pace = dataclasses.replace(pace, draft=options.draft)
            computed, small = drafted.models(large, TINY)
            split = layers_beside(text, model, options.draft)
            spec["draft"] = str(small)
        spec["split"] = split
        found |= {"draft": options.draft, "split": split}
    async with macs(cluster(text), pace, spec, computed) as ring:
        found["network"] = ring.network
        for load in _loads(text, model, options):
            before = ring.cost()
            made = await load(ring) | honest(ring.cost, before)
            found["loads"].append(made)
            progress(f"{SIMULATED}: {made}")
        if options.faults and found["macs"] > 1:
            found["faults"] = {what: round(await loads.fault(ring.made, what), 2) for what in _FAULTS}
    return found


def _loads(
    text: str, model: str, options: argparse.Namespace
) -> Iterator[Callable[[Macs], Awaitable[Result]]]:
    """What measures each load of a list."""
    if options.list == "static":
        yield from (partial(_static, text, model, rows, options) for rows in options.rows)
    elif options.list == "drafts":
        yield from (partial(_drafts, right, options) for right in (options.right, 0.0))
        for rows in range(2, 1 + _DRAFTED_ROWS):
            yield partial(
                _drafts, options.right, options, rows=rows, reachable=_reachable(text, model, options, rows)
            )
    elif options.list == "prompt":
        yield partial(_prompt, options)
    elif options.list == "agents":
        yield from (partial(_agents, text, model, count, options) for count in options.at_once)
    else:
        yield from (partial(_list, count, 0.0, options) for count in options.at_once)
        yield from (partial(_list, 0, rate, options) for rate in options.rates)


async def _static(text: str, model: str, rows: int, options: argparse.Namespace, ring: Macs) -> Result:
    """Tokens per second of `rows` rows that all decode."""
    return {
        "load": f"{rows} rows",
        "tokens_per_second": await _steady(rows, options, ring),
        "arithmetic": round(arithmetic(text, model, options.link, rows, options.split), 2),
    }


async def _steady(rows: int, options: argparse.Namespace, ring: Macs) -> float:
    given = argparse.Namespace(words=_WORDS, tokens=_TOKENS, seconds=options.seconds * options.slower)
    rate = await Requests(given, random.Random(rows)).rate(ring.url, rows)
    return round(rate * options.slower, 2)


async def _prompt(options: argparse.Namespace, ring: Macs) -> Result:
    """One prompt of `--prompt-tokens` alone."""
    reply = await loads.prompt_of(ring.url, options.prompt_tokens, slower=options.slower)
    return {
        "load": f"a prompt of {reply.prompt_tokens} tokens",
        "tokens_per_second": round(reply.prompt_tokens / reply.ttft, 2),
        "ttft_s": round(reply.ttft, 2),
    }


def layers_beside(text: str, model: str, draft: str) -> list[int]:
    """The layers of each Mac where all hold as many bytes, the head with the draft model."""
    known, count = figures().models, len(cluster(text))
    small = known[draft].bytes_of(known[draft].active) / known[model].bytes_of(known[model].active)
    head = max(1, round(_DRAFTED_LAYERS * ((1 + small) / count - small)))
    return [head, *spread_evenly(_DRAFTED_LAYERS - head, count - 1)]


def spread_evenly(layers: int, count: int) -> list[int]:
    """The layers of each of `count` Macs."""
    return [layers // count + (rank < layers % count) for rank in range(count)]


def _reachable(text: str, model: str, options: argparse.Namespace, rows: int) -> float:
    """The gain of drafts by figures alone, with the layers that the Macs have."""
    known, names = figures(), cluster(text)
    stages = _stage_times(text, model, layers_beside(text, model, options.draft))
    draft = StageTime(known.machines[names[0]], known.models[options.draft], 1.0, True)
    return round(drafted.reachable(stages, draft, rows, options.right, _way(options.link)), 2)


async def _drafts(
    right: float, options: argparse.Namespace, ring: Macs, rows: int = 1, reachable: float | None = None
) -> Result:
    """Tokens per second of answers of which a draft model is right with a probability, against the same
    without drafts, by turns; `rows` of them at once."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    counts = [0, 0]
    same = True
    async with inference(ring.made.grpc_address) as client:
        for number in range(options.rounds + 1):  # the first one to learn
            texts = set()
            for drafts in (True, False) if number % 2 else (False, True):
                asked = drafted.request(NAME, number, options.tokens, right, drafts=drafts)
                got = await asyncio.gather(*(drafted.answer(client.stub, asked) for _ in range(rows)))
                texts.add(got[0].text)
                if number:
                    rates[drafts].append(sum(one.rate for one in got) * options.slower)
                    counts = [counts[0] + got[0].drafts[0], counts[1] + got[0].drafts[1]]
            same = same and len(texts) == 1
    gains = [round(one / other, 3) for one, other in zip(rates[True], rates[False], strict=True)]
    return {
        "load": f"{rows} rows, drafts right with probability {right:g}",
        "tokens_per_second": round(mean(rates[True]), 2),
        "plain": round(mean(rates[False]), 2),
        "gains": gains,
        "reachable": reachable,
        "drafted": counts[0],
        "accepted": counts[1],
        "same": same,
    }


async def _agents(text: str, model: str, count: int, options: argparse.Namespace, ring: Macs) -> Result:
    """Agents that take turns: figures of all requests, of each turn, and against what is new alone."""
    sessions = await loads.agents(
        ring.url,
        count=count,
        turns=options.turns,
        scale=options.scale,
        seed=count,
        slower=options.slower,
        programs=options.programs,
        restart=partial(restarted, ring.made, NAME) if options.restart else None,
    )
    replies = [reply for session in sessions for reply in session]
    middle = options.turns // 2 if options.restart else 0
    good = [(turn, one) for each in sessions for turn, one in enumerate(each) if one.ok]
    by_figures = [new_alone(text, model, options.link, one, options.split) for _, one in good]
    least = together((one.begun, taken) for (_, one), taken in zip(good, by_figures, strict=True))
    later = [place for place, (turn, _) in enumerate(good) if turn and turn != middle]
    return {
        "load": f"{count} agents",
        **_of_replies(replies, 0),
        **agents.figures(sessions, options.restart),
        "times_new_alone": summary([good[place][1].ttft / by_figures[place].whole for place in later]),
        "times_together": summary([least[place] for place in later]),
    }


def new_alone(text: str, model: str, link: str, reply: Reply, split: Sequence[int] = ()) -> Alone:
    """What the new tokens of a prompt take a ring that does nothing else, by figures."""
    stages = _stage_times(text, model, split)
    hops = len(stages) * _way(link) if len(stages) > 1 else 0.0
    return alone(stages, hops, reply.prompt_tokens - reply.cached_tokens, reply.cached_tokens)


async def _list(at_once: int, rate: float, options: argparse.Namespace, ring: Macs) -> Result:
    seed, slower = at_once + round(1000 * rate), options.slower
    label, count = (
        (f"{at_once} at a time", at_once * options.each)
        if at_once
        else (f"{rate:g} requests/s", options.arrivals)
    )
    rates: dict[str, float] = {}
    if at_once and options.efficiency:
        alone = await loads.prompt_of(ring.url, _SOLO_TOKENS, slower=slower)
        rates = {
            "prefill": alone.prompt_tokens / alone.ttft,
            str(at_once): await _steady(at_once, options, ring),
        }
    replies = await loads.requests_of(
        ring.url, options.list, at_once=at_once, rate=rate or math.inf, count=count, seed=seed, slower=slower
    )
    return {"load": label, **_of_replies(replies, at_once, rates)}


def _of_replies(replies: list[Reply], at_once: int, rates: dict[str, float] | None = None) -> Result:
    found = figures_of(replies, at_once, rates or {})
    cached = sum(one.cached_tokens for one in replies)
    return found | {
        "prompt_per_second": round(found["prompt_tokens"] / found["seconds"], 1),
        "cached": cached,
    }


def honest(cost: Callable[[], Cost], before: Cost) -> Result:
    """The figures by which a run is judged. Raises FailedPrecondition (PACE_TOO_FAST)."""
    spent = cost().since(before)
    if spent.share >= MOST_OWN:
        raise FailedPrecondition(
            f"this machine's own work takes {spent.share:.2f} of the paced time",
            hint="run it on a quieter machine, or with a larger --slower",
            reason="PACE_TOO_FAST",
        )
    return {
        "own_share": round(spent.share, 3),
        "late_ms": round(1e3 * spent.late / max(1, spent.steps), 2),
        "machine_load": round(os.getloadavg()[0], 1),
    }


def _stage_times(text: str, model: str, split: Sequence[int] = ()) -> list[StageTime]:
    """The stages of a ring with these shares of the layers, or equal ones where their number differs."""
    known, names = figures(), cluster(text)
    shares = split if len(split) == len(names) else [1] * len(names)
    return [
        StageTime(known.machines[name], known.models[model], share / sum(shares), place == len(names) - 1)
        for place, (name, share) in enumerate(zip(names, shares, strict=True))
    ]


def _way(link: str) -> float:
    """Seconds of a hop, without its bytes."""
    known = figures()
    return known.links[link].seconds + known.links[link].wakeups + known.completion


def arithmetic(text: str, model: str, link: str, rows: int, split: Sequence[int] = ()) -> float:
    """Tokens per second by figures alone: no wait but for the hops, and a ring's best number of equal
    lanes."""
    stages = _stage_times(text, model, split)
    hops = len(stages) * _way(link) if len(stages) > 1 else 0.0
    best = 0.0
    for lanes in range(1, min(rows, len(stages) + 2) + 1):
        times = [one.step(-(-rows // lanes), 1, 0) for one in stages]
        best = max(best, rows / max(sum(times) + hops, lanes * max(times)))
    return best


def checks(result: Result) -> list[Check]:
    """One Mac's rate is its figures'; own work is below half of the paced time; the check's figures agree."""
    if "check" in result:
        good = [check.off(one) <= check.WITHIN for one in result["check"]]
        name = f"{SIMULATED}: share of scenarios within {check.WITHIN:g} of the real run"
        return [Check(name, [sum(good) / len(good)], _GOOD, True)]
    found = []
    for section in result["sections"]:
        for one in section["runs"]:
            name = f"{one['cluster']}, {one['model']}, {section['options']['list']}"
            if prompt := one.get("prompt"):
                of_cold = round(prompt["again_s"] / prompt["cold_s"], 3)
                what = f"first token of {restart.PROMPT} after a restart against cold, {name}"
                found.append(Check(f"{SIMULATED}: {what}", [of_cold], restart.COLD))
                continue
            shares = [load["own_share"] for load in one["loads"]]
            found.append(Check(f"{SIMULATED}: own work of paced time, {name}", shares, MOST_OWN))
            rates = [(load["tokens_per_second"], load.get("arithmetic")) for load in one["loads"]]
            if one["macs"] == 1 and all(expected for _, expected in rates):
                off = [round(abs(rate / expected - 1), 3) for rate, expected in rates]
                found.append(Check(f"{SIMULATED}: against its figures, {name}", off, _TOLERANCE))
    return joined([found])


def tables(result: Result) -> list[Table]:
    if "check" in result:
        return [_check_table(result)]
    made: list[Table] = []
    for section in result["sections"]:
        made += _section_tables(section)
    wanted = [
        [one["name"], one["wanted"], one["seconds"], one.get("failed", "")]
        for one in result["sections"]
        if "name" in one
    ]
    return [
        *made,
        *([Table("SIMULATED: sections", ["name", "wanted", "s", "failed"], wanted)] if wanted else []),
    ]


def _section_tables(section: Result) -> list[Table]:
    given = section["options"]
    if not section["runs"]:
        return []
    title = (
        f"SIMULATED: {given['list']} over {given['link']}, times by {given['slower']:g}, {section['network']}"
    )
    if given["list"] == "agents":
        title += f", tokens divided by {given['scale']:g}"
    if given["list"] == "drafts":
        return [_drafts_table(title, section)]
    if given["list"] == RESTART:
        return restart.tables(title, section["runs"])
    rates = given["list"] in ("static", "prompt")
    made = [_static_table(title, section) if rates else _list_table(title, section)]
    if given["list"] == "agents":
        turns = [
            row
            for one in section["runs"]
            for load in one["loads"]
            for row in agents.rows(f"{one['cluster']}, {load['load']}", load)
        ]
        made.append(Table(f"{title}: turns", agents.COLUMNS, turns))
    faults = [
        [one["cluster"], one["model"], what, seconds]
        for one in section["runs"]
        for what, seconds in one.get("faults", {}).items()
    ]
    columns = ["cluster", "model", "killed", "no token for, s"]
    return [*made, *([Table("SIMULATED: faults, this machine's seconds", columns, faults)] if faults else [])]


def _check_table(result: Result) -> Table:
    body: list[list[object]] = []
    for one in result["check"]:
        pairs = [each.get(name) for name in check.FIGURES for each in (one["real"], one["simulated"])]
        body.append([one["scenario"], *pairs, check.off(one)])
    columns = [f"{name}, {what}" for name in check.FIGURES.values() for what in ("real", "SIMULATED")]
    title = f"Check of the instrument: {result['options']['check']} on this CPU, and SIMULATED by its times"
    return Table(title, ["scenario", *columns, "off by"], body)


def _static_table(title: str, section: Result) -> Table:
    runs, published = section["runs"], section["published"]
    alone = {
        load["load"]: load["tokens_per_second"] for one in runs if one["macs"] == 1 for load in one["loads"]
    }
    known = {
        (text, f"{each.get('rows', 1)} rows"): each[key]
        for each in published
        for key, text in (("tokens_per_second", each["cluster"]), ("alone", cluster(each["cluster"])[0]))
        if key in each
    }
    body: list[list[object]] = []
    for one in runs:
        for load in one["loads"]:
            rate, single = load["tokens_per_second"], alone.get(load["load"])
            body.append(
                [
                    *(one["cluster"], one["model"], load["load"], rate, rate / single if single else None),
                    *(load.get("arithmetic"), known.get((one["cluster"], load["load"]))),
                    *(load[name] for name in ("own_share", "late_ms", "machine_load")),
                ]
            )
    columns = ["cluster", "model", "load", "tok/s", "times one", "arithmetic", "published"]
    return Table(title, [*columns, "own share", "late ms", "machine load"], body)


def _drafts_table(title: str, section: Result) -> Table:
    body: list[list[object]] = []
    for one in section["runs"]:
        for load in one["loads"]:
            gains, right = " ".join(map(str, load["gains"])), f"{load['accepted']}/{load['drafted']}"
            body.append(
                [
                    *(one["cluster"], one["model"], one["draft"], ",".join(map(str, one["split"]))),
                    *(load["load"], load["plain"], load["tokens_per_second"], gains, load.get("reachable")),
                    *(right, load["same"]),
                    *(load[name] for name in ("own_share", "late_ms", "machine_load")),
                ]
            )
    columns = ["cluster", "model", "draft", "layers", "load", "plain tok/s", "tok/s", "gains"]
    more = ["by figures", "right", "same", "own share", "late ms", "machine load"]
    return Table(title, [*columns, *more], body)


def _list_table(title: str, section: Result) -> Table:
    body: list[list[object]] = []
    for one in section["runs"]:
        for load in one["loads"]:
            parts = [("ttft_ms", "p50"), ("ttft_ms", "p95"), ("gap_ms", "p50"), ("gap_ms", "p95")]
            body.append(
                [
                    *(one["cluster"], one["model"], load["load"], load["tokens_per_second"]),
                    *(load["prompt_per_second"], load["cached"]),
                    *(load[key].get(part) for key, part in parts),
                    *(load.get("efficiency"), load.get("computed_again"), load.get("after_restart")),
                    *(load.get(times, {}).get("p95") for times in ("times_new_alone", "times_together")),
                    *(load[name] for name in ("failed", "own_share", "machine_load")),
                ]
            )
    columns = ["cluster", "model", "load", "tok/s", "prompt tok/s", "cached", "ttft p50 ms", "p95"]
    columns += [
        "gap p50 ms",
        "p95",
        "efficiency",
        "computed again",
        "after restart",
        "ttft p95, times new alone",
        "of prompts without answers",
    ]
    return Table(title, [*columns, "failed", "own share", "machine load"], body)


def _names(text: str) -> list[str]:
    return text.split(",")


def clusters(text: str) -> list[str]:
    """An option's value: clusters between commas. Raises NotFound (MAC_NOT_FOUND)."""
    found = text.split(",")
    for one in found:
        cluster(one)
    return found


def options(parser: argparse.ArgumentParser) -> None:
    known = figures()
    parser.add_argument(
        "--cluster", type=clusters, default=["2xm4max"], help="2xm4max, m3ultra+m5max, several between commas"
    )
    parser.add_argument("--model", choices=list(known.models), default="llama-70b-4bit")
    parser.add_argument(
        "--split", type=numbers, default=[], help="shares of the layers, of rings of as many Macs"
    )
    parser.add_argument(
        "--prompt-split", type=numbers, default=[], help="as --split, with which prompts are computed"
    )
    parser.add_argument("--link", choices=list(known.links), default="tb5")
    parser.add_argument("--list", choices=[*loads.NAMES, RESTART], default="static")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 16, 32, 64], help="of static, that all decode")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the Macs, that all rows decode")
    parser.add_argument("--at-once", type=numbers, default=[4], help="requests under way, or agents")
    parser.add_argument("--each", type=int, default=3, help="requests for each under way")
    parser.add_argument("--rates", type=rates, default=[], help="requests/s of open loops")
    parser.add_argument("--arrivals", type=int, default=16, help="requests of each of those")
    parser.add_argument("--prefill-chunk", type=int, default=0, help="0: the default")
    parser.add_argument(
        "--namespaces", action="store_true", help="one of the network for each Mac; needs root"
    )
    parser.add_argument("--faults", action="store_true", help="then kill a carrier, and an engine")
    parser.add_argument("--efficiency", action="store_true", help="of closed loops, by the ring's own rates")
    parser.add_argument(
        "--draft", choices=[*known.models, MTP], default="llama-3b-4bit", help="of drafts; mtp: an MTP head"
    )
    parser.add_argument("--right", type=float, default=0.7, help="of drafts: how often it is right")
    parser.add_argument("--tokens", type=int, default=256, help="of drafts: of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="of drafts")
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="of the list prompt")
    parser.add_argument("--turns", type=int, default=agents.TURNS, help="of each agent")
    parser.add_argument(
        "--programs", type=numbers, default=list(agents.PROGRAMS), help="tokens of the agents' programs"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="agents' tokens are divided by this")
    parser.add_argument("--restart", action="store_true", help="every process, between two turns of agents")
    parser.add_argument("--all", action="store_true", help="the targets in macs.toml, one after the other")
    parser.add_argument("--parts", type=_names, default=[], help=f"of --all: {', '.join(known.targets)}")
    parser.add_argument(
        "--check",
        choices=list(SHAPES),
        metavar="MODEL",
        help="check the instrument by a real model on this CPU",
    )
    parser.add_argument("--stages", type=numbers, default=[1, 2], help="of the check")
    parser.add_argument(
        "--scenarios",
        type=check.scenarios,
        default=check.scenarios("chat:2:4,mixed:4:8"),
        help="of the check",
    )
    parser.add_argument("--check-rounds", type=int, default=1, help="of the check, real and paced by turns")
    parser.add_argument("--slower", type=float, default=1.0, help="multiplies all paced times")
    parser.add_argument("--no-alone", action="store_true", help="leave one Mac alone out")
