"""Cost of everything but the model: memory of members, idling, starting.

Each member's memory above its weights, CPU and memory of every process of an idle cluster, and the time from
starting a cluster to its first token on two cores. The gateway's cost per step is measured by `control`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

from bench.clusters import Deployment, can_pin, cluster, family, kind
from bench.frame import Result, Table, progress
from bench.models import by_name
from bench.serve import load
from bench.verdict import Check
from sealring.cli.calls.waiting import find_deployment
from sealring.cli.local.cluster import LocalCluster

_MIB = 1 << 20
_WATCH_SECONDS = 0.5

QUICK = ("--idle-seconds", "10")
QUICK_SECONDS = 90.0


async def run(options: argparse.Namespace) -> Result:
    deployment = Deployment("bench", by_name(options.model), stages=3, spec={"max_rows": 16})
    async with cluster([deployment]) as made:
        progress("using the ring once")
        busiest: dict[str, int] = {}
        watching = asyncio.create_task(_watch(made, busiest))
        await load(made.http_url, "bench", count=16, words=8, max_tokens=16)
        watching.cancel()
        plan = (await find_deployment(made.admin, "bench")).plan
        progress(f"watching it idle for {options.idle_seconds:g} s")
        idle = await _idle(made, options.idle_seconds)
        memory = {name: _own_memory(made.processes[name]) for name in made.node_names}
    # what is left of the KV caches once their rows are gone counts; at the busiest, what is in them as well
    members = [
        {
            "member": one.member_name,
            "memory_mib": round(memory[one.member_name] / _MIB, 1),
            "weights_mib": round(one.weight_bytes / _MIB, 1),
            "above_mib": round((memory[one.member_name] - one.weight_bytes) / _MIB, 1),
            "busiest_mib": round(busiest.get(one.member_name, 0) / _MIB, 1),
        }
        for one in plan.rings[0].stages
    ]
    return {"model": options.model, "start": await _first_token(), "members": members, "idle": idle}


async def _watch(made: LocalCluster, busiest: dict[str, int]) -> None:
    """Notes the most memory that each member has, until it is cancelled."""
    while True:
        for name in made.node_names:
            found = await asyncio.to_thread(_own_memory, made.processes[name])
            busiest[name] = max(busiest.get(name, 0), found)
        await asyncio.sleep(_WATCH_SECONDS)


async def _idle(made: LocalCluster, seconds: float) -> list[dict[str, Any]]:
    """CPU use and memory of every process."""
    processes = [(name, one) for name, pid in made.processes.items() for one in family(pid)]
    before = [sum(one.cpu_times()[:2]) for _, one in processes]
    await asyncio.sleep(seconds)
    found = []
    for (component, process), cpu in zip(processes, before, strict=True):
        spent, memory = sum(process.cpu_times()[:2]) - cpu, process.memory_full_info()
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
        if not hasattr(process, "memory_maps"):  # macOS
            private += process.memory_info().rss
            continue
        for one in process.memory_maps():
            private += one.private_clean + one.private_dirty
            shared[one.path] = max(shared.get(one.path, 0), one.shared_clean + one.shared_dirty)
    return private + sum(shared.values())


async def _first_token() -> Result:
    """Starting everything, deploying and answering, on two cores."""
    progress("starting a cluster on two cores")
    if can_pin():
        os.sched_setaffinity(0, {0, 1})
    begun = time.perf_counter()
    async with cluster([Deployment("bench", by_name("demo"), stages=3)]) as made:
        ready = time.perf_counter() - begun
        replies, _ = await load(made.http_url, "bench", count=1, words=8, max_tokens=8)
    return {"nodes": 3, "to_ready_s": round(ready, 2), "to_first_token_s": round(ready + replies[0].ttft, 2)}


def checks(result: Result) -> list[Check]:
    most = max(one["above_mib"] for one in result["members"])
    return [Check("member memory above weights and KV, MiB", [most], 300)]


def tables(result: Result) -> list[Table]:
    titles = {"members": "memory of members", "idle": "idle", "start": "start on two cores"}
    found = result | {"start": [result["start"]]}
    return [
        Table(title, list(found[key][0]), [list(one.values()) for one in found[key]])
        for key, title in titles.items()
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
