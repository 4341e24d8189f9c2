"""Simulated: the whole product on engines that take as long as named Macs (bench/macs.toml) would.

Coordinator, daemons, carriers, gateway, handshakes and sealing are the product's processes. Each engine
computes a tiny model and hands results over when the named Mac would have had them. So schedule, lanes, hops
and chunks are measured, and arithmetic is not. No figure stands for a measurement of a Mac.

A run refuses itself where this machine's own work takes half of the paced time or more; `--slower K`
multiplies all paced times by K, and figures are given back on the Macs' own time.
"""

from __future__ import annotations

import argparse
import os
import random

from bench.frame import Result, Table, numbers, progress
from bench.mixed import figures as figures_of
from bench.mixed import rates
from bench.openai_client import Reply
from bench.paced import check, loads
from bench.paced.clusters import Cost, Macs, macs
from bench.paced.figures import StageTime, cluster, figures
from bench.paced.node import Pace
from bench.scaling import Requests
from bench.verdict import Check
from sealring.mesh.errors import FailedPrecondition

SIMULATED = "simulated"
QUICK = ("--rows", "1,8", "--seconds", "4")
QUICK_SECONDS = 180.0

MOST_OWN = 0.5
"""Part of the paced time that this machine's own work may take."""

_TOLERANCE, _GOOD = 0.1, 0.8
_WORDS, _TOKENS = 4, 4096
_FAULTS = ("carrier", "engine")


async def run(options: argparse.Namespace) -> Result:
    """`runs`: by cluster and model, the figures of each load. Raises FailedPrecondition (PACE_TOO_FAST)."""
    if options.check:
        scenarios = await check.check(options.check, options.rows, options.seconds)
        return {"what": SIMULATED, "options": vars(options), "check": scenarios}
    known = figures()
    wanted = [(options.cluster, options.model)]
    if options.all:
        wanted = [(one["cluster"], one["model"]) for one in known.published]
    runs: list[Result] = []
    for text, model in wanted:
        for each in (text,) if options.no_alone else (text, cluster(text)[0]):
            runs.append(await _run(each, model, options))
    return {
        "what": SIMULATED,
        "options": vars(options),
        "network": runs[0]["network"],
        "sources": known.sources,
        "published": [dict(one) for one in known.published if (one["cluster"], one["model"]) in wanted],
        "runs": runs,
    }


async def _run(text: str, model: str, options: argparse.Namespace) -> Result:
    progress(f"{SIMULATED}: {text}, {model}, {options.link}, {options.list}")
    pace = Pace("", model, options.link, options.slower, namespaces=options.namespaces)
    spec = {"max_rows": max(*options.rows, *options.at_once)}
    if options.prefill_chunk:
        spec["prefill_chunk"] = options.prefill_chunk
    found: Result = {"cluster": text, "model": model, "macs": len(cluster(text)), "loads": []}
    async with macs(cluster(text), pace, spec) as ring:
        found["network"] = ring.network
        if options.list == "static":
            for rows in options.rows:
                found["loads"].append(await _static(ring, text, model, rows, options))
        else:
            for at_once, rate in (
                *((n, 0.0) for n in options.at_once),
                *((0, each) for each in options.rates),
            ):
                found["loads"].append(await _list(ring, at_once, rate, options))
        if options.faults and found["macs"] > 1:
            found["faults"] = {what: round(await loads.fault(ring.made, what), 2) for what in _FAULTS}
    return found


async def _static(ring: Macs, text: str, model: str, rows: int, options: argparse.Namespace) -> Result:
    """Tokens per second of `rows` rows that all decode."""
    given = argparse.Namespace(words=_WORDS, tokens=_TOKENS, seconds=options.seconds * options.slower)
    before = ring.cost()
    rate = await Requests(given, random.Random(rows)).rate(ring.url, rows)
    made = {
        "load": f"{rows} rows",
        "tokens_per_second": round(rate * options.slower, 2),
        "arithmetic": round(arithmetic(text, model, options.link, rows), 2),
        **honest(ring.cost().since(before)),
    }
    progress(f"{SIMULATED}: {made}")
    return made


async def _list(ring: Macs, at_once: int, rate: float, options: argparse.Namespace) -> Result:
    before = ring.cost()
    seed, slower = at_once + round(1000 * rate), options.slower
    if options.list == "agents":
        label, replies = (
            f"{at_once} agents",
            await loads.agents(ring.url, count=at_once, seed=seed, slower=slower),
        )
    elif at_once:
        label, count = f"{at_once} at a time", at_once * options.each
        replies = await loads.requests_of(
            ring.url, options.list, at_once=at_once, count=count, seed=seed, slower=slower
        )
    else:
        label, count = f"{rate:g} requests/s", options.arrivals
        replies = await loads.requests_of(
            ring.url, options.list, rate=rate, count=count, seed=seed, slower=slower
        )
    made = {"load": label, **_of_replies(replies, at_once), **honest(ring.cost().since(before))}
    progress(f"{SIMULATED}: {label}: {made['tokens_per_second']} tok/s, TTFT {made['ttft_ms']}")
    return made


def _of_replies(replies: list[Reply], at_once: int) -> Result:
    found = figures_of(replies, at_once, {})
    cached = sum(one.cached_tokens for one in replies)
    return found | {
        "prompt_per_second": round(found["prompt_tokens"] / found["seconds"], 1),
        "cached": cached,
    }


def honest(cost: Cost) -> Result:
    """The figures by which a run is judged. Raises FailedPrecondition (PACE_TOO_FAST)."""
    if cost.share >= MOST_OWN:
        raise FailedPrecondition(
            f"this machine's own work takes {cost.share:.2f} of the paced time",
            hint="run it on a quieter machine, or with a larger --slower",
            reason="PACE_TOO_FAST",
        )
    return {
        "own_share": round(cost.share, 3),
        "late_ms": round(1e3 * cost.late / max(1, cost.steps), 2),
        "machine_load": round(os.getloadavg()[0], 1),
    }


def arithmetic(text: str, model: str, link: str, rows: int) -> float:
    """Tokens per second by figures alone: no wait but for the hops, and a ring's best number of equal
    lanes."""
    known, names = figures(), cluster(text)
    stages = [
        StageTime(known.machines[name], known.models[model], 1 / len(names), place == len(names) - 1)
        for place, name in enumerate(names)
    ]
    way = known.links[link].seconds + known.links[link].wakeups + known.completion
    hops = len(names) * way if len(names) > 1 else 0.0
    best = 0.0
    for lanes in range(1, min(rows, len(names) + 2) + 1):
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
    for one in result["runs"]:
        name = f"{one['cluster']}, {one['model']}"
        shares = [load["own_share"] for load in one["loads"]]
        found.append(Check(f"{SIMULATED}: own work of paced time, {name}", shares, MOST_OWN))
        rates = [(load["tokens_per_second"], load.get("arithmetic")) for load in one["loads"]]
        if one["macs"] == 1 and all(expected for _, expected in rates):
            off = [round(abs(rate / expected - 1), 3) for rate, expected in rates]
            found.append(Check(f"{SIMULATED}: against its figures, {name}", off, _TOLERANCE))
    return found


def tables(result: Result) -> list[Table]:
    if "check" in result:
        return [_check_table(result)]
    given = result["options"]
    title = (
        f"SIMULATED: {given['list']} over {given['link']}, times by {given['slower']:g}, {result['network']}"
    )
    made = [_static_table(title, result) if given["list"] == "static" else _list_table(title, result)]
    faults = [
        [one["cluster"], one["model"], what, seconds]
        for one in result["runs"]
        for what, seconds in one.get("faults", {}).items()
    ]
    columns = ["cluster", "model", "killed", "no token for, s"]
    return [*made, *([Table("SIMULATED: faults, this machine's seconds", columns, faults)] if faults else [])]


def _check_table(result: Result) -> Table:
    body: list[list[object]] = []
    for one in result["check"]:
        pairs = [each.get(name) for name in check.FIGURES for each in (one["real"], one["simulated"])]
        body.append([one["scenario"], *pairs, check.off(one)])
    columns = [
        f"{name}, {what}" for name in ("tok/s", "ttft p50 ms", "gap p50 ms") for what in ("real", "SIMULATED")
    ]
    title = f"Check of the instrument: {result['options']['check']} on this CPU, and SIMULATED by its times"
    return Table(title, ["scenario", *columns, "off by"], body)


def _static_table(title: str, result: Result) -> Table:
    alone = {
        (one["model"], load["load"]): load["tokens_per_second"]
        for one in result["runs"]
        if one["macs"] == 1
        for load in one["loads"]
    }
    known = {
        (each["model"], text): each["tokens_per_second" if text == each["cluster"] else "alone"]
        for each in result["published"]
        for text in (each["cluster"], cluster(each["cluster"])[0])
    }
    body: list[list[object]] = []
    for one in result["runs"]:
        for load in one["loads"]:
            rate, single = load["tokens_per_second"], alone.get((one["model"], load["load"]))
            published = known.get((one["model"], one["cluster"])) if load["load"] == "1 rows" else None
            body.append(
                [
                    *(one["cluster"], one["model"], load["load"], rate, rate / single if single else None),
                    *(load["arithmetic"], published),
                    *(load[name] for name in ("own_share", "late_ms", "machine_load")),
                ]
            )
    columns = ["cluster", "model", "load", "tok/s", "times one", "arithmetic", "published"]
    return Table(title, [*columns, "own share", "late ms", "machine load"], body)


def _list_table(title: str, result: Result) -> Table:
    body: list[list[object]] = []
    for one in result["runs"]:
        for load in one["loads"]:
            parts = [("ttft_ms", "p50"), ("ttft_ms", "p95"), ("gap_ms", "p50"), ("gap_ms", "p95")]
            body.append(
                [
                    *(one["cluster"], one["model"], load["load"], load["tokens_per_second"]),
                    *(load["prompt_per_second"], load["cached"]),
                    *(load[key].get(part) for key, part in parts),
                    *(load[name] for name in ("failed", "own_share", "machine_load")),
                ]
            )
    columns = ["cluster", "model", "load", "tok/s", "prompt tok/s", "cached", "ttft p50 ms", "p95"]
    return Table(title, [*columns, "gap p50 ms", "p95", "failed", "own share", "machine load"], body)


def options(parser: argparse.ArgumentParser) -> None:
    known = figures()
    parser.add_argument("--cluster", default="2xm4max", help="2xm4max, m3ultra+m5max")
    parser.add_argument("--model", choices=list(known.models), default="llama-70b-4bit")
    parser.add_argument("--link", choices=list(known.links), default="tb5")
    parser.add_argument("--list", choices=loads.NAMES, default="static")
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
    parser.add_argument("--all", action="store_true", help="the published clusters")
    parser.add_argument("--check", metavar="MODEL", help="check the instrument by a real model on this CPU")
    parser.add_argument("--slower", type=float, default=1.0, help="multiplies all paced times")
    parser.add_argument("--no-alone", action="store_true", help="leave one Mac alone out")
