"""One ring as gateways, operators and its members see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.running import RunningRing
from sealring.v1 import admin_pb2
from sealring.v1.membership_pb2 import RingHealth


def ring(**changes: Any) -> RunningRing:
    stages = [
        admin_pb2.StagePlan(member=member, member_name=f"node-{member}", rank=rank, kv_budget=10 * rank)
        for member, rank in (("b", 1), ("a", 0))
    ]
    machine: Any = SimpleNamespace(
        epoch=changes.get("epoch", 0), phase=Phase.SERVING, reason="", links=[], progress={}
    )
    spec = admin_pb2.DeploymentSpec(
        name="demo", model="m", context=64, max_rows=3, prefill_chunk=7, kv_bits=8, backend="ring"
    )
    plan = admin_pb2.RingPlan(ring="r", stages=stages, pipeline=changes.get("pipeline", False))
    return RunningRing(plan, spec, "ab", "llama", machine, 61)


@pytest.mark.parametrize(
    ("member", "drafted", "accepted", "epoch", "told"),
    [
        ("a", 9, 5, 4, (9, 5)),
        ("a", 9, 9, 4, (9, 9)),
        ("a", 9, 10, 4, (0, 0)),
        ("b", 9, 5, 4, (0, 0)),
        ("a", 9, 5, 3, (0, 0)),
    ],
)
def test_the_head_says_how_many_guesses_of_this_epoch_were_right(
    member: str, drafted: int, accepted: int, epoch: int, told: tuple[int, int]
) -> None:
    made = ring(epoch=4)
    made.beaten(member, RingHealth(epoch=epoch, drafted=drafted, accepted=accepted))
    assert (made.status().drafted, made.status().accepted) == told
