"""What members say of epochs is bounded, and goes to the ring that they are of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.rings import Rings
from sealring.mesh.errors import FailedPrecondition, InvalidInput, NotFound
from sealring.v1 import admin_pb2, membership_pb2


class Machine:
    """Remembers what it is told."""

    def __init__(self, phase: Phase = Phase.SERVING) -> None:
        self.told: list[Any] = []
        self.members = {"a": "node-a"}
        self.phase, self.epoch = phase, 4

    def __getattr__(self, name: str) -> Any:
        def tell(*args: Any, **more: Any) -> list[Any]:
            self.told.append((name, args, more))
            return []

        return tell


def rings(**machines: Machine) -> Any:
    running = {
        name: SimpleNamespace(
            plan=admin_pb2.RingPlan(ring=name, stages=[admin_pb2.StagePlan(member="a")]),
            machine=machine,
            digest="abcd",
            backend="",
            name_of=machine.members.__getitem__,
        )
        for name, machine in machines.items()
    }
    made: Any = Rings.__new__(Rings)
    made._running = running
    made._clock = lambda: 7.0
    made.planned = []
    made._wake = SimpleNamespace(set=lambda: None)
    return made


def test_links_and_progress_are_cut() -> None:
    machine = Machine()
    made = rings(r=machine)
    links = [membership_pb2.LinkInfo(from_rank=number) for number in range(3)]
    made.prepared("a", membership_pb2.EpochPrepared(ring="r", epoch=4, links=links))
    assert machine.told.pop() == ("prepared", ("a", 4, links[:2], 7.0, ""), {})
    made.progressed(
        "a", membership_pb2.EpochProgress(ring="r", epoch=4, what="\x1b\n" + "w" * 63, fraction=0.5)
    )
    assert machine.told.pop() == ("advanced", ("a", 4, "  " + "w" * 62, 0.5, 7.0), {})
    made.up("a", membership_pb2.EpochUp(ring="r", epoch=4))
    assert machine.told.pop() == ("up", ("a", 4, 7.0), {})
    made._running["r"].backend = "ring"
    for told in (made.prepared, made.progressed, made.up, made.faulted):
        told("a", membership_pb2.EpochProgress(ring="other"))
    made.prepared("b", membership_pb2.EpochPrepared(ring="r", epoch=4))
    made.progressed("b", membership_pb2.EpochProgress(ring="r", epoch=4))
    made.up("b", membership_pb2.EpochUp(ring="r", epoch=4))
    assert machine.told == [], "who is no member says nothing of a ring"


@pytest.mark.parametrize(
    ("problem", "reason", "root"),
    [
        ({"reason": "CHILD_ENDED", "message": "m" * 300}, "node-a: " + "m" * 192, True),
        ({"reason": "CHILD_ENDED"}, "node-a: CHILD_ENDED", True),
        ({"reason": "CHILD_ENDED", "message": "a\nb\x1b[2J"}, "node-a: a b [2J", True),
        ({"reason": "PEER_LOST", "message": "gone"}, "node-a: gone", False),
        ({"reason": "GATEWAY_LEFT", "message": "left"}, "node-a: left", False),
    ],
)
def test_a_fault_is_cut_and_is_its_members_own_or_anothers(
    problem: dict[str, str], reason: str, root: bool
) -> None:
    machine = Machine()
    made = rings(r=machine)
    fault = membership_pb2.EpochFault(ring="r", epoch=4, problem=membership_pb2.Problem(**problem))
    made.faulted("b", fault)
    assert machine.told == []
    made.faulted("a", fault)
    assert machine.told == [("fault", ("a", 4, reason, 7.0), {"root": root})]


@pytest.mark.parametrize(
    ("backend", "or_pipeline", "epochs", "falls"),
    [
        ("ring", True, (3, 4), True),
        ("ring", True, (4, 4), False),
        ("ring", True, (2, 3), False),
        ("ring", True, (4, 5), False),
        ("ring", False, (3, 4), False),
        ("", True, (3, 4), False),
    ],
)
def test_a_ring_falls_back_when_its_group_did_not_come_up_twice(
    backend: str, or_pipeline: bool, epochs: tuple[int, ...], falls: bool
) -> None:
    """Since it served in epoch 2, in epochs that there were; it is in its fourth."""
    made, told = rings(r=Machine()), []
    running = made._running["r"]
    running.backend, running.served, running.groupless = backend, 2, set()
    running.spec = SimpleNamespace(or_pipeline=or_pipeline, name="demo")
    made.on_no_group = lambda *said: told.append(said)
    problem = membership_pb2.Problem(reason="NO_GROUP", message="no RDMA")
    for epoch in epochs:
        made.faulted("a", membership_pb2.EpochFault(ring="r", epoch=epoch, problem=problem))
    assert told == ([("demo", "r", "node-a: no RDMA")] if falls else [])
    assert running.groupless == (set() if falls else {epoch for epoch in epochs if 2 < epoch <= 4})


def test_a_ring_is_named_unless_it_is_the_only_one() -> None:
    made = rings(r=Machine())
    assert made.serving("") is made.serving("r") is made._running["r"]
    with pytest.raises(NotFound, match="no ring 'other'"):
        made.serving("other")
    with pytest.raises(NotFound) as caught:
        made.serving("x" * 65)
    assert repr("x" * 64) in caught.value.message
    with pytest.raises(NotFound, match="there is no ring"):
        rings().serving("")
    with pytest.raises(InvalidInput):
        rings(a=Machine(), b=Machine()).serving("")
    many = rings(**{f"r{number}": Machine() for number in range(9)})
    assert many.serving("r3")
    with pytest.raises(InvalidInput) as which:
        many.serving("")
    assert which.value.reason == "WHICH_RING"
    assert which.value.hint == "name one of: " + ", ".join(f"r{number}" for number in range(8))
    for phase in Phase:
        if phase is not Phase.SERVING:
            with pytest.raises(FailedPrecondition):
                rings(r=Machine(phase)).serving("r")


def test_files_of_a_model_that_is_served_have_changed() -> None:
    planned, other = bytes.fromhex("abcd"), bytes(2)
    serving = rings(r=Machine())
    assert serving.model_changed("a", [other])
    for stated in ([], [planned], [planned, other]):
        assert not serving.model_changed("a", stated), "it serves others, or none when it was asked"
    assert not serving.model_changed("b", [other])
    both = rings(r=Machine(), s=Machine())
    both._running["s"].digest = other.hex()
    for stated in ([], [planned], [planned, other]):
        assert not both.model_changed("a", stated)
    assert both.model_changed("a", [planned, planned]), "the files of one became those of the other"
    both._running["s"].digest = planned.hex()
    assert not both.model_changed("a", [planned, planned]), "two deployments of one model"
    assert not rings(r=Machine(Phase.PREPARING)).model_changed("a", [other])
