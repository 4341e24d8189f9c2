"""Local clusters for benchmarks: real processes on loopback, several deployments, pinned to cores."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench.frame import progress
from sealring.cli.calls.client import inference
from sealring.cli.calls.waiting import wait_until_serving
from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.errors import DeadlineExceeded
from sealring.v1 import admin_pb2, inference_pb2

_SECONDS = 300.0


@dataclass(frozen=True)
class Deployment:
    """What one deployment of a cluster is to be; `spec` are further fields of DeploymentSpec."""

    name: str
    model: Path
    stages: int = 1
    replicas: int = 1
    spec: dict[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def cluster(
    deployments: Sequence[Deployment],
    *,
    settings: dict[str, dict[str, Any]] | None = None,
    spare_nodes: int = 0,
    gpus: int = 0,
) -> AsyncIterator[LocalCluster]:
    """A cluster with exactly the nodes that the deployments need, all of their rings serving.

    With `gpus`, node n computes on GPU n modulo that.
    """
    nodes = sum(one.stages * one.replicas for one in deployments) + spare_nodes
    gateway = {
        "key_requests_per_second": 1e6,
        "peer_requests_per_second": 1e6,
        "key_requests_at_once": 100_000,
        **(settings or {}).get("gateway", {}),
    }
    merged = {**(settings or {}), "gateway": gateway}
    with tempfile.TemporaryDirectory(prefix="sealring-bench-") as folder:
        made = LocalCluster(Path(folder), deployments[0].model, nodes=nodes, settings=merged, gpus=gpus)
        async with made:
            await made.start()
            for one in deployments:
                await _deploy(made, one)
            await wait_for_rings(made, {one.name: one.replicas for one in deployments})
            yield made


async def _deploy(made: LocalCluster, wanted: Deployment) -> None:
    progress(f"deploying {wanted.name}: {wanted.replicas} rings of {wanted.stages}")
    spec = admin_pb2.DeploymentSpec(
        name=wanted.name,
        model=str(wanted.model),
        strategy="pipeline",
        stages=wanted.stages,
        replicas=wanted.replicas,
        **wanted.spec,
    )
    await made.admin.call("CreateDeployment", admin_pb2.CreateDeploymentRequest(spec=spec), seconds=_SECONDS)
    await wait_until_serving(made.admin, wanted.name, seconds=_SECONDS)


async def wait_for_rings(made: LocalCluster, wanted: dict[str, int]) -> None:
    """Returns once the gateway offers so many rings of each model. Raises DeadlineExceeded."""
    async with inference(made.grpc_address) as client:
        for _ in range(600):
            answer = await client.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)
            if {model.name: model.rings for model in answer.models} == wanted:
                return
            await asyncio.sleep(0.1)
    raise DeadlineExceeded("the gateway did not offer all rings", reason="GATEWAY_NOT_READY")


def root_sha256(made: LocalCluster) -> str:
    """What a client pins."""
    return str(json.loads((made.operator_bundle / "member.json").read_text())["root_sha256"])


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def kind(process: psutil.Process) -> str:
    """What a process of a node is."""
    command = " ".join(process.cmdline())
    for name in ("engine", "carrier"):
        if f"node.{name}.main" in command:
            return name
    return "daemon"


class Meter:
    """The CPU time of a cluster's processes, by what they are."""

    def __init__(self, made: LocalCluster) -> None:
        self._processes = {
            name: {one.pid: (_role(name, one), one) for one in family(pid)}
            for name, pid in made.processes.items()
        }
        self._samples: list[tuple[float, dict[str, float]]] = []

    def sample(self) -> None:
        """Notes the seconds that each has used."""
        used: dict[str, float] = {}
        for processes in self._processes.values():
            for role, process in processes.values():
                times = process.cpu_times()
                used[role] = used.get(role, 0.0) + times.user + times.system
        self._samples.append((time.perf_counter(), used))

    def cores(self, begin: float, end: float) -> dict[str, float]:
        """Cores that each was using between the samples next inside of two moments of time.perf_counter."""
        inside = [one for one in self._samples if begin <= one[0] <= end]
        if len(inside) < 2:
            return {}
        (first, before), (last, after) = inside[0], inside[-1]
        return {role: round((after[role] - before[role]) / (last - first), 3) for role in after}


def _role(name: str, process: psutil.Process) -> str:
    return name if kind(process) == "daemon" else f"{name} {kind(process)}"


def pin(pid: int, cores: Iterable[int]) -> None:
    """Puts every thread of a process, and of all that descend from it, on these cores (Linux only)."""
    if not hasattr(os, "sched_setaffinity"):
        return
    chosen = set(cores)
    for process in family(pid):
        for thread in process.threads():
            try:
                os.sched_setaffinity(thread.id, chosen)
            except ProcessLookupError:
                continue


def pin_stages(made: LocalCluster, cores: Sequence[int], rest: Sequence[int]) -> None:
    """Each node with its engine and carrier on one core, in turn; gateway and coordinator on `rest`."""
    for index, name in enumerate(made.node_names):
        pin(made.processes[name], [cores[index % len(cores)]])
    for name in ("gateway", "coordinator"):
        pin(made.processes[name], rest)


def can_pin() -> bool:
    """Whether this system can (Linux)."""
    return hasattr(os, "sched_setaffinity")
