"""Refusals name who cannot serve and why, and the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.demand import Demand
from sealring.coordinator.planning.refusals import (
    does_not_fit,
    size,
    split_does_not_fit,
    too_few_nodes,
    usable,
)
from sealring.mesh.errors import FailedPrecondition, NotFound
from sealring.v1 import admin_pb2


def machine(name: str, memory: int = 1000, trust: int = 10, **more: Any) -> Candidate:
    return Candidate(name, name, memory, trust, **more)


def spec(**fields: Any) -> admin_pb2.DeploymentSpec:
    return admin_pb2.DeploymentSpec(**fields)


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1024.0 KiB"),
        (1 << 20, "1.0 MiB"),
        ((1 << 30) - 1, "1024.0 MiB"),
        (1 << 30, "1.0 GiB"),
        (3 << 29, "1.5 GiB"),
    ],
)
def test_bytes_are_told_for_people(count: int, told: str) -> None:
    assert size(count) == told


@pytest.mark.parametrize(
    ("member", "floor", "why"),
    [
        (machine("m", 0, 0, obstacle="it is offline"), 10, "it is offline"),
        (machine("m", trust=0), 0, "its trust level none is below the floor software"),
        (machine("m", trust=10), 20, "its trust level software is below the floor self_signed"),
        (machine("m", memory=0), 0, "it reports no usable memory"),
        (machine("m", shares=("a-0", "b-0"), taken=900), 0, "a-0 and b-0 may take all of its memory"),
    ],
)
def test_who_cannot_serve_is_told_why(member: Candidate, floor: int, why: str) -> None:
    with pytest.raises(FailedPrecondition) as none:
        usable(spec(trust_floor=floor), [member])
    assert none.value.message == f"no node can serve (m: {why})"
    assert (none.value.reason, none.value.metadata["available"]) == ("NOT_ENOUGH_NODES", "0")
    with pytest.raises(FailedPrecondition) as named:
        usable(spec(trust_floor=floor, members=["n", "m"]), [member, machine("n", trust=30)])
    assert named.value.message == f"node m cannot serve: {why}"
    assert named.value.reason == "NODE_NOT_USABLE"
    assert (named.value.metadata["param"], named.value.metadata["member"]) == ("members", "m")


def test_who_can_serve_comes_in_this_order() -> None:
    found = [
        machine("z", trust=1),
        machine("b"),
        machine("a"),
        machine("trusted", trust=20),
        machine("large", 2000),
        machine("fetches", 9000, fetches=True),
        machine("shared", 9000, shares=("o-0",)),
    ]
    able = [one.id for one in usable(spec(), [*found, machine("off", obstacle="it is offline")])]
    assert able == ["large", "trusted", "a", "b", "z", "fetches", "shared"]
    assert [one.id for one in usable(spec(members=["a", "large"]), found)] == ["large", "a"]
    assert [one.id for one in usable(spec(trust_floor=20), found)] == ["trusted"]
    with pytest.raises(NotFound) as caught:
        usable(spec(members=["a", "nobody"]), found)
    assert (caught.value.reason, caught.value.metadata["param"]) == ("UNKNOWN_NODE", "members")
    with pytest.raises(FailedPrecondition, match="no node has joined"):
        usable(spec(), [])


@pytest.mark.parametrize(("count", "told"), [(0, ""), (1, "m0: x"), (8, "m7: x"), (9, "m7: x; and 1 more")])
def test_too_few_nodes_names_up_to_eight_that_cannot(count: int, told: str) -> None:
    others = [machine(f"m{number}", obstacle="x") for number in range(count)]
    able = [machine("a")]
    message = too_few_nodes(spec(), 2, able, [*able, *others]).message
    head = "the deployment needs 2 nodes and 1 can serve"
    first = "; ".join(f"m{number}: x" for number in range(min(count, 8) - 1))
    assert message == head + (f" ({first}{'; ' if first else ''}{told})" if told else "")
    refusal = too_few_nodes(spec(members=["a"]), 2, able, [*able, *others])
    assert refusal.message == head
    assert (refusal.metadata["needed"], refusal.metadata["available"]) == ("2", "1")


DEMAND = Demand((100, 100, 200), (7,) * 3, 20, 10, False)


def test_what_does_not_fit_comes_with_the_numbers() -> None:
    members = [machine("a"), machine("b", shares=("x-0", "y-0"), taken=800)]
    refusal = does_not_fit(DEMAND, 64, members[:1], 1, 1, 0)
    assert refusal.message == (
        "the model needs 451 bytes (430 bytes of weights and 21 bytes for one sequence of 64 tokens) and "
        "1 node has 900 bytes to give, but no cut into layers of up to 207 bytes fits each node"
    )
    assert refusal.hint == "add nodes, or choose a smaller or more quantised model"
    assert {key: refusal.metadata[key] for key in ("needed_bytes", "available_bytes", "largest_context")} == {
        "needed_bytes": "451",
        "available_bytes": "900",
        "largest_context": "0",
    }
    assert (refusal.metadata["headroom_percent"], refusal.metadata["nodes"]) == ("10", "a: 900 bytes")
    several = does_not_fit(DEMAND, 64, members, 3, 1, 32)
    assert several.message.endswith(", times 3 replicas) and 2 nodes have 1000 bytes to give")
    assert several.hint == (
        "a context of 32 tokens fits; or add nodes, or choose a smaller or more quantised model; x-0, y-0 "
        "would leave more with a lower --max-rows or a shorter --context"
    )
    exactly = [machine("a", 1000, taken=900 - 451)]
    assert "no cut" in does_not_fit(DEMAND, 64, exactly, 1, 1, 0).message
    many = [machine(f"m{number}", shares=(f"r{number}-0",)) for number in range(9)]
    shown = does_not_fit(DEMAND, 64, many, 1, 1, 0)
    assert shown.metadata["nodes"] == ", ".join(f"m{number}: 900 bytes" for number in range(8))
    assert "r7-0 would" in shown.hint


def test_a_stage_by_hand_that_does_not_fit_is_named() -> None:
    refusal = split_does_not_fit(machine("a", shares=("x-0",)), 2, 1024, 64, 32)
    assert refusal.message == (
        "stage 2 needs 1.0 KiB with 64 tokens of context and node a has 900 bytes to give"
    )
    assert refusal.hint == (
        "a context of 32 tokens fits; or give this stage fewer layers; x-0 would leave more with a lower "
        "--max-rows or a shorter --context"
    )
    assert {key: refusal.metadata[key] for key in ("param", "rank", "needed_bytes", "largest_context")} == {
        "param": "split",
        "rank": "2",
        "needed_bytes": "1024",
        "largest_context": "32",
    }
