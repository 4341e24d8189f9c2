"""The ten load scenarios of Layr-Labs/d-inference's benchmark, by name, over sealed requests.

A provider is a ring of one node. Users are fairness keys; each has clients of its own that verify the roster
and seal every prompt. Temperature 0, four sequences at once per ring. The client measures encrypt (choosing
the ring and sealing), ttft and total_e2e. The assertions are about the overhead, encrypt.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from bench.clusters import Deployment, cluster
from bench.frame import Result, Table, progress
from bench.models import SHAPES, random_model, stretched_demo
from bench.sealed import Measured, MeasuredClient
from bench.summaries import summary
from bench.verdict import Check

ROWS = 4
CONTEXT = 8192
HEAVY_MODEL = "2x64"
"""The model for prompts of 10,240 bytes, about 3,000 tokens, of which a CPU prefills only 150 a second with
the demo model. Random weights; every answer has max_tokens."""

SEGMENTS = ("encrypt", "total_e2e", "ttft")
ASSERTIONS = {"encrypt": (5, 50)}
"""Milliseconds: mean and p95 at most."""

QUICK = ("--share", "0.1")
QUICK_SECONDS = 180.0


@dataclass(frozen=True)
class Scenario:
    """`rings` are the rings of each model."""

    name: str
    rings: tuple[int, ...]
    users: int
    requests: int
    concurrency: int
    stream: bool
    max_tokens: int
    queue: int
    prompt_bytes: int = 0

    def shared(self, share: float) -> Scenario:
        """This scenario with a share of its requests, but at least those that its rings run at once."""
        least = min(self.requests, ROWS * sum(self.rings))
        return dataclasses.replace(self, requests=max(least, round(self.requests * share)))


SCENARIOS = (
    Scenario("1-provider-streaming", (1,), 1, 30, 5, True, 64, 100),
    Scenario("1-provider-non-streaming", (1,), 1, 20, 5, False, 64, 100),
    Scenario("7-provider-multi-model", (4, 3), 5, 50, 10, True, 64, 200),
    Scenario("3-provider-high-concurrency", (3,), 10, 60, 20, True, 32, 200),
    Scenario("1-provider-queue-saturation", (1,), 10, 40, 15, True, 32, 200),
    Scenario("3-provider-20-users", (3,), 20, 60, 10, True, 32, 200),
    Scenario("1-provider-scaling", (1,), 5, 30, 10, True, 32, 200),
    Scenario("3-provider-scaling", (3,), 5, 30, 10, True, 32, 200),
    Scenario("5-provider-scaling", (5,), 5, 30, 10, True, 32, 200),
    Scenario("3-provider-heavy-100conc-10kb", (3,), 20, 100, 100, True, 32, 200, 10_240),
)


def prompt(number: int, size: int) -> str:
    """The question, behind filler up to `size` bytes."""
    question = f"What is {number}+{number + 1}? Answer with just the number."
    filler = "The quick brown fox jumps over the lazy dog. "
    return (filler * (size // len(filler) + 1))[: max(0, size - len(question))] + question


async def run(options: argparse.Namespace) -> Result:
    wanted = [one.shared(options.share) for one in SCENARIOS if not options.only or one.name in options.only]
    results: dict[str, Result] = {}
    for place in dict.fromkeys(map(_place, wanted)):
        results |= await _on_one_cluster([one for one in wanted if _place(one) == place])
    return {"scenarios": [results[one.name] for one in wanted]}


def _place(scenario: Scenario) -> tuple[object, ...]:
    return (scenario.rings, scenario.queue, scenario.prompt_bytes > 0)


async def _on_one_cluster(scenarios: list[Scenario]) -> dict[str, Result]:
    """Scenarios over the same rings and queue share a cluster, one after the other."""
    heavy = scenarios[0].prompt_bytes > 0
    model = random_model(SHAPES[HEAVY_MODEL]) if heavy else stretched_demo(CONTEXT)
    base = HEAVY_MODEL if heavy else "demo"
    names = [f"{base}-{'ab'[index]}" for index in range(len(scenarios[0].rings))]
    deployments = [
        Deployment(name, model, replicas=rings, spec={"max_rows": ROWS, "context": CONTEXT})
        for name, rings in zip(names, scenarios[0].rings, strict=True)
    ]
    found: dict[str, Result] = {}
    async with cluster(deployments, gateway={"queue_limit": scenarios[0].queue}) as made:
        pin = json.loads((made.operator_bundle / "member.json").read_text())["root_sha256"]
        for scenario in scenarios:
            progress(scenario.name)
            found[scenario.name] = await _run(scenario, names, made.grpc_address, pin)
    return found


async def _run(scenario: Scenario, models: list[str], gateway: str, pin: str) -> Result:
    limit = asyncio.Semaphore(scenario.concurrency)
    idle: dict[int, list[MeasuredClient]] = {user: [] for user in range(scenario.users)}
    clients: list[MeasuredClient] = []

    def client(user: int) -> MeasuredClient:
        if idle[user]:
            return idle[user].pop()
        clients.append(MeasuredClient(gateway, root_sha256=pin, user=f"user-{user}"))
        return clients[-1]

    async def one(number: int) -> Measured:
        user = number % scenario.users
        async with limit:
            mine = client(user)
            try:
                return await mine.measure(
                    prompt(number, scenario.prompt_bytes),
                    model=models[number % len(models)],
                    max_tokens=scenario.max_tokens,
                    stream=scenario.stream,
                )
            finally:
                idle[user].append(mine)

    begun = time.perf_counter()
    measured = await asyncio.gather(*(one(number) for number in range(scenario.requests)))
    seconds = time.perf_counter() - begun
    await asyncio.gather(*(each.close() for each in clients))
    return judged(scenario, models, list(measured), seconds)


def judged(scenario: Scenario, models: list[str], measured: list[Measured], seconds: float) -> Result:
    good = [one for one in measured if one.completion is not None]
    segments = {
        name: summary([one.segments[name] * 1e3 for one in good if name in one.segments]) for name in SEGMENTS
    }
    tokens = sum(one.completion.usage.completion_tokens for one in good if one.completion)
    assertions = [
        _assertion(name, key, segments[name].get(key), limit)
        for name, limits in ASSERTIONS.items()
        for key, limit in zip(("mean", "p95"), limits, strict=True)
    ]
    return {
        "scenario": scenario.name,
        "models": models,
        "rings": sum(scenario.rings),
        "users": scenario.users,
        "requests": len(measured),
        "succeeded": len(good),
        "failed": len(measured) - len(good),
        "errors": dict(Counter(one.error for one in measured if one.error)),
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(good) / seconds, 2),
        "completion_tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "segments_ms": segments,
        "assertions": assertions,
        "passed": len(good) == len(measured) and all(one["passed"] for one in assertions),
    }


def _assertion(segment: str, key: str, value: float | None, limit: float) -> dict[str, Any]:
    """A segment without data fails."""
    return {
        "assertion": f"{segment}:{key}<={limit}ms",
        "value_ms": value,
        "passed": value is not None and value <= limit,
    }


def checks(result: Result) -> list[Check]:
    """The tables say which scenario and which assertion."""
    found = result["scenarios"]
    broken = sum(not each["passed"] for one in found for each in one["assertions"])
    return [
        Check("scenarios: failed requests", [sum(one["failed"] for one in found)], 0),
        Check("scenarios: assertions that do not hold", [broken], 0),
    ]


def tables(result: Result) -> list[Table]:
    keys = ("scenario", "rings", "users", "requests", "succeeded", "failed", "seconds")
    keys += ("requests_per_second", "tokens_per_second", "passed")
    rows = [[one[key] for key in keys] for one in result["scenarios"]]
    found = [Table("scenarios", keys, rows)]
    for one in result["scenarios"]:
        parts = ("count", "mean", "p50", "p95", "max")
        rows = [[name, *(stats.get(key, "") for key in parts)] for name, stats in one["segments_ms"].items()]
        found.append(Table(f"{one['scenario']} ({', '.join(one['models'])}), ms", ["segment", *parts], rows))
        broken = [each for each in one["assertions"] if not each["passed"]]
        if broken:
            shown = [[each["assertion"], each["value_ms"]] for each in broken]
            found.append(Table("assertions that do not hold", ["assertion", "measured ms"], shown))
    return found


def share_of(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError("not above 0 and at most 1")
    return share


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--share", type=share_of, default=1.0, help="of each scenario's requests")
    parser.add_argument("--only", action="append", choices=[one.name for one in SCENARIOS], default=[])
