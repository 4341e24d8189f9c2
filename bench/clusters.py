"""Local clusters for benchmarks: real processes on loopback, several deployments, pinned to cores."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench.frame import progress
from bench.openai_client import LOOK_SECONDS, ask
from sealring.cli.calls.gateway import inference
from sealring.cli.calls.waiting import wait_until_serving
from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.errors import DeadlineExceeded
from sealring.v1 import inference_pb2

_SECONDS = 300.0


@dataclass(frozen=True)
class Deployment:
    """A deployment to create in a cluster; `spec` are further fields of DeploymentSpec."""

    name: str
    model: Path
    stages: int = 1
    replicas: int = 1
    spec: dict[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def cluster(
    deployments: Sequence[Deployment],
    *,
    gateway: dict[str, Any] | None = None,
    node: dict[str, Any] | None = None,
    gpus: int = 0,
) -> AsyncIterator[LocalCluster]:
    """A cluster with exactly the nodes that the deployments need, all of their rings serving.

    `gateway` and `node` are settings of them; with `gpus`, node n computes on GPU n modulo that.

    Raises DeadlineExceeded.
    """
    nodes = sum(one.stages * one.replicas for one in deployments)
    unlimited = {
        "key_requests_per_second": 1e6,
        "peer_requests_per_second": 1e6,
        "key_requests_at_once": 100_000,
    }
    settings = {"gateway": unlimited | (gateway or {}), "node": node or {}}
    with tempfile.TemporaryDirectory(prefix="sealring-bench-") as folder:
        made = LocalCluster(Path(folder), deployments[0].model, nodes=nodes, settings=settings, gpus=gpus)
        async with made:
            await made.start()
            for one in deployments:
                progress(f"deploying {one.name}: {one.replicas} rings of {one.stages}")
                sizes = {"stages": one.stages, "replicas": one.replicas, **one.spec}
                spec = {"name": one.name, "model": str(one.model), "strategy": "pipeline", **sizes}
                await made.admin.call("CreateDeployment", spec=spec, seconds=_SECONDS)
                await wait_until_serving(made.admin, one.name, seconds=_SECONDS)
            await _wait_for_gateway(made, {one.name: one.replicas for one in deployments})
            yield made


async def _wait_for_gateway(made: LocalCluster, rings: dict[str, int]) -> None:
    """Returns once the gateway offers these numbers of rings by model. Raises DeadlineExceeded."""
    async with inference(made.grpc_address) as client:
        for _ in range(600):
            answer = await client.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)
            if {model.name: model.rings for model in answer.models} == rings:
                return
            await asyncio.sleep(0.1)
    raise DeadlineExceeded("the gateway did not offer all rings", reason="GATEWAY_NOT_READY")


async def restarted(made: LocalCluster, model: str) -> None:
    """Ends every process of a cluster and starts them again; returns when the model answers.

    Raises DeadlineExceeded.
    """
    for name in ("gateway", *made.node_names, "coordinator"):
        await made.children.stop_one(name)
    for name in ("coordinator", *made.node_names, "gateway"):
        await made.start_one(name)
    await answering(made, model)


async def answering(made: LocalCluster, model: str) -> None:
    """Returns when the model answers. Raises DeadlineExceeded."""
    body = {"model": model, "messages": [{"role": "user", "content": "ring"}], "max_tokens": 1}
    until = time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        if (await ask(made.http_url, body, seconds=_SECONDS)).ok:
            return
        await asyncio.sleep(LOOK_SECONDS)
    raise DeadlineExceeded("no answer came after a restart", reason="BENCH_FAILED")


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def kind(process: psutil.Process) -> str:
    """What a process of a node is."""
    command = " ".join(process.cmdline())
    for name in ("engine", "carrier"):
        if f"node.{name}.main" in command or f"bench/paced/{name}.py" in command:
            return name
    return "daemon"


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """CPU time of the processes that still run, since their start."""
    spent = 0.0
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            spent += sum(one.cpu_times()[:2])
    return spent


def pin(pid: int, cores: Iterable[int]) -> None:
    """Puts every thread of a process, and of all that descend from it, on these cores (Linux only)."""
    if not can_pin():
        return
    chosen = set(cores)
    for process in family(pid):
        for thread in process.threads():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, chosen)


def pin_cluster(made: LocalCluster, cores: Sequence[int], rest: Sequence[int]) -> None:
    """Each node, with its engine and carrier, on a core in turn, a lone one on all; all else on `rest`."""
    names = made.node_names
    for name, pid in made.processes.items():
        own = [cores[names.index(name) % len(cores)]] if name in names else rest
        pin(pid, cores if names == [name] else own)


@asynccontextmanager
async def rings(
    model: Path, stages: Sequence[int], *, spec: dict[str, Any], gpus: int = 0
) -> AsyncIterator[dict[int, LocalCluster]]:
    """A ring of each of these numbers of stages, all up at once, deployed as "bench".

    Stage r of every ring, with its daemon, engine and carrier, is on core r; gateways, coordinators and this
    process are on the other cores (Linux only), so that other load on the machine hits all rings alike. With
    `gpus` nothing is tied to cores.
    """
    rest = cores_after(max(stages))
    async with AsyncExitStack() as stack:
        made = {}
        for count in stages:
            deployment = Deployment("bench", model, stages=count, spec=spec)
            made[count] = await stack.enter_async_context(cluster([deployment], gpus=gpus))
            if not gpus:
                pin_cluster(made[count], range(min(count, os.cpu_count() or 1)), rest)
        if can_pin() and not gpus:
            os.sched_setaffinity(0, rest)
        yield made


def cores_after(taken: int) -> list[int]:
    """The cores after the first `taken`, or the last core if none is left."""
    cores = os.cpu_count() or 1
    return list(range(taken, cores)) or [cores - 1]


def can_pin() -> bool:
    """Whether this system can pin processes to cores (Linux)."""
    return hasattr(os, "sched_setaffinity")
