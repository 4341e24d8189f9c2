"""Reports of members on their rings: bounds, and the rings that they count for."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ringtables import Machine, table

from sealring.coordinator.rings.actions import Note
from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.reports import Report, Reports
from sealring.coordinator.rings.running import RunningRing, StepTimes
from sealring.coordinator.rings.state import State
from sealring.mesh.system.pace import Reached
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import EpochFault, EpochPrepared, EpochProgress, EpochUp


class Bed:
    """Reports, at the time 7, on the rings of a table whose machines decide nothing."""

    def __init__(self, rings: State, speeds: Any = None, links: Any = None) -> None:
        silent = SimpleNamespace(note=lambda *given: None)
        self.looks = 0
        moves: Any = SimpleNamespace(fall_back=lambda *given: [given], look_anew=self._look)
        self.made = Reports(rings, moves, speeds or silent, links or silent)

    def _look(self) -> None:
        self.looks += 1

    def take(self, member: str, report: Report) -> list[Any]:
        return list(self.made.take(member, report, 7.0))

    def beaten(self, session: Any, *health: membership_pb2.RingHealth, first: bool = False) -> list[Any]:
        return list(self.made.beaten(session, membership_pb2.Heartbeat(rings=health), 7.0, first=first))


def test_links_and_progress_are_cut() -> None:
    machine = Machine()
    rings = table(r=machine)
    made = Bed(rings)
    links = [membership_pb2.LinkInfo(from_rank=number) for number in range(3)]
    made.take("a", membership_pb2.EpochPrepared(ring="r", epoch=4, links=links, caches=bytes(40)))
    assert machine.calls.pop() == ("prepared", ("a", 4, links[:2], 7.0, "", bytes(32)), {})
    made.take(
        "a",
        membership_pb2.EpochProgress(
            ring="r", epoch=4, what="\x1b\n" + "w" * 63, done=5, total=1 << 63, rate=2, seconds_left=3
        ),
    )
    assert machine.calls.pop() == ("advanced", ("a", 4, Reached("  " + "w" * 62, 5, 1 << 50, 2, 3), 7.0), {})
    rings.running["r"].stage_of = lambda member: SimpleNamespace(weight_bytes=40)
    for fraction, done in ((0.5, 20), (math.inf, 40)):
        earlier = membership_pb2.EpochProgress(ring="r", epoch=4, what="loading", fraction=fraction)
        made.take("a", earlier)
        assert machine.calls.pop() == ("advanced", ("a", 4, Reached("loading", done, 40), 7.0), {})
    hosts = ["10.0.0.2:7", "\x1b[2J", "10.0.0.3:7"]
    links = [membership_pb2.LinkInfo(from_rank=number, address=one) for number, one in enumerate(hosts)]
    made.take("a", membership_pb2.EpochUp(ring="r", epoch=4, links=links))
    links[1].address = ""
    assert machine.calls.pop() == ("up", ("a", 4, 7.0, links[:2]), {})
    made.take("a", membership_pb2.EpochPrepared(ring="r", epoch=4, group_address="192.0.2.1:1"))
    assert machine.calls.pop() == ("prepared", ("a", 4, [], 7.0, "", b""), {}), "a pipeline has no group"
    rings.running["r"].backend = "ring"
    for address in ("192.0.2.1:1", "192.0.2.1:0", "nowhere"):
        made.take("a", membership_pb2.EpochPrepared(ring="r", epoch=4, group_address=address))
    reason = "node-a: it names no address for its group"
    assert machine.calls == [
        ("prepared", ("a", 4, [], 7.0, "192.0.2.1:1", b""), {}),
        *[("fault", ("a", 4, reason, 7.0), {})] * 2,
    ]
    machine.calls.clear()
    for report in (EpochPrepared, EpochProgress, EpochUp, EpochFault):
        made.take("a", report(ring="other"))
    made.take("b", membership_pb2.EpochPrepared(ring="r", epoch=4))
    made.take("b", membership_pb2.EpochProgress(ring="r", epoch=4))
    made.take("b", membership_pb2.EpochUp(ring="r", epoch=4))
    assert machine.calls == [], "a node that is no member cannot report on a ring"


def test_what_a_member_measured_of_its_own_link_is_noted_and_of_anothers_is_not() -> None:
    machine, noted = Machine(), []
    machine.members = {"a": "node-a", "b": "node-b"}
    rings = table(r=machine)
    rings.running["r"].plan.stages.add(member="b")
    made = Bed(rings, links=SimpleNamespace(note=lambda *given: noted.append(given)))

    def up(**link: Any) -> list[Any]:
        noted.clear()
        made.take("a", membership_pb2.EpochUp(ring="r", epoch=4, links=[membership_pb2.LinkInfo(**link)]))
        return noted

    figures = {"address": "10.0.0.2:7", "round_trip_us": 300, "bytes_per_second": 10**8}
    assert up(from_rank=0, to_rank=1, **figures) == [("a", "b", "10.0.0.2:7", 300, 10**8)]
    assert up(from_rank=1, to_rank=0, **figures) == []
    assert up(from_rank=0, to_rank=2, **figures) == []


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
    made = Bed(table(r=machine))
    fault = membership_pb2.EpochFault(ring="r", epoch=4, problem=membership_pb2.Problem(**problem))
    made.take("b", fault)
    assert machine.calls == []
    fields = {"ring": "r", "epoch": 4, "member": "a", "why": problem["reason"]}
    serious = problem["reason"] != "GATEWAY_LEFT"
    assert made.take("a", fault) == [Note("epoch_fault", fields, serious)]
    assert machine.calls == [("fault", ("a", 4, reason, 7.0), {"root": root})]


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
    """In epochs after the last that served, which is epoch 2; the ring is in epoch 4."""
    rings = table(r=Machine())
    made, done = Bed(rings), list[Any]()
    running = rings.running["r"]
    running.backend, running.served, running.groupless = backend, 2, set()
    running.spec = SimpleNamespace(or_pipeline=or_pipeline, name="demo")
    problem = membership_pb2.Problem(reason="NO_GROUP", message="no RDMA")
    for epoch in epochs:
        done += made.take("a", membership_pb2.EpochFault(ring="r", epoch=epoch, problem=problem))
    assert [one for one in done if not isinstance(one, Note)] == (
        [("r", "node-a: no RDMA", 7.0)] if falls else []
    )
    assert running.groupless == (set() if falls else {epoch for epoch in epochs if 2 < epoch <= 4})


@pytest.mark.parametrize(
    ("phase", "reported", "restarted", "ends"),
    [
        (Phase.SERVING, {"r": 4}, False, []),
        (Phase.SERVING, {}, True, []),
        (Phase.SERVING, {"r": 3}, True, [("r", 3, False)]),
        (Phase.PREPARING, {"r": 4}, False, []),
        (Phase.PREPARING, {}, False, []),
        (Phase.PREPARING, {"r": 3}, False, [("r", 3, False)]),
        (Phase.WAITING, {"r": 4}, False, [("r", 4, False)]),
        (Phase.SERVING, {"r": 4, "x": 1}, False, [("x", 1, True)]),
    ],
)
def test_what_a_node_runs_when_it_comes_is_compared_with_what_it_should(
    phase: Phase, reported: dict[str, int], restarted: bool, ends: list[tuple[str, int, bool]]
) -> None:
    machine = Machine(phase)
    health = [membership_pb2.RingHealth(ring=ring, epoch=epoch) for ring, epoch in reported.items()]
    running = table(r=machine)
    running.running["r"].beaten = lambda *given, timed: None
    running.running["r"].step_times = StepTimes()
    bed, session = Bed(running), SimpleNamespace(member="a", slow="")
    sent = bed.beaten(session, *health, first=True)
    assert machine.calls == [("fault", ("a", 4, "node-a was restarted", 7.0), {})] * restarted
    assert {one.member for one in sent} <= {"a"}
    assert [(one.message.end.ring, one.message.end.epoch, one.message.end.unload) for one in sent] == ends
    assert all(one.message.end.reason == "the epoch is over" for one in sent)
    assert bed.looks == 1, "there may be room"
    machine.calls.clear()
    assert bed.beaten(session, *health) == machine.calls == []
    assert bed.looks == 1


@pytest.mark.parametrize("others", [{}, {"s": Machine()}])
def test_a_heartbeat_reports_on_the_rings_that_its_sender_is_in(others: dict[str, Machine]) -> None:
    """Step times do not count where another ring on the node changes them."""
    machine, calls = Machine(), list[Any]()
    rings = table(r=machine, **others)
    for name, running in rings.running.items():
        times = SimpleNamespace(
            beaten=lambda *given, name=name: calls.append((name, *given)), slow=lambda member: 0.0
        )
        running.step_times = times
        running.beaten = partial(RunningRing.beaten, running)
    made, session = Bed(rings), SimpleNamespace(member="a", slow="")
    for attended in (False, True):
        health = [
            membership_pb2.RingHealth(ring="none", epoch=1),
            membership_pb2.RingHealth(ring="r", epoch=4, step_us=50, attended=attended, drafted=3),
        ]
        assert made.beaten(session, *health) == []
        assert machine.calls == [("attended", (4, 7.0), {})] * attended
    assert calls == [("r", "a", 0 if others else 50, 1)] * 2
    assert rings.running["r"].drafts == (4, 3, 0)
    made.beaten(SimpleNamespace(member="b", slow=""), *health)
    assert len(calls) == 2


def test_a_member_that_has_become_slow_is_reported_once_and_when_it_is_over() -> None:
    rings, factors = table(r=Machine(), s=Machine()), {"r": 0.0, "s": 0.0}
    for name, running in rings.running.items():
        running.step_times = SimpleNamespace(slow=lambda member, name=name: factors[name])
    made = Bed(rings)
    session, notes = SimpleNamespace(member="a", slow=""), list[Any]()
    for factor in (0.0, 2.54, 3.0, 0.0, 0.0):
        factors["s"] = factor
        notes += made.beaten(session)
        shown = f"its steps take {factor:.1f} times" if factor else ""
        assert session.slow.startswith(shown)
        assert bool(session.slow) == bool(factor)
    assert notes == [
        Note("member_slow", {"member": "a", "factor": 2.5}, serious=True),
        Note("member_not_slow", {"member": "a", "factor": 0}, serious=True),
    ]


@pytest.mark.parametrize(
    ("others", "backend", "noted"), [({}, "", True), ({}, "ring", False), ({"s": Machine()}, "", False)]
)
def test_how_fast_a_member_is_is_noted_of_the_only_ring_that_it_is_in(
    others: dict[str, Machine], backend: str, noted: bool
) -> None:
    rings, noted_speeds = table(r=Machine(), **others), list[Any]()
    made = Bed(rings, SimpleNamespace(note=lambda *given: noted_speeds.append(given)))
    running = rings.running["r"]
    running.spec.backend = backend
    message = membership_pb2.EpochPrepared(ring="r", epoch=4, step_us=5)
    made.take("a", message)
    expected = (running.stage_of("a"), running.deployment.profile, message)
    assert noted_speeds == ([expected] if noted else [])
