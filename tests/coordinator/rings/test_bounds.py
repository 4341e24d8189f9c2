"""What members say of epochs is bounded, and goes to the ring that they are of; and what is told of rings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from sealring.coordinator.rings.epochs import Phase, Timeouts
from sealring.coordinator.rings.rings import Rings
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.errors import FailedPrecondition, InvalidInput, NotFound
from sealring.v1 import admin_pb2, membership_pb2, model_pb2


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
    made.prepared("a", membership_pb2.EpochPrepared(ring="r", epoch=4, group_address="192.0.2.1:1"))
    assert machine.told.pop() == ("prepared", ("a", 4, [], 7.0, ""), {}), "a pipeline has no group"
    made._running["r"].backend = "ring"
    for address in ("192.0.2.1:1", "192.0.2.1:0", "nowhere"):
        made.prepared("a", membership_pb2.EpochPrepared(ring="r", epoch=4, group_address=address))
    reason = "node-a: it names no address for its group"
    assert machine.told == [
        ("prepared", ("a", 4, [], 7.0, "192.0.2.1:1"), {}),
        *[("fault", ("a", 4, reason, 7.0), {})] * 2,
    ]
    machine.told.clear()
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
    with structlog.testing.capture_logs() as logs:
        made.faulted("a", fault)
    assert machine.told == [("fault", ("a", 4, reason, 7.0), {"root": root})]
    assert logs == [
        {
            "event": "epoch_fault",
            "log_level": "info" if problem["reason"] == "GATEWAY_LEFT" else "warning",
            "ring": "r",
            "epoch": 4,
            "member": "a",
            "why": problem["reason"],
        }
    ]


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


@pytest.mark.parametrize(("replace_after", "patience"), [(1, 31), (31.5, 61), (300, 330), (1000, 330)])
def test_requests_wait_until_a_silent_member_is_replaced_and_no_longer(
    replace_after: float, patience: int
) -> None:
    unused: Any = SimpleNamespace()
    made = Rings(unused, unused, unused, unused, CoordinatorSettings(replace_after=replace_after))
    assert made._patience == patience


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
    machine, sent = Machine(phase), list[Any]()
    health = [membership_pb2.RingHealth(ring=ring, epoch=epoch) for ring, epoch in reported.items()]
    session = SimpleNamespace(member="a", send=sent.append)
    rings(r=machine)._compare(session, membership_pb2.Heartbeat(rings=health))
    assert machine.told == [("fault", ("a", 4, "node-a was restarted", 7.0), {})] * restarted
    assert [(one.end.ring, one.end.epoch, one.end.unload) for one in sent] == ends
    assert all(one.end.reason == "the epoch is over" for one in sent)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("others", [{}, {"s": Machine()}])
def test_a_heartbeat_tells_of_the_rings_that_its_sender_is_in(
    others: dict[str, Machine], first: bool
) -> None:
    """How long steps take says nothing of one ring where there is another."""
    machine = Machine()
    made, told, compared = rings(r=machine, **others), list[Any](), list[Any]()
    for name, running in made._running.items():
        running.beaten = lambda member, health, name=name: told.append((name, member, health.steps))
        running.pace = SimpleNamespace(
            beaten=lambda *said, name=name: told.append((name, *said)), slow=lambda member: 0.0
        )
    made._compare = lambda *said: compared.append(said)
    session = SimpleNamespace(member="a", slow="")
    for attended in (False, True):
        health = [
            membership_pb2.RingHealth(ring="none", epoch=1),
            membership_pb2.RingHealth(ring="r", epoch=4, steps=9, step_us=50, attended=attended),
        ]
        heartbeat = membership_pb2.Heartbeat(rings=health)
        made.beaten(session, heartbeat, first=first)
        assert machine.told == [("attended", (4, 7.0), {})] * attended
        assert compared.pop() == (session, heartbeat) if first else not compared
    assert told == [("r", "a", 9), ("r", "a", 0 if others else 50, 1)] * 2
    stranger = SimpleNamespace(member="b", slow="")
    made.beaten(stranger, heartbeat, first=False)
    assert len(told) == 4


def test_a_member_that_has_become_slow_is_told_of_once_and_when_it_is_over() -> None:
    made = rings(r=Machine(), s=Machine())
    factors = {"r": 0.0, "s": 0.0}
    for name, running in made._running.items():
        running.pace = SimpleNamespace(slow=lambda member, name=name: factors[name])
    session = SimpleNamespace(member="a", slow="")
    with structlog.testing.capture_logs() as logs:
        for factor in (0.0, 2.54, 3.0, 0.0, 0.0):
            factors["s"] = factor
            made._tell_pace(session)
            assert (
                session.slow.startswith(f"its steps take {factor:.1f} times") if factor else not session.slow
            )
            assert (made.slow("r"), made.slow("s")) == (frozenset(), frozenset("a" if factor else ""))
    assert [(one["event"], one["member"], one["factor"]) for one in logs] == [
        ("member_slow", "a", 2.5),
        ("member_not_slow", "a", 0),
    ]
    assert made.slow("none") == frozenset()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"member": None}, "was evicted"),
        ({"listed": None}, "was evicted"),
        ({"draining": 5}, "is draining"),
        ({"refusal": "it is late"}, "is not trusted: it is late"),
        ({"trust": 10}, "has trust level software, below the floor self_signed"),
    ],
)
def test_what_keeps_a_member_from_serving_is_told(changes: dict[str, Any], told: str) -> None:
    """In the state of the ring, unless that is in service."""
    made = rings(r=Machine())
    member = SimpleNamespace(draining=changes.get("draining", 0))
    listed = SimpleNamespace(trust=changes.get("trust", 20))
    made._store = SimpleNamespace(
        members=SimpleNamespace(find=lambda one: changes.get("member", member) if one == "b" else member)
    )
    made._publisher = SimpleNamespace(
        listed=lambda one: changes.get("listed", listed) if one == "b" else SimpleNamespace(trust=20),
        standing=SimpleNamespace(refusal=lambda one: changes.get("refusal", "")),
        current=SimpleNamespace(envelope=b"signed"),
    )
    names = {"b": "beta"} if "refusal" in changes else {"a": "alpha", "b": "beta"}
    stages = [admin_pb2.StagePlan(member=member, member_name=name) for member, name in names.items()]
    stages = stages[-1:] if "draining" in changes else stages
    parked = admin_pb2.RingPlan(ring="p", stages=stages)
    plan = admin_pb2.DeploymentPlan(
        spec={"trust_floor": 20},
        profile=model_pb2.ModelProfile(model_type="llama"),
        rings=[made._running["r"].plan, parked],
    )
    deployment = SimpleNamespace(name="demo", plan=plan)
    made.planned = [(deployment, ring) for ring in plan.rings]
    made._not_moved, made._patience = {"p": "no room"}, 61
    assert made.obstacles("p") == ({"b": told} if told else {})
    assert made.obstacles("r") == made.obstacles("none") == {}
    why = f"beta {told}" if told else "the newest roster does not hold it"
    machine = made._running["r"].machine
    machine.undecided, machine.awaited = True, []
    made._running["r"].status = lambda: admin_pb2.RingStatus(ring="r", reason="well")
    assert [(one.ring, one.phase, one.reason) for one in made.statuses(plan)] == [
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
    made = rings(r=Machine(), s=Machine())
    for name, awaited in (("r", ["a"]), ("s", [])):
        running = made._running[name]
        running.machine.awaited = awaited
        running.status = lambda: admin_pb2.RingStatus(reason="why")
    made._not_moved = {"r": "no room", "s": "no room"}
    plan = admin_pb2.DeploymentPlan(rings=[admin_pb2.RingPlan(ring=name) for name in "rs"])
    told = [status.reason for status in made.statuses(plan)]
    assert told == ["why; others could not take over: no room", "why"]
    assert (made.awaited("r"), made.awaited("s"), made.awaited("none")) == (["a"], [], [])


@pytest.mark.parametrize(
    ("others", "backend", "noted"), [({}, "", True), ({}, "ring", False), ({"s": Machine()}, "", False)]
)
def test_how_fast_a_member_is_is_noted_of_the_only_ring_that_it_is_in(
    others: dict[str, Machine], backend: str, noted: bool
) -> None:
    made, told = rings(r=Machine(), **others), list[Any]()
    made.speeds = SimpleNamespace(note=lambda *said: told.append(said))
    stages = [admin_pb2.StagePlan(member=member) for member in "ab"]
    plan = admin_pb2.DeploymentPlan(
        spec={"backend": backend},
        profile=model_pb2.ModelProfile(layers=4),
        rings=[admin_pb2.RingPlan(ring=ring, stages=stages) for ring in ("q", "r")],
    )
    made.planned = [(SimpleNamespace(plan=plan), ring) for ring in plan.rings]
    message = membership_pb2.EpochPrepared(ring="r", epoch=4, step_us=5)
    made.prepared("a", message)
    assert told == ([(stages[0], plan.profile, message)] if noted else [])


@pytest.mark.parametrize(
    ("session", "known", "attested", "here"),
    [
        (object(), object(), True, True),
        (None, object(), True, False),
        (object(), None, True, False),
        (object(), object(), False, False),
    ],
)
def test_who_is_online_and_has_proved_what_it_runs_is_here(
    session: Any, known: Any, attested: bool, here: bool
) -> None:
    made = rings(r=Machine())
    made._sessions = SimpleNamespace(find=lambda member: session)
    made._store = SimpleNamespace(members=SimpleNamespace(find=lambda member: known))
    standing = SimpleNamespace(attested=lambda member: member is known and attested)
    made._publisher = SimpleNamespace(standing=standing)
    assert made._is_here("a") is here


@pytest.mark.parametrize(
    ("undecided", "protocol", "agreed", "ends"),
    [
        (False, 5, 4, True),
        (False, 5, 5, False),
        (False, 5, 6, False),
        (False, 5, None, False),
        (True, 5, 4, False),
        (False, 0, -1, False),
    ],
)
def test_a_gateway_that_lacks_a_rings_protocol_ends_its_epoch_where_there_is_another(
    undecided: bool, protocol: int, agreed: int | None, ends: bool
) -> None:
    machine = Machine()
    made = rings(r=machine)
    machine.undecided, made._running["r"].protocol = undecided, protocol
    machine.members = ["a", "b"]  # type: ignore[assignment]

    def agree(running: Any) -> int:
        if agreed is None:
            raise FailedPrecondition("nothing in common")
        return agreed

    made._protocol = agree
    made.gateway_came()
    why = "a gateway came that does not speak protocol 5"
    assert machine.told == [("fault", ("a", 4, why, 7.0), {})] * ends


@pytest.mark.parametrize("phase", list(Phase))
def test_a_ring_that_serves_again_has_forgotten_what_was_wrong(phase: Phase) -> None:
    machine, told = Machine(phase), list[Any]()
    machine.reason = "why"  # type: ignore[attr-defined]
    made = rings(r=machine)
    made._watchers = SimpleNamespace(tell=told.append)
    running = made._running["r"]
    running.served, running.groupless = 1, {2, 3}
    running.state = lambda: membership_pb2.RingState(ring="r")
    made._not_moved = {"r": "no room"}
    with structlog.testing.capture_logs() as logs:
        made._report("r", machine)
    serves = phase is Phase.SERVING
    assert (running.served, running.groupless) == ((4, set()) if serves else (1, {2, 3}))
    assert made._not_moved == ({} if serves else {"r": "no room"})
    assert told == [membership_pb2.WatchResponse(ring=membership_pb2.RingState(ring="r"))]
    assert [(one["ring"], one["epoch"], one["phase"], one["why"]) for one in logs] == [
        ("r", 4, phase.value, "why")
    ]


@pytest.mark.parametrize("returning", [False, True])
def test_a_ring_begins_with_who_is_here_and_what_was_wrong_before_is_forgotten(returning: bool) -> None:
    made, told, begun = rings(), list[Any](), list[Any]()
    made._watchers = SimpleNamespace(tell=told.append)
    made._store = SimpleNamespace(deployments=SimpleNamespace(next_epoch=lambda ring: 5))
    made._timeouts, made._patience, made._returning = Timeouts(), 61, returning
    made._not_moved = {"r": "no room", "other": "no room"}
    made._is_here = lambda member: member == "a"
    made._apply = lambda name, actions: begun.append((name, actions))
    ring = admin_pb2.RingPlan(
        ring="r", stages=[admin_pb2.StagePlan(member=member, member_name=f"node-{member}") for member in "ab"]
    )
    profile = model_pb2.ModelProfile(digest="ab", model_type="llama", commit="c", hub_files="h")
    made._start(ring, admin_pb2.DeploymentPlan(spec={"name": "demo"}, profile=profile))
    running = made._running["r"]
    assert made._not_moved == {"other": "no room"}
    assert (running.digest, running.model_type, running.commit, running.hub_files) == (
        "ab",
        "llama",
        "c",
        "h",
    )
    assert (running.machine.members, running.machine.undecided) == (("a", "b"), returning)
    assert begun == [("r", [])]
    assert (running.machine.awaited, running.patience) == (["b"], 61)
    (state,) = told
    assert (state.ring.ring, state.ring.phase) == ("r", membership_pb2.RING_PHASE_DOWN)
