"""The group of a tensor ring, by one of MLX's backends. A process has one in its life and cannot leave it.

MLX reads environment variables and a file, which `mlx.launch` sets too (mlx/_distributed_utils/launch.py).
It waits for the other ranks without a time limit and holds the interpreter: the daemon ends the process.
jaccl was never run. It takes its devices from a matrix of all ranks, of which a rank uses only its own row
(mlx/distributed/jaccl/lib/jaccl/jaccl.cpp): the others' are filled in with a name that is no device's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence

import mlx.core as mx

from sealring.mesh.errors import EpochEnded
from sealring.mesh.ring.limits import JACCL
from sealring.node.engine.staging.shards import Group
from sealring.v1.engine_pb2 import JoinGroup

LACKING = {JACCL: "MLX finds no RDMA library: macOS 26.2 or later on Apple silicon has it"}
_ELSEWHERE = "rdma_elsewhere"


def form(command: JoinGroup) -> Group:
    """The group of all ranks, once a sum over it is right. Raises EpochEnded (NO_GROUP)."""
    backend, rank, addresses = command.backend, command.rank, command.addresses
    if not mx.distributed.is_available(backend):
        raise no_group(backend, LACKING.get(backend, "MLX was built without it"))
    jaccl = backend == JACCL
    content = device_matrix(rank, command.rdma_devices) if jaccl else [[one] for one in addresses]
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(content, file)
            file.flush()
            os.environ.update(environment(backend, rank, addresses, file.name))
            group = mx.distributed.init(strict=True, backend=backend)
        total = mx.distributed.all_sum(mx.array(1 << group.rank()), group=group).item()
    except Exception as error:  # whatever MLX or a bad address raises: there is no group
        words = " ".join(str(error).split())[:160]
        raise no_group(backend, words) from error
    if (group.rank(), group.size(), total) != (rank, len(addresses), (1 << len(addresses)) - 1):
        raise no_group(backend, "a sum over it is wrong")
    return group


def device_matrix(rank: int, devices: Sequence[str]) -> list[list[str | None]]:
    """The device that leads from each rank to each other; `devices` is the row of this rank."""
    ranks = range(len(devices))
    return [[None if at == to else devices[to] if at == rank else _ELSEWHERE for to in ranks] for at in ranks]


def environment(backend: str, rank: int, addresses: Sequence[str], file: str) -> dict[str, str]:
    """The variables of MLX's `backend`; `file` has every rank's address, or jaccl's matrix of devices."""
    host, _, port = addresses[0].rpartition(":")
    own = {"MLX_RANK": str(rank)}
    if backend == "ring":
        return own | {"MLX_HOSTFILE": file}
    if backend == "nccl":
        return own | {"MLX_WORLD_SIZE": str(len(addresses)), "NCCL_HOST_IP": host, "NCCL_PORT": port}
    return own | {"MLX_IBV_DEVICES": file, "MLX_JACCL_COORDINATOR": addresses[0]}


def no_group(backend: str, why: str) -> EpochEnded:
    return EpochEnded(
        f"MLX's {backend} group did not come up: {why}",
        hint="sealring doctor looks at what it needs; --or-pipeline serves without it",
        reason=EpochEnded.no_group,
    )
