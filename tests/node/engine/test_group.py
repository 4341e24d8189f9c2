"""The settings that MLX gets for a group over jaccl, which cannot be formed here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from sealring.mesh.errors import EpochEnded
from sealring.node.engine.group import form
from sealring.v1.engine_pb2 import JoinGroup

COMMAND = JoinGroup(
    backend="jaccl",
    rank=1,
    addresses=["10.0.0.1:7000", "10.0.0.2:7001", "10.0.0.3:7002"],
    rdma_devices=["rdma_en2", "", "rdma_en4"],
)


def test_a_machine_without_rdma_says_so() -> None:
    with pytest.raises(EpochEnded, match="finds no RDMA library") as caught:
        form(COMMAND)
    assert caught.value.reason == "NO_GROUP"


def test_jaccl_gets_the_devices_of_this_rank_in_a_matrix_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is a mesh to it only where every pair has a device, and of that it opens its own row."""
    given: dict[str, Any] = {}

    def init(**options: Any) -> None:
        variables = ("MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR")
        given.update(options, environment=[os.environ[name] for name in variables])
        given["matrix"] = json.loads(Path(os.environ["MLX_IBV_DEVICES"]).read_text())
        raise RuntimeError("no group")

    for name in ("MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"):
        monkeypatch.setenv(name, "")  # put back as they were, at the end
    monkeypatch.setattr(mx.distributed, "is_available", lambda backend: backend == "jaccl")
    monkeypatch.setattr(mx.distributed, "init", init)
    with pytest.raises(EpochEnded, match="no group"):
        form(COMMAND)
    assert (given["backend"], given["strict"]) == ("jaccl", True)
    assert (given["environment"][0], given["environment"][2]) == ("1", "10.0.0.1:7000")
    matrix = given["matrix"]
    assert matrix[1] == ["rdma_en2", None, "rdma_en4"]
    assert all((matrix[at][to] is None) == (at == to) for at in range(3) for to in range(3))
