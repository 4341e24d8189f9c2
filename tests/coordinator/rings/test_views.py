"""The state of rings as gateways and operators see it."""

from __future__ import annotations

from typing import Any

import pytest
from ringtables import Machine, table

from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.state import Known, State, Wanted
from sealring.coordinator.rings.views import RingViews
from sealring.coordinator.store import StoredDeployment, StoredRoster
from sealring.mesh.errors import FailedPrecondition, InvalidInput, NotFound
from sealring.v1 import admin_pb2, membership_pb2, model_pb2


def views(rings: State) -> RingViews:
    return RingViews(rings)


def test_a_ring_is_named_unless_it_is_the_only_one() -> None:
    rings = table(r=Machine())
    made = views(rings)
    assert made.serving("") is made.serving("r") is rings.running["r"]
    with pytest.raises(NotFound, match="no ring 'other'"):
        made.serving("other")
    with pytest.raises(NotFound) as caught:
        made.serving("x" * 65)
    assert repr("x" * 64) in caught.value.message
    with pytest.raises(NotFound, match="there is no ring"):
        views(table()).serving("")
    with pytest.raises(InvalidInput):
        views(table(a=Machine(), b=Machine())).serving("")
    many = views(table(**{f"r{number}": Machine() for number in range(9)}))
    assert many.serving("r3")
    with pytest.raises(InvalidInput) as which:
        many.serving("")
    assert which.value.reason == "WHICH_RING"
    assert which.value.hint == "name one of: " + ", ".join(f"r{number}" for number in range(8))
    for phase in Phase:
        if phase is not Phase.SERVING:
            with pytest.raises(FailedPrecondition):
                views(table(r=Machine(phase))).serving("r")


def test_files_of_a_model_that_is_served_have_changed() -> None:
    planned, other = bytes.fromhex("abcd"), bytes(2)
    serving = views(table(r=Machine()))
    assert serving.model_changed("a", [other])
    for stated in ([], [planned], [planned, other]):
        assert not serving.model_changed("a", stated), "it serves others, or none when it was asked"
    assert not serving.model_changed("b", [other])
    rings = table(r=Machine(), s=Machine())
    both = views(rings)
    rings.running["s"].deployment.profile.digest = other.hex()
    for stated in ([], [planned], [planned, other]):
        assert not both.model_changed("a", stated)
    assert both.model_changed("a", [planned, planned]), "the files of one became those of the other"
    rings.running["s"].deployment.profile.digest = planned.hex()
    assert not both.model_changed("a", [planned, planned]), "two deployments of one model"
    assert not views(table(r=Machine(Phase.PREPARING))).model_changed("a", [other])


@pytest.mark.parametrize(("replace_after", "patience"), [(1, 31), (31.5, 61), (300, 330), (1000, 330)])
def test_requests_wait_until_a_silent_member_is_replaced_and_no_longer(
    replace_after: float, patience: int
) -> None:
    assert table(replace_after=replace_after).patience == patience


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({}, ""),
        ({"member": None}, "was evicted"),
        ({"draining": 5}, "is draining"),
        ({"refusal": "it is late"}, "is not trusted: it is late"),
        ({"trust": 10}, "has trust level software, below the floor self_signed"),
    ],
)
def test_a_parked_ring_names_the_members_that_keep_it_out(changes: dict[str, Any], obstacle: str) -> None:
    """In the state of the ring, unless that is in service."""
    rings = table(r=Machine())
    facts = {key: changes[key] for key in ("trust", "draining", "refusal") if key in changes}
    members = {"a": Known("alpha", 20), "b": Known("beta", **({"trust": 20} | facts))}
    if "member" in changes:
        del members["b"]
    names = {"b": "beta"} if "refusal" in changes else {"a": "alpha", "b": "beta"}
    stages = [admin_pb2.StagePlan(member=member, member_name=name) for member, name in names.items()]
    stages = stages[-1:] if "draining" in changes else stages
    parked = admin_pb2.RingPlan(ring="p", stages=stages)
    plan = admin_pb2.DeploymentPlan(
        spec={"name": "demo", "trust_floor": 20},
        profile=model_pb2.ModelProfile(model_type="llama"),
        rings=[rings.running["r"].plan, parked],
    )
    deployment = StoredDeployment(name="demo", plan=plan)
    rings.wanted = Wanted(
        StoredRoster(version=1, envelope=b"signed"), members=members, deployments=[deployment]
    )
    rings.not_moved = {"p": "no room"}
    made = RingViews(rings)
    assert rings.obstacles(deployment, parked) == ({"b": obstacle} if obstacle else {})
    assert rings.obstacles(deployment, rings.running["r"].plan) == {}
    why = f"beta {obstacle}" if obstacle else "the newest roster does not hold it"
    machine = rings.running["r"].machine
    machine.undecided, machine.awaited = True, []
    rings.running["r"].status = lambda: admin_pb2.RingStatus(ring="r", reason="well")
    assert [(one.ring, one.phase, one.reason) for one in made.statuses(deployment)] == [
        ("r", membership_pb2.RING_PHASE_UNSPECIFIED, "well"),
        ("p", membership_pb2.RING_PHASE_DOWN, f"{why}; others could not take over: no room"),
    ]
    roster, state = made.snapshot()
    assert roster.roster.envelope == b"signed"
    assert state.ring == membership_pb2.RingState(
        ring="p",
        phase=membership_pb2.RING_PHASE_DOWN,
        deployment="demo",
        reason=f"{why}; others could not take over: no room",
        model_type="llama",
        patience=61,
    )


def test_a_ring_that_waits_says_why_nobody_else_took_over() -> None:
    rings = table(r=Machine(), s=Machine())
    made = views(rings)
    for name, awaited in (("r", ["a"]), ("s", [])):
        running = rings.running[name]
        running.machine.awaited = awaited
        running.status = lambda: admin_pb2.RingStatus(reason="why")
    rings.not_moved = {"r": "no room", "s": "no room"}
    plan = admin_pb2.DeploymentPlan(rings=[admin_pb2.RingPlan(ring=name) for name in "rs"])
    deployment = StoredDeployment(name="demo", plan=plan)
    reasons = [status.reason for status in made.statuses(deployment)]
    assert reasons == ["why; others could not take over: no room", "why"]
    assert (rings.awaited("r"), rings.awaited("s"), rings.awaited("none")) == (["a"], [], [])
