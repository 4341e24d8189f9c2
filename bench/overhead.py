"""What everything but the model costs: gateway, memory, idling, starting.

The gateway's use of a core at 300 lane steps a second and three members (as `control`), each member's memory
above its weights, CPU and memory of every process of an idle cluster, and the time from starting a cluster to
its first token on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench import control
from bench.clusters import Deployment, can_pin, cluster, family, kind
from bench.frame import Benchmark, Result, Table, find, parse, progress
from bench.models import by_name
from bench.serve import load
from bench.verdict import Check
from sealring.cli.local.cluster import LocalCluster

_MIB = 1 << 20
_WATCH_SECONDS = 0.5


def run(options: argparse.Namespace) -> Result:
    progress("gateway at 300 lane steps a second")
    seconds = str(options.gateway_seconds)
    gateway = control.run(parse(find("control"), ["--rows", "3", "24", "--seconds", seconds]))
    first = asyncio.run(_first_token(options))
    return {"gateway": gateway, "start": first, **asyncio.run(_cluster(options))}


async def _cluster(options: argparse.Namespace) -> Result:
    model = by_name(options.model)
    deployment = Deployment("bench", model, stages=3, spec={"max_rows": 16})
    async with cluster([deployment]) as made:
        progress("using the ring once")
        busiest: dict[str, int] = {}
        watching = asyncio.create_task(_watch(made, busiest))
        await load(made.http_url, "bench", count=16, rate=float("inf"), words=8, max_tokens=16)
        watching.cancel()
        plan = (await _deployment(made)).plan
        progress(f"watching it idle for {options.idle_seconds:g} s")
        idle = await _idle(made, options.idle_seconds)
        memory = {name: _own_memory(made.processes[name]) / _MIB for name in made.node_names}
    # what is left of the KV caches once their rows are gone counts; at the busiest, what is in them as well
    members = []
    for stage in plan.rings[0].stages:
        used = memory[stage.member_name]
        weights = stage.weight_bytes / _MIB
        members.append(
            {
                "member": stage.member_name,
                "memory_mib": round(used, 1),
                "weights_mib": round(weights, 1),
                "above_mib": round(used - weights, 1),
                "busiest_mib": round(busiest.get(stage.member_name, 0) / _MIB, 1),
            }
        )
    return {"model": options.model, "members": members, "idle": idle, "idle_seconds": options.idle_seconds}


async def _watch(made: LocalCluster, busiest: dict[str, int]) -> None:
    """Notes the most memory that each member has, until it is cancelled."""
    while True:
        for name in made.node_names:
            found = await asyncio.to_thread(_own_memory, made.processes[name])
            busiest[name] = max(busiest.get(name, 0), found)
        await asyncio.sleep(_WATCH_SECONDS)


async def _deployment(made: LocalCluster) -> Any:
    from sealring.cli.calls.waiting import find_deployment

    return await find_deployment(made.admin, "bench")


async def _idle(made: LocalCluster, seconds: float) -> list[dict[str, Any]]:
    """CPU use and memory of every process."""
    before = {}
    for component, pid in made.processes.items():
        for process in family(pid):
            before[process.pid] = (component, process, sum(process.cpu_times()[:2]))
    await asyncio.sleep(seconds)
    found = []
    for component, process, cpu in before.values():
        try:
            spent = sum(process.cpu_times()[:2]) - cpu
            memory = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        found.append(
            {
                "component": component,
                "process": kind(process),
                "cpu_percent": round(spent / seconds * 100, 2),
                "rss_mib": round(memory.rss / _MIB, 1),
                "uss_mib": round(memory.uss / _MIB, 1),
            }
        )
    return found


def _own_memory(pid: int) -> int:
    """Bytes of a member's processes together; what they share with each other (libraries) counts once."""
    private = 0
    shared: dict[str, int] = {}
    for process in family(pid):
        smaps = Path(f"/proc/{process.pid}/smaps")
        if not smaps.exists():
            private += process.memory_info().rss
            continue
        for mapping, common, own in _mappings(smaps.read_text()):
            private += own
            shared[mapping] = max(shared.get(mapping, 0), common)
    return private + sum(shared.values())


def _mappings(smaps: str) -> Iterator[tuple[str, int, int]]:
    """(file and place in it, bytes shared, bytes private) of each mapping of a Linux process."""
    name, common, own = "", 0, 0
    for line in smaps.splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            yield name, common, own
            name, common, own = rest, 0, 0
        elif first.startswith("Shared_") and "Hugetlb" not in first:
            common += int(rest.split()[0]) * 1024
        elif first.startswith("Private_") and "Hugetlb" not in first:
            own += int(rest.split()[0]) * 1024
    yield name, common, own


async def _first_token(options: argparse.Namespace) -> Result:
    """Starting everything, deploying and answering, on two cores."""
    allowed = os.sched_getaffinity(0) if can_pin() else set()
    if can_pin():
        os.sched_setaffinity(0, {0, 1})
    progress("starting a cluster on two cores")
    try:
        begun = time.perf_counter()
        async with cluster([Deployment("bench", by_name("demo"), stages=3)]) as made:
            ready = time.perf_counter()
            replies, _ = await load(made.http_url, "bench", count=1, rate=float("inf"), words=8, max_tokens=8)
    finally:
        if can_pin():
            os.sched_setaffinity(0, allowed)
    return {
        "nodes": 3,
        "to_ready_s": round(ready - begun, 2),
        "to_first_token_s": round(ready - begun + replies[0].ttft, 2),
    }


def checks(result: Result) -> list[Check]:
    return [
        *control.checks(result["gateway"]),
        Check(
            "member memory above weights and KV, MiB",
            [max(one["above_mib"] for one in result["members"])],
            300,
        ),
    ]


def tables(result: Result) -> list[Table]:
    members = result["members"]
    keys = ("component", "process", "cpu_percent", "rss_mib", "uss_mib")
    return [
        *find("control").tables(result["gateway"]),
        Table("memory of members", list(members[0]), [list(one.values()) for one in members]),
        Table(
            f"idle for {result['idle_seconds']:g} s",
            ["component", "process", "CPU %", "rss MiB", "uss MiB"],
            [[one[key] for key in keys] for one in result["idle"]],
        ),
        Table(
            "start on two cores, 3 nodes",
            ["to ready, s", "to first token, s"],
            [[result["start"]["to_ready_s"], result["start"]["to_first_token_s"]]],
        ),
    ]


def chart(result: Result, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    names = [f"{one['component']} {one['process']}" for one in result["idle"]]
    left.barh(names, [one["uss_mib"] for one in result["idle"]])
    left.set_xlabel("MiB of its own")
    right.barh(names, [one["cpu_percent"] for one in result["idle"]], color="tab:orange")
    right.set_xlabel("CPU %, idle")
    right.set_yticks([])
    for axes in (left, right):
        axes.invert_yaxis()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--gateway-seconds", type=float, default=10.0)


BENCHMARK = Benchmark(
    "overhead",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    checks,
    quick=("--idle-seconds", "10", "--gateway-seconds", "5"),
    quick_seconds=90,
)
