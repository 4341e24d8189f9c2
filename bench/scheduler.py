"""What scheduling and planning cost, by how much there is to schedule; nothing computes.

The scheduler is the real one, on rings in simulated time, and so is the planner of the coordinator. Times are
of the CPU.
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import median
from typing import Never

from bench.frame import Result, Table, numbers, progress
from bench.simulated_ring import Costs, SimulatedRing
from bench.verdict import Check
from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.planner import plan
from sealring.gateway.metrics import Metrics
from sealring.gateway.rings.ring import Ring
from sealring.gateway.rings.rings import _busy, _draw
from sealring.gateway.scheduler import MemberMemory, Request, RingFacts
from sealring.mesh.member.proof import Identity
from sealring.v1 import admin_pb2, model_pb2
from sealring.v1 import inference_pb2 as inference

COSTS = Costs(step_ms=20.0, token_us=500.0)
CHEAP_PROMPTS = Costs(step_ms=20.0, token_us=1.0)
"""So that as many rows as there is room for are running all the time."""

MEMBER = MemberMemory(1024, 4096, 1 << 40)
ROWS, WAITING = 256, 1000
_LOADED = "scheduler, 1,000 waiting and 256 running, us a step"

QUICK = ("--steps", "500", "--loaded", "1,3", "--queue", "10000")


def submit(ring: SimulatedRing, number: int, tokens: int) -> None:
    ring.submit(Request(f"r{number}", f"k{number % 50}", tokens, inference.Envelope()))


def loaded(stages: int, steps: int) -> Result:
    """A step, with ROWS running and WAITING waiting all the time; answers have 200 to 399 tokens."""
    ring, count, counted = SimulatedRing(stages, ROWS, ROWS + WAITING, CHEAP_PROMPTS), 0, 0
    cpu = made = 0.0
    while counted < steps:
        load = ring.scheduler.load()
        for _ in range(WAITING - load.waiting):
            count += 1
            submit(ring, count, 200 + count * 37 % 200)
        before = (ring.cpu, ring.sampled)
        until = ring.steps + 1
        ring.run(lambda until=until: ring.steps >= until)
        if load.running >= ROWS - 16:
            counted += ring.steps + 1 - until
            cpu, made = cpu + ring.cpu - before[0], made + ring.sampled - before[1]
    return {
        "stages": stages,
        "rows_per_step": round(made / counted, 1),
        "microseconds_per_step": round(cpu / counted * 1e6, 1),
    }


def at_once(stages: int, rows: int, requests: int, tokens: int = 32) -> Result:
    """So many requests at once, with answers of so many tokens in the mean."""
    ring = SimulatedRing(stages, rows, requests, COSTS)
    for number in range(requests):
        submit(ring, number, tokens // 2 + number * 37 % tokens)
    ring.run()
    assert ring.finished == requests, (ring.finished, ring.failed)
    return {
        "stages": stages,
        "rows": rows,
        "requests": requests,
        "rows_per_step": round(ring.sampled / ring.steps, 2),
        "microseconds_per_step": round(ring.cpu / ring.steps * 1e6, 1),
        "microseconds_per_token": round(ring.cpu / ring.sampled * 1e6, 2),
        "simulated_tokens_per_second": round(ring.sampled / ring.now, 1),
        "stages_busy": round(ring.busy / stages / ring.now, 3),
    }


def routing(rings: int) -> Result:
    """Choosing a ring of so many, as gateway.rings does for every request."""

    def unused(*_: object) -> Never:
        raise AssertionError("nobody is called in a simulation")

    metrics, identity = Metrics(), Identity("cluster", "gateway", unused, unused)
    made = [
        Ring(f"ring-{index}", "model", identity=identity, queue_limit=256, metrics=metrics, on_lost=unused)
        for index in range(rings)
    ]
    for ring in made:
        ring.scheduler.attach(RingFacts((MEMBER, MEMBER), 16, 256))
    spent = []
    for _ in range(20):
        begun = time.thread_time()
        min(_draw(made), key=_busy)
        spent.append(time.thread_time() - begun)
    return {"rings": rings, "microseconds": round(median(spent) * 1e6, 1)}


def planning(stages: int, replicas: int) -> Result:
    """The coordinator's plan for so many rings of so many stages."""
    layers = max(stages, 32)
    profile = model_pb2.ModelProfile(
        model_type="llama",
        layers=layers,
        layer_bytes=[1 << 28] * layers,
        embed_bytes=1 << 28,
        head_bytes=1 << 28,
        kv_bytes_per_token=[4096] * layers,
        kv_max_tokens=[0] * layers,
        state_bytes=[0] * layers,
        max_context=8192,
        digest="0" * 64,
    )
    members = [
        Candidate(f"{index:064x}", f"node-{index}", memory_usable=(64 + index % 3 * 32) << 30, trust=10)
        for index in range(stages * replicas)
    ]
    spec = admin_pb2.DeploymentSpec(
        name="simulated", model="simulated", strategy="pipeline", stages=stages, replicas=replicas
    )
    begun = time.perf_counter()
    made = plan(spec, profile, members)
    seconds = time.perf_counter() - begun
    assert len(made.rings) == replicas
    return {"stages": stages, "rings": replicas, "nodes": len(members), "seconds": round(seconds, 3)}


def run(options: argparse.Namespace) -> Result:
    gc.freeze()
    found: Result = {"loaded": [], "queue": [], "stages": [], "routing": [], "planning": []}
    for stages in options.loaded:
        progress(f"{ROWS} rows and {WAITING} waiting on {stages} stages")
        found["loaded"].append(loaded(stages, options.steps))
    for requests in (1000, options.queue):
        progress(f"{requests} requests at once")
        found["queue"].append(at_once(4, 64, requests))
    for stages in (1, 2, 8, 32, 64, 200):
        progress(f"{stages} stages")
        found["stages"].append(at_once(stages, 2 * max(stages, 8), 400))
    progress("choosing a ring and planning")
    found["routing"] = [routing(rings) for rings in (1, 10, 100, 1000)]
    found["planning"] = [planning(*sizes) for sizes in ((2, 10), (2, 500), (20, 10), (200, 5), (1, 1000))]
    return found


def checks(result: Result) -> list[Check]:
    few, many = (one["microseconds_per_step"] for one in result["queue"])
    by_stages = {one["stages"]: one["microseconds_per_step"] for one in result["stages"]}
    return [
        Check(_LOADED, [max(one["microseconds_per_step"] for one in result["loaded"])], 200.0),
        Check("cost a step, longest queue against shortest", [round(many / few, 2)], 1.25),
        Check("cost a step, 64 stages against 8", [round(by_stages[64] / by_stages[8], 2)], 1.25),
    ]


def tables(result: Result) -> list[Table]:
    titles = {
        "loaded": f"{ROWS} rows running, {WAITING} requests waiting",
        "queue": "requests at once",
        "stages": "stages, 400 requests at once",
        "routing": "choosing a ring",
        "planning": "planning",
    }
    return [
        Table(title, list(result[key][0]), [list(one.values()) for one in result[key]])
        for key, title in titles.items()
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loaded", type=numbers, default=[1, 2, 3, 4], help="stages of loaded rings")
    parser.add_argument("--steps", type=int, default=3000, help="measured on each of them")
    parser.add_argument("--queue", type=int, default=100_000, help="requests of the longest queue")
