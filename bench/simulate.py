"""The real scheduler and planner against modelled stages and links: how their cost grows, what rings reach.

Nothing computes here. A decode step takes `--step-ms` and `--row-ms` for each of its rows, a prefill step
`--prefill-ms` and `--token-us` for each of its tokens, divided by the number of stages; a link `--link-ms`.
What is real is the scheduler, which is timed, and the planner of the coordinator.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any, Never

from bench import simulate_prefill
from bench.frame import Benchmark, Result, Table, progress
from bench.simulated_ring import SimulatedRing
from bench.verdict import Check
from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.planner import plan
from sealring.gateway.scheduler import MemberMemory, Request, RingFacts
from sealring.v1 import admin_pb2, model_pb2
from sealring.v1 import inference_pb2 as inference


def one_ring(stages: int, rows: int, requests: int, options: argparse.Namespace) -> Result:
    """All requests at once on one ring."""
    ring = SimulatedRing(stages, rows, requests, options)
    for number in range(requests):
        length = options.tokens // 2 + number * 37 % options.tokens
        ring.submit(Request(f"r{number}", f"k{number % 50}", length, inference.Envelope()))
    ring.run()
    assert ring.finished == requests, (ring.finished, ring.failed)
    return {
        "stages": stages,
        "rows": rows,
        "requests": requests,
        "steps": ring.steps,
        "rows_per_step": round(ring.sampled / ring.steps, 2),
        "microseconds_per_step": round(ring.cpu / ring.steps * 1e6, 1),
        "microseconds_per_token": round(ring.cpu / ring.sampled * 1e6, 2),
        "simulated_tokens_per_second": round(ring.sampled / ring.now, 1),
        "stages_busy": round(ring.busy / stages / ring.now, 3),
    }


def drifting(moves: bool, row_ms: float, change_ms: float, options: argparse.Namespace) -> Result:
    """Two of four lanes are left without rows by answers that end early, and nobody comes."""
    varied = argparse.Namespace(**vars(options) | {"row_ms": row_ms, "change_ms": change_ms})
    ring = SimulatedRing(4, 32, 32, varied)
    planner = ring.planner
    if not moves:
        planner._balance.moving = lambda *_: []  # type: ignore[method-assign]
    for number in range(32):
        ring.submit(Request(f"r{number}", "k", 512 if number % 4 < 2 else 64, inference.Envelope()))
    ring.run()
    assert ring.finished == 32
    return {
        "row_ms": row_ms,
        "change_ms": change_ms,
        "moves": "allowed" if moves else "not allowed",
        "moved": ring.moved,
        "simulated_tokens_per_second": round(ring.sampled / ring.now, 1),
        "stages_busy": round(ring.busy / 4 / ring.now, 3),
    }


def in_turn(rows: int, spare: bool, options: argparse.Namespace) -> Result:
    """Three stages that compute the rows of a step one after the other, with a lane for each or one more."""
    varied = argparse.Namespace(**vars(options) | {"row_ms": 40.0, "step_ms": 24.0})
    ring = SimulatedRing(3, rows, rows, varied, rows_in_turn=spare)
    for number in range(rows):
        ring.submit(Request(f"r{number}", "k", 256, inference.Envelope()))
    ring.run()
    assert ring.finished == rows
    return {
        "rows": rows,
        "lanes": ring.lanes,
        "simulated_tokens_per_second": round(ring.sampled / ring.now, 1),
        "stages_busy": round(ring.busy / 3 / ring.now, 3),
    }


def many_rings(rings: int, requests: int, options: argparse.Namespace) -> Result:
    """Requests over rings of two stages, each ring on its own: what the schedulers cost together."""
    cpu = steps = sampled = 0.0
    longest = 0.0
    for index in range(rings):
        ring = SimulatedRing(2, 16, requests, options)
        share = requests // rings + (index < requests % rings)
        for number in range(share):
            ring.submit(Request(f"r{number}", f"k{number % 50}", 16, inference.Envelope()))
        ring.run()
        assert ring.finished == share
        cpu, steps, sampled = cpu + ring.cpu, steps + ring.steps, sampled + ring.sampled
        longest = max(longest, ring.now)
    return {
        "rings": rings,
        "requests": requests,
        "steps": int(steps),
        "scheduler_seconds": round(cpu, 2),
        "microseconds_per_step": round(cpu / steps * 1e6, 1),
        "simulated_seconds": round(longest, 2),
        "simulated_tokens_per_second": round(sampled / longest, 0),
    }


def routing(rings: int) -> Result:
    """Choosing a ring of so many, as gateway.rings does for every request."""
    from sealring.gateway.metrics import Metrics
    from sealring.gateway.rings.ring import Ring
    from sealring.gateway.rings.rings import _busy, _draw
    from sealring.mesh.member.proof import Identity

    def unused(*_: object) -> Never:
        raise AssertionError("nobody is called in a simulation")

    metrics, identity = Metrics(), Identity("cluster", "gateway", unused, unused)
    made = [
        Ring(
            f"ring-{index}",
            "model",
            identity=identity,
            queue_limit=256,
            metrics=metrics,
            on_lost=lambda ring: None,
        )
        for index in range(rings)
    ]
    member = MemberMemory(1024, 4096, 1 << 40)
    for ring in made:
        ring.scheduler.attach(RingFacts((member, member), 16, 256))
    spent = []
    for _ in range(20):
        begun = time.thread_time()
        min(_draw(made), key=_busy)
        spent.append(time.thread_time() - begun)
    return {"rings": rings, "microseconds": round(statistics.median(spent) * 1e6, 1)}


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
        Candidate(
            id=f"{index:064x}",
            name=f"node-{index}",
            memory_usable=(64 + index % 3 * 32) << 30,
            trust=10,
        )
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
    scale = options.scale
    found: Result = {"stages": [], "rows": [], "waiting": [], "rings": [], "routing": [], "planning": []}
    for stages in (1, 2, 4, 8, 16, 32, 64, 128, 200):
        progress(f"{stages} stages")
        found["stages"].append(one_ring(stages, 2 * max(stages, 8), int(2000 * scale), options))
    for rows in (4, 16, 64, 256):
        progress(f"{rows} rows")
        found["rows"].append(one_ring(4, rows, int(2000 * scale), options))
    progress("prefill")
    found |= simulate_prefill.run()
    progress("lanes that drift apart")
    found["drifting"] = [
        drifting(moves, row_ms, change_ms, options)
        for row_ms, change_ms in ((0.0, 20.0), (2.0, 20.0), (10.0, 20.0), (10.0, 2000.0))
        for moves in (False, True)
    ]
    progress("rows that are computed in turn")
    found["in_turn"] = [
        in_turn(rows, spare, options) for rows in (3, 4, 6, 7, 8, 16, 24) for spare in (False, True)
    ]
    for requests in (1000, 10_000, int(100_000 * scale)):
        progress(f"{requests} requests on one ring")
        found["waiting"].append(one_ring(4, 64, requests, options))
    for rings in (1, 10, 100, 1000):
        progress(f"{rings} rings")
        found["rings"].append(many_rings(rings, int(100 * rings * scale), options))
        found["routing"].append(routing(rings))
    for stages, replicas in ((2, 10), (2, 64), (2, 500), (20, 10), (200, 5), (1, 1000)):
        progress(f"planning {replicas} rings of {stages}")
        found["planning"].append(planning(stages, replicas))
    return found


def checks(result: Result) -> list[Check]:
    waiting = result["waiting"]
    growth = waiting[-1]["microseconds_per_step"] / waiting[0]["microseconds_per_step"]
    by_stages = {one["stages"]: one["microseconds_per_step"] for one in result["stages"]}
    deep = by_stages[64] / by_stages[8]
    rows = result["rows"]
    per_token = rows[-1]["microseconds_per_token"] / rows[0]["microseconds_per_token"]
    return [
        Check("cost a step, longest queue against shortest", [round(growth, 2)], 1.25),
        Check("cost a token, most rows a step against fewest (1: linear)", [round(per_token, 2)], 1.25),
        Check("cost a step, 64 stages against 8, as many rows a step", [round(deep, 2)], 1.25),
    ]


def tables(result: Result) -> list[Table]:
    titles = {
        "stages": "stages",
        "rows": "rows, 4 stages",
        "beside": "a long prompt beside streams",
        "crowds": "short prompts all at once",
        "drifting": "32 rows, 4 stages, 2 lanes of which are left without rows",
        "in_turn": "3 stages that compute rows in turn (40 ms each, 24 ms a step), divided by the stages",
        "waiting": "requests waiting, 4 stages, 64 rows",
        "rings": "rings of 2 stages, 16 rows",
        "routing": "choosing a ring",
        "planning": "planning",
    }
    return [
        Table(title, list(result[key][0]), [list(one.values()) for one in result[key]])
        for key, title in titles.items()
    ]


def chart(result: Result, figure: Any) -> None:
    (a, b), (c, d) = figure.subplots(2, 2)
    stages = [one["stages"] for one in result["stages"]]
    a.plot(stages, [one["stages_busy"] for one in result["stages"]], marker="o")
    a.set(xlabel="stages", ylabel="part of time that stages work", ylim=(0, 1))
    b.plot(stages, [one["microseconds_per_step"] for one in result["stages"]], marker="o")
    b.set(xlabel="stages", ylabel="scheduler, us a step")
    waiting = [one["requests"] for one in result["waiting"]]
    c.plot(waiting, [one["microseconds_per_step"] for one in result["waiting"]], marker="o")
    c.set(xlabel="requests", ylabel="scheduler, us a step", xscale="log", ylim=(0, None))
    rows = [one["rows_per_step"] for one in result["rows"]]
    d.plot(rows, [one["microseconds_per_step"] for one in result["rows"]], marker="o")
    d.set(xlabel="rows a step", ylabel="scheduler, us a step", ylim=(0, None))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-ms", type=float, default=20.0, help="a decode step of the whole model")
    parser.add_argument("--token-us", type=float, default=500.0, help="a prompt token of the whole model")
    parser.add_argument("--row-ms", type=float, default=0.0, help="each row of a decode step")
    parser.add_argument("--change-ms", type=float, default=0.0, help="caches copied when rows change")
    parser.add_argument("--prefill-ms", type=float, default=0.0, help="a prefill step beside its tokens")
    parser.add_argument("--link-ms", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=32, help="mean length of answers")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the requests")


BENCHMARK = Benchmark(
    "simulate",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    checks,
    quick=("--scale", "0.1"),
)
