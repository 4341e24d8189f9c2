"""How long tokens stop when a part of a ring of three is killed."""

from __future__ import annotations

import argparse
import asyncio
import time
from itertools import pairwise

from bench.clusters import Deployment, cluster, family, kind
from bench.frame import Result, Table, progress
from bench.models import DEMO
from bench.verdict import Check
from sealring.cli.calls.gateway import inference
from sealring.cli.local.cluster import LocalCluster
from sealring.v1 import inference_pb2

TARGETS = {"carrier": 1.0, "engine": 2.0}
QUICK = ("--rounds", "1")
QUICK_SECONDS = 120.0

_STREAMS = 4
_BEFORE = 50
"""Tokens that every stream has before anything is killed."""

_END = 2
"""The demo model's end of sequence, which no answer is to choose."""


async def run(options: argparse.Namespace) -> Result:
    """Seconds of each round by what was killed and at which rank."""
    pauses: dict[str, list[float]] = {}
    async with cluster([Deployment("demo", DEMO, 3)]) as made:
        for _ in range(options.rounds):
            for part in TARGETS:
                for rank, node in enumerate(made.node_names):
                    seconds = await _kill(made, node, part)
                    progress(f"{part} of {node}: {seconds:.2f} s")
                    pauses.setdefault(f"{part}, rank {rank}", []).append(seconds)
    return {"pauses": pauses}


async def _kill(made: LocalCluster, node: str, part: str) -> float:
    """Kills a part of a node; returns the seconds until every stream has a further token."""
    arrived: list[list[float]] = [[] for _ in range(_STREAMS)]
    begun = asyncio.Barrier(_STREAMS + 1)
    async with asyncio.TaskGroup() as group, inference(made.grpc_address) as client:
        streams = [group.create_task(_read(client.stub, times, begun)) for times in arrived]
        await begun.wait()
        next(one for one in family(made.processes[node]) if kind(one) == part).kill()
        killed = time.monotonic()
        await asyncio.gather(*streams)
    ends = [max(pairwise(times[_BEFORE - 1 :]), key=lambda gap: gap[1] - gap[0])[1] for times in arrived]
    return max(ends) - killed


async def _read(stub: object, times: list[float], begun: asyncio.Barrier) -> None:
    prompt = inference_pb2.Prompt(
        text="The capital of France", sampling=inference_pb2.Sampling(logit_bias={_END: -100})
    )
    envelope = inference_pb2.Envelope(clear=prompt)
    request = inference_pb2.GenerateRequest(model="demo", envelope=envelope, max_tokens=600)
    async for event in stub.Generate(request):  # type: ignore[attr-defined]
        if event.HasField("delta"):
            times.append(time.monotonic())
            if len(times) == _BEFORE:
                await begun.wait()


def tables(result: Result) -> list[Table]:
    rows = [[name, *(f"{one:.2f}" for one in rounds)] for name, rounds in result["pauses"].items()]
    count = max(len(rounds) for rounds in result["pauses"].values())
    columns = ["killed", *(f"round {number}, s" for number in range(1, count + 1))]
    return [Table("From the kill to the next token of every stream", columns, rows)]


def checks(result: Result) -> list[Check]:
    """Each round's worst rank."""
    return [
        Check(
            f"killed {part}: s to the next token",
            [max(ranks) for ranks in zip(*_ranks(result, part), strict=True)],
            target,
        )
        for part, target in TARGETS.items()
    ]


def _ranks(result: Result, part: str) -> list[list[float]]:
    return [rounds for name, rounds in result["pauses"].items() if name.startswith(part)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="kills of each part")
