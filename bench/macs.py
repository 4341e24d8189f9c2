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
from typing import Any

from bench.frame import Result, Table, numbers, progress
from bench.paced.clusters import Cost, Macs, macs
from bench.paced.figures import StageTime, cluster, figures
from bench.paced.node import Pace
from bench.scaling import Requests
from bench.verdict import Check
from sealring.mesh.errors import FailedPrecondition

SIMULATED = "simulated"
QUICK = ("--rows", "1,8", "--seconds", "5", "--cluster", "2xm4max")
QUICK_SECONDS = 180.0

MOST_OWN = 0.5
"""Part of the paced time that this machine's own work may take."""

_TOLERANCE = 0.1
_WORDS, _TOKENS = 4, 4096


async def run(options: argparse.Namespace) -> Result:
    """`clusters`: by cluster, the figures of each load. Raises FailedPrecondition (PACE_TOO_FAST)."""
    wanted = [options.cluster, *([] if options.no_alone else [_alone(options.cluster)])]
    pace = Pace("", options.model, options.link, options.slower, shaped=False, reports="")
    found: dict[str, Any] = {}
    for text in dict.fromkeys(wanted):
        progress(f"{SIMULATED}: {text}, {options.model}, {options.link}")
        async with macs(cluster(text), pace, {"max_rows": max(options.rows)}) as ring:
            found[text] = {
                "static": [await _static(ring, text, rows, options) for rows in options.rows],
            }
    given = {name: value for name, value in vars(options).items() if name != "no_alone"}
    return {
        "what": SIMULATED,
        "options": given,
        "network": "loopback; engines add the link",
        "clusters": found,
    }


def _alone(text: str) -> str:
    """The cluster's first machine, as if the model fitted into it."""
    return cluster(text)[0]


async def _static(ring: Macs, text: str, rows: int, options: argparse.Namespace) -> Result:
    """Tokens per second of `rows` rows that all decode."""
    seconds = options.seconds * options.slower
    given = argparse.Namespace(words=_WORDS, tokens=_TOKENS, seconds=seconds)
    before = ring.cost()
    rate = await Requests(given, random.Random(rows)).rate(ring.url, rows)
    cost = ring.cost().since(before)
    made = {
        "rows": rows,
        "tokens_per_second": round(rate * options.slower, 2),
        "arithmetic": round(arithmetic(text, options.model, options.link, rows), 2),
        **honest(cost),
    }
    progress(f"{SIMULATED}: {text}, {rows} rows: {made['tokens_per_second']} tok/s")
    return made


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
        "load": round(os.getloadavg()[0], 1),
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
    """One Mac's rate is its figures'; own work is below half of the paced time."""
    found, given = [], result["options"]
    for text, loads in result["clusters"].items():
        shares = [one["own_share"] for one in loads["static"]]
        found.append(Check(f"{SIMULATED}: own work of paced time, {text}", shares, MOST_OWN))
        if len(cluster(text)) == 1:
            off = [abs(one["tokens_per_second"] / one["arithmetic"] - 1) for one in loads["static"]]
            name = f"{SIMULATED}: {text} against its figures, {given['model']}"
            found.append(Check(name, [round(one, 3) for one in off], _TOLERANCE))
    return found


def tables(result: Result) -> list[Table]:
    given, alone = result["options"], {}
    body: list[list[object]] = []
    for text, loads in reversed(result["clusters"].items()):
        for one in loads["static"]:
            rate = one["tokens_per_second"]
            if len(cluster(text)) == 1:
                alone[one["rows"]] = rate
            ratio = rate / alone[one["rows"]] if alone.get(one["rows"]) else None
            own = one["own_share"]
            body.append([text, one["rows"], rate, ratio, one["arithmetic"], own, one["late_ms"], one["load"]])
    columns = ["cluster", "rows", "tok/s", "times one", "arithmetic", "own share", "late ms", "load"]
    title = f"SIMULATED: {given['model']} over {given['link']}, times by {given['slower']:g}"
    return [Table(title, columns, body)]


def options(parser: argparse.ArgumentParser) -> None:
    known = figures()
    parser.add_argument("--cluster", default="2xm4max", help="2xm4max, m3ultra+m5max")
    parser.add_argument("--model", choices=list(known.models), default="llama-70b-4bit")
    parser.add_argument("--link", choices=list(known.links), default="tb5")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 16, 32, 64], help="that all decode")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a Mac, that all rows decode")
    parser.add_argument("--slower", type=float, default=1.0, help="multiplies all paced times")
    parser.add_argument("--no-alone", action="store_true", help="leave one Mac alone out")
