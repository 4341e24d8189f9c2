"""Refusals name who cannot serve and why, and the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.refusals import (
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
