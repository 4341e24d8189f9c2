"""What a plan says of itself, word by word."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.demand import Demand
from sealring.coordinator.planning.reasons import of_members, reasons
from sealring.coordinator.planning.speeds import Rate
from sealring.v1 import admin_pb2

DEMAND = Demand((100,) * 4, (7,) * 4, 20, 10, False)
HOLDS = "430 bytes of weights and 28 bytes for a sequence of 64 tokens"


def machine(name: str, **more: Any) -> Candidate:
    return Candidate(name, name, 1000, 10, **more)


def told(
    stages: int,
    *,
    asked: Any = None,
    spare: tuple[Candidate, ...] = (),
    trimmable: bool = True,
    wanted: int = 64,
    replicas: int = 1,
    speeds: tuple[int, ...] = (),
    **made: Any,
) -> list[str]:
    rates = [Rate(speed) for speed in speeds] or [None] * stages
    ring = [(machine(f"m{rank}", rate=rate), 4 // stages) for rank, rate in enumerate(rates)]
    others = [[(machine(f"r{number}"), 4)] for number in range(1, replicas)]
    rings = [ring, *others]
    spec = admin_pb2.DeploymentSpec(context=64, replicas=replicas, **made)
    able = [member for one in rings for member, _ in one]
    given = admin_pb2.DeploymentSpec(**(asked or {}))
    return reasons(given, spec, DEMAND, rings, [*able, *spare], wanted, trimmable)


FREE = tuple(machine(name) for name in "abcdef")
BUSY = machine("busy", shares=("other-0",))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"stages": 1}, f"fits on one node: {HOLDS}"),
        ({"stages": 1, "spare": (BUSY,)}, f"fits on one node: {HOLDS}"),
        ({"stages": 1, "spare": FREE[:1]}, f"fits on one node: {HOLDS}; --stages 2 spreads it over 2"),
        ({"stages": 1, "spare": FREE}, f"fits on one node: {HOLDS}; --stages 4 spreads it over 4"),
        ({"stages": 1, "spare": FREE[:1], "replicas": 2}, f"fits on one node: {HOLDS}"),
        (
            {"stages": 1, "spare": FREE[:2], "replicas": 2},
            f"fits on one node: {HOLDS}; --stages 2 spreads it over 2",
        ),
        ({"stages": 1, "asked": {"stages": 1}}, f"1 node for each ring, as asked: {HOLDS}"),
        ({"stages": 2, "asked": {"stages": 2}}, f"2 nodes for each ring, as asked: {HOLDS}"),
        ({"stages": 2, "asked": {"split": [2, 2]}}, f"the split by hand fits: {HOLDS}"),
        ({"stages": 2}, f"2 nodes for each ring, for 1 would not hold it: {HOLDS}"),
    ],
)
def test_how_many_nodes_there_are_and_why(options: dict[str, Any], line: str) -> None:
    assert told(**options) == [line]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"stages": 1, "speculate": True, "trimmable": False},
            "no tokens are guessed: a ring of one node has no stages that are idle meanwhile",
        ),
        (
            {"stages": 2, "speculate": True, "trimmable": False},
            "no tokens are guessed: this model's caches cannot be cut back behind a wrong one",
        ),
        (
            {"stages": 2, "wanted": 65},
            "a context of 64 tokens, for 65 do not fit (--kv-bits 8 or more nodes help)",
        ),
        (
            {"stages": 2, "speeds": (10, 5)},
            "m1 gets 2 layers, for it was seen to be 2.0 times slower than the fastest with this model",
        ),
        (
            {"stages": 4, "speeds": (10, 4, 9, 6)},
            "m1 gets 1 layer, for it was seen to be 2.5 times slower than the fastest with this model",
        ),
    ],
)
def test_what_else_was_chosen_is_told_in_a_line_of_its_own(options: dict[str, Any], line: str) -> None:
    assert told(**options)[1:] == [line]


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "speculate": True},
        {"stages": 2, "trimmable": False},
        {"stages": 1, "trimmable": False},
        {"stages": 2, "speeds": (10, 6)},
        {"stages": 2, "speeds": (10, 5), "asked": {"split": [2, 2]}},
    ],
)
def test_what_was_not_chosen_is_not_told(options: dict[str, Any]) -> None:
    assert len(told(**options)) == 1


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
        f"m also serves one-0 and two-0, and has 400 bytes left: {why}"
    ]


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
