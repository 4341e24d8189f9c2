"""Rings of one and of two stages on one device, mlx-lm alone and its server: one request, full rows, mixed.

All stages are on one GPU (`--gpus 1`), or on this machine's CPU. Systems take turns, in another order every
round, and each is started for its turn and ends with it. Two stages on one device gain nothing by computing
beside each other, so the ratio to the ring of one is what a second stage costs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

from bench import mixed, peers
from bench.frame import Result, Table, names_of, progress
from bench.models import by_name
from bench.rivals import Baseline, Server
from bench.serve import load
from bench.steady import steady_rate
from bench.verdict import Check, ratios
from sealring.cli.local.cluster import LocalCluster
from sealring.cli.tracing import SHOWN, member_shares
from sealring.mesh.errors import SealringError

SYSTEMS = ("one", "two", "alone", "server")
QUICK = ("--model", "6x128", "--gpus", "0", "--rows", "8", "--answer", "24", "--rounds", "1", "--each", "2")
QUICK_SECONDS = 180.0
MIXED, STATIC = 2.2, 0.95
"""Targets on a GPU: two stages against BatchGenerator with mixed requests, and against one with full rows."""

_WORDS, _SOLO_TOKENS = 8, 97
_TRACE_AFTER, _TRACE_SECONDS = 3.0, 1.5


async def run(options: argparse.Namespace) -> Result:
    """`rounds`: by system and load, the figures of each round."""
    options.requests, options.open_rows = options.rows, options.rows
    options.cores, options.gateway_cores = [], []
    found: dict[str, dict[str, list[Result]]] = {name: {} for name in options.systems}
    until, longest = time.monotonic() + options.most_seconds, 0.0
    for number in range(options.rounds):
        begun = time.monotonic()
        if begun + longest > until:
            progress(f"no time is left for round {number}")
            break
        first = number % len(options.systems)
        for name in (options.systems * 2)[first : first + len(options.systems)]:
            for what, figures in (await _turn(name, options, number)).items():
                found[name].setdefault(what, []).append(figures)
        longest = max(longest, time.monotonic() - begun)
    return {"options": vars(options), "rounds": found}


async def _turn(name: str, options: argparse.Namespace, number: int) -> dict[str, Result]:
    progress(f"round {number}: starting {peers.SYSTEMS[name]}")
    found = {}
    async with AsyncExitStack() as stack:
        system = await peers.start(stack, name, options)
        if isinstance(system, Server):
            system.resume()
        for what in options.loads:
            found[what] = await LOADS[what](system, options, number)
            progress(f"round {number}, {peers.SYSTEMS[name]}, {what}: {found[what]}")
    return found


async def _one(system: Any, options: argparse.Namespace, number: int) -> Result:
    """Milliseconds a token of one request, the median of three."""
    if isinstance(system, Baseline):
        work = {"do": "together", "rows": 1, "tokens": _SOLO_TOKENS, "words": _WORDS}
        found = [await asyncio.to_thread(system.run, **work) for _ in range(3)]
        times = [sum(one["gaps"]) / (_SOLO_TOKENS - 1) for one in found]
    else:
        times = []
        for time_of in range(3):
            replies, _ = await load(
                *_address(system, options),
                count=1,
                words=_WORDS,
                max_tokens=_SOLO_TOKENS,
                seed=3 * number + time_of,
            )
            times.append(replies[0].tpot)
    return {"token_ms": round(1e3 * median(times), 3)}


async def _full(system: Any, options: argparse.Namespace, number: int) -> Result:
    """Tokens a second of all rows from their first request to the last answer, and while all decode."""
    if isinstance(system, Baseline):
        work = {"do": "together", "rows": options.rows, "tokens": options.answer, "words": _WORDS}
        found = await asyncio.to_thread(system.run, **work)
        rate, steady = found["tokens"] / found["seconds"], options.rows / median(found["gaps"])
        return {"tokens_per_second": round(rate, 1), "steady": round(steady, 1)}
    shares = asyncio.ensure_future(_shares(system))
    replies, seconds = await load(
        *_address(system, options),
        count=options.rows,
        words=_WORDS,
        max_tokens=options.answer,
        seed=1000 + number,
    )
    good = [one for one in replies if one.ok]
    steady = steady_rate(good, max(one.arrivals[0] for one in good)) if good else 0.0
    return {
        "tokens_per_second": round(sum(one.completion_tokens for one in good) / seconds, 1),
        "steady": round(steady, 1),
        "failed": len(replies) - len(good),
        "shares": await shares,
    }


async def _mixed(system: Any, options: argparse.Namespace, number: int) -> Result:
    """Figures of `bench mixed` of a closed loop."""
    asked = mixed.requests("mixed", options.rows * options.each, number * 1000 + options.rows)
    return await mixed.closed_loop(system, options, asked, options.rows)


LOADS = {"one request": _one, "full rows": _full, "mixed": _mixed}


async def _shares(system: Any) -> list[dict[str, float]]:
    """Shares of each member's time by activity, in percent, some seconds from now; nothing of others."""
    if not isinstance(system, LocalCluster):
        return []
    await asyncio.sleep(_TRACE_AFTER)
    try:
        call = system.admin.call("TraceRing", milliseconds=round(1e3 * _TRACE_SECONDS), seconds=90)
        members = member_shares(await call)
    except SealringError as error:
        progress(f"no trace: {error}")
        return []
    return [{name: round(one.shares[name], 1) for name in SHOWN} | {"idle": one.idle} for one in members]


def _address(system: Any, options: argparse.Namespace) -> tuple[str, str]:
    """The URL, and the model's name there."""
    if isinstance(system, LocalCluster):
        return system.http_url, "bench"
    return system.url, str(by_name(options.model))


_FIGURES = (
    ("one request", "token_ms", "one request, ms a token"),
    ("full rows", "tokens_per_second", "full rows, tok/s"),
    ("full rows", "steady", "while all decode"),
    ("mixed", "tokens_per_second", "mixed, tok/s"),
)


def _each(result: Result, system: str, what: str, name: str) -> list[float]:
    return [one[name] for one in result["rounds"].get(system, {}).get(what, [])]


def checks(result: Result) -> list[Check]:
    given = result["options"]
    where = f"{given['rows']} rows, {given['model']}, one {'GPU' if given['gpus'] else 'CPU'}"

    def against(ours: str, theirs: str, what: str, name: str) -> list[float | None]:
        pair = [_each(result, system, what, name) for system in (ours, theirs)]
        return ratios(*pair) if all(pair) else []

    found = [
        Check(
            f"mixed, 2 stages against BatchGenerator, {where}",
            against("two", "alone", "mixed", "tokens_per_second"),
            MIXED,
            True,
        ),
        Check(
            f"all decode, 2 stages against one, {where}",
            against("two", "one", "full rows", "steady"),
            STATIC,
            True,
        ),
    ]
    return [one for one in found if one.rounds]


def tables(result: Result) -> list[Table]:
    """Medians over the rounds, and shares of the last."""
    body, shares = [], []
    for system, loads in result["rounds"].items():
        row: list[object] = [peers.SYSTEMS[system]]
        for what, name, _ in _FIGURES:
            each = _each(result, system, what, name)
            row.append(median(each) if each else None)
        body.append(row)
        for what in ("full rows",):
            for rank, one in enumerate(loads.get(what, [{}])[-1].get("shares", [])):
                shares.append([peers.SYSTEMS[system], rank, *one.values()])
    given = result["options"]
    columns = ["system", *(title for _, _, title in _FIGURES)]
    made = [Table(f"{given['rows']} rows, {given['model']}", columns, body)]
    if shares:
        made.append(
            Table(
                "where the members' time went with full rows, %", ["system", "rank", *SHOWN, "idle"], shares
            )
        )
    return made


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="8b")
    parser.add_argument("--gpus", type=int, default=1, help="0: on this machine's CPU")
    parser.add_argument(
        "--systems",
        type=names_of("system", SYSTEMS),
        default=["one", "two", "alone"],
        help=", ".join(SYSTEMS),
    )
    parser.add_argument("--loads", type=names_of("load", LOADS), default=list(LOADS), help=", ".join(LOADS))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--answer", type=int, default=192, help="tokens of each answer of full rows")
    parser.add_argument("--each", type=int, default=3, help="mixed requests for each row, 2 at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a trace of mixed requests")
    parser.add_argument("--answer-seconds", type=float, default=300.0, help="what takes longer has failed")
    parser.add_argument("--prefill-chunk", type=int, default=0, help="of sealring; 0: the default")
    parser.add_argument(
        "--most-seconds", type=float, default=3600.0, help="begin no round that would end later"
    )
