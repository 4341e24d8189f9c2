"""The group of a tensor ring, by one of MLX's backends. A process has one in its life and cannot leave it.

MLX is told by environment variables and a file, as by `mlx.launch` (mlx/_distributed_utils/launch.py).
It waits for the other ranks without a time limit and holds the interpreter: the daemon ends the process.
jaccl was never run: which RDMA device leads to which rank it has from MLX_IBV_DEVICES of the node's own
environment.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence

import mlx.core as mx

from sealring.mesh.errors import EpochEnded
from sealring.node.engine.staging.shards import Group


def form(backend: str, rank: int, addresses: Sequence[str]) -> Group:
    """The group of all ranks at `addresses` (ip:port), once a sum over it is right.

    Raises EpochEnded (NO_GROUP).
    """
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as hosts:
            json.dump([[address] for address in addresses], hosts)
            hosts.flush()
            os.environ.update(environment(backend, rank, addresses, hosts.name))
            group = mx.distributed.init(strict=True, backend=backend)
        total = mx.distributed.all_sum(mx.array(1 << group.rank()), group=group).item()
    except Exception as error:  # whatever MLX or a bad address raises: there is no group
        words = " ".join(str(error).split())[:160]
        raise no_group(backend, words) from error
    if (group.rank(), group.size(), total) != (rank, len(addresses), (1 << len(addresses)) - 1):
        raise no_group(backend, "a sum over it is wrong")
    return group


def environment(backend: str, rank: int, addresses: Sequence[str], hosts: str) -> dict[str, str]:
    """What MLX's `backend` reads; `hosts` names a file with the addresses of every rank."""
    host, _, port = addresses[0].rpartition(":")
    own = {"MLX_RANK": str(rank)}
    if backend == "ring":
        return own | {"MLX_HOSTFILE": hosts}
    if backend == "nccl":
        return own | {"MLX_WORLD_SIZE": str(len(addresses)), "NCCL_HOST_IP": host, "NCCL_PORT": port}
    return own | {"MLX_JACCL_COORDINATOR": addresses[0]}


def no_group(backend: str, why: str) -> EpochEnded:
    return EpochEnded(
        f"MLX's {backend} group did not come up: {why}",
        hint="sealring doctor looks at what it needs; --or-pipeline serves without it",
        reason=EpochEnded.no_group,
    )
