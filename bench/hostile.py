"""One client's stream, and admin calls, while another connection is hostile: longest pauses.

Each attack is a process of its own that goes on for some seconds. A pause is what a client sees between two
pieces of its answer; it is compared with that of the same stream before, when nobody attacked.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.attacks import GRPC, HTTP
from bench.clusters import Deployment, cluster, family
from bench.frame import Result, Table, progress
from bench.models import SHAPES, random_model
from bench.openai_client import Reply, ask
from bench.verdict import Check
from sealring.cli.local.cluster import LocalCluster

TOKENS = 8000
CONNECTIONS = 3
"""To the coordinator: calls of one connection alone hardly show."""

TARGET = 0.25
_ALONE = "nothing"
_CALLS_PER_SECOND = 20.0

QUICK = ("--seconds", "0.3", "--stages", "1")


async def run(options: argparse.Namespace) -> Result:
    wanted = Deployment("demo", random_model(SHAPES["2x64"]), options.stages, spec={"max_rows": 8})
    async with cluster([wanted]) as made:
        http, grpc = made.http_url.removeprefix("http://"), made.grpc_address
        attacks: list[tuple[str, str, list[list[str]]]] = [("gateway", _ALONE, [])]
        attacks += [
            ("gateway", name, [[name, at]]) for kinds, at in ((HTTP, http), (GRPC, grpc)) for name in kinds
        ]
        for port, at in (("join port", made.address("join")), ("main port", made.address("coordinator"))):
            floods = ["pings", "settings", "resets", "calls", "open_streams"]
            attacks += [(f"coordinator, {port}", name, [[name, at]] * CONNECTIONS) for name in floods]
        chosen = [one for one in attacks if not options.only or one[1] in (_ALONE, *options.only)]
        return {"attacks": [await _attack(made, *one, options.seconds) for one in chosen]}


async def _attack(
    made: LocalCluster, where: str, name: str, commands: list[list[str]], seconds: float
) -> dict[str, Any]:
    progress(f"{where}: {name}")
    tls = [str(made.operator_bundle)] if where != "gateway" else []
    replies: list[Reply] = []
    watching = asyncio.ensure_future(_watch(made, replies))
    calling = asyncio.ensure_future(_call(made, calls := []))
    await asyncio.sleep(1.0)
    begin = time.perf_counter()
    attackers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.attacks", *command, str(seconds), *tls),
            stdout=asyncio.subprocess.DEVNULL,
        )
        for command in commands
    ]
    await asyncio.gather(*(one.wait() for one in attackers))
    await asyncio.sleep(1.0 if commands else seconds)
    for task in (watching, calling):
        task.cancel()
    await asyncio.gather(watching, calling, return_exceptions=True)
    now = time.perf_counter()
    return {
        "where": where,
        "attack": name,
        "pause": round(longest_pause(replies, begin, now), 3),
        "cut": sum(bool(reply.error) for reply in replies),
        "call": round(max([took for at, took in calls if at + took > begin], default=0.0), 3),
        "megabytes": round(family(made.processes["gateway"])[0].memory_info().rss / 1e6),
    }


async def _watch(made: LocalCluster, replies: list[Reply]) -> None:
    """One stream after the other, for ever."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "go on"}], "max_tokens": TOKENS}
    while True:
        replies.append(Reply(time.perf_counter()))
        await ask(made.http_url, body, into=replies[-1])


async def _call(made: LocalCluster, calls: list[tuple[float, float]]) -> None:
    """Admin calls, one after the other: when each began and what it took."""
    while True:
        begun = time.perf_counter()
        calls.append((begun, 1e9))
        try:
            await made.admin.call("ListNodes")
        finally:
            calls[-1] = (begun, time.perf_counter() - begun)
        await asyncio.sleep(1 / _CALLS_PER_SECOND)


def longest_pause(replies: Sequence[Reply], begin: float, end: float) -> float:
    """Seconds between two pieces of one answer, the piece that is still to come included; 0 without any."""
    found = [0.0]
    for reply in replies:
        moments = [reply.begun, *reply.arrivals, *([] if reply.ended else [end])]
        found += [after - before for before, after in itertools.pairwise(moments) if after > begin]
    return max(found)


def tables(result: Result) -> list[Table]:
    columns = ["attacked", "with", "longest pause, s", "cut", "longest admin call, s", "gateway, MB"]
    rows = [list(one.values()) for one in result["attacks"]]
    return [Table("A stream and admin calls beside a hostile connection", columns, rows)]


def checks(result: Result) -> list[Check]:
    attacked = [one for one in result["attacks"] if one["attack"] != _ALONE]
    return [
        Check("longest pause of another's stream, s", [max(one["pause"] for one in attacked)], TARGET),
        Check("streams cut", [sum(one["cut"] for one in attacked)], 0),
        Check("longest admin call, s", [max(one["call"] for one in attacked)], TARGET),
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each attack goes on")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of attacks")
