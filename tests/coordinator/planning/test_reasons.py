"""What a plan says of its members. Its other reasons are shown by whole plans (`test_planner.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.demand import Demand
from sealring.coordinator.planning.reasons import of_devices, of_members, reasons
from sealring.coordinator.planning.speeds import Rate
from sealring.v1 import admin_pb2

DEMAND = Demand((100,) * 4, (7,) * 4, 20, 10, False)


def machine(name: str, **more: Any) -> Candidate:
    return Candidate(name, name, 1000, 10, **more)


FREE = tuple(machine(name) for name in "abcdef")
BUSY = machine("busy", shares=("other-0",))


def test_slow_members_and_those_that_serve_others_are_told_up_to_eight() -> None:
    ring = [(machine(f"m{rank}", rate=Rate(1 if rank else 4)), 1) for rank in range(10)]
    many = reasons(
        admin_pb2.DeploymentSpec(stages=10),
        admin_pb2.DeploymentSpec(context=64, replicas=1),
        DEMAND,
        [ring],
        [member for member, _ in ring],
        64,
        True,
    )
    assert [line.split()[0] for line in many] == ["10", *(f"m{rank}" for rank in range(1, 9))]


@pytest.mark.parametrize(
    ("asked", "able", "why"),
    [
        ({"members": ["m"]}, (BUSY, *FREE), "as asked"),
        ({}, (BUSY, FREE[0]), "the free nodes do not hold it"),
        ({}, (BUSY,), "no node is free"),
    ],
)
def test_why_a_node_serves_more_than_one_ring(
    asked: dict[str, Any], able: tuple[Candidate, ...], why: str
) -> None:
    both = machine("m", shares=("one-0", "two-0"), taken=500)
    assert of_members(admin_pb2.DeploymentSpec(**asked), [[(both, 4), (FREE[0], 4)]], able) == [
        f"m also serves one-0 and two-0, and has 400 B left: {why}"
    ]


def test_members_that_compute_on_devices_of_several_kinds_are_told_apart() -> None:
    kinds = {"a": "CPU", "b": "CUDA", "c": "CPU", "d": ""}
    on = {name: machine(name, computes_on=kind) for name, kind in kinds.items()}
    told = ["computed on CPU: a, c; CUDA: b. Answers equal those of one device up to the first near tie"]
    assert list(of_devices([[(one, 4) for one in on.values()]])) == told
    for alike in ("ac", "ad", "d"):
        assert list(of_devices([[(on[name], 4) for name in alike]])) == []


@pytest.mark.parametrize(
    ("count", "told"), [(0, []), (1, ["f0 first"]), (8, ["f7 first"]), (9, ["f7 and 1 more first"])]
)
def test_who_gets_the_model_first_is_told_up_to_eight(count: int, told: list[str]) -> None:
    ring = [(machine(f"f{number}", fetches=True, shares=("o-0",)), 1) for number in range(count)]
    lines = of_members(admin_pb2.DeploymentSpec(), [[*ring, (FREE[0], 1)]], FREE)
    assert lines[min(count, 8) :] == [
        ", ".join(f"f{number}" for number in range(min(count, 8)))
        + one.removeprefix(f"f{min(count, 8) - 1}")
        + " get the model from a node that has it"
        for one in told
    ]
