"""The cluster's machine and the world: what is done, what fails, and when it is looked at."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from ringtables import Machine, table

from sealring.coordinator.rings.actions import Drained, Formed, Move, Note, Place, Send, Tell, Unload
from sealring.coordinator.rings.cluster import Cluster
from sealring.coordinator.rings.driver import ClusterDriver
from sealring.coordinator.rings.epochs import Changed, Commit, Phase
from sealring.coordinator.rings.following import follow
from sealring.coordinator.rings.state import State
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredMember
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.errors import FailedPrecondition, PermissionDenied, SealringError, Unavailable
from sealring.mesh.rpc import PROTOCOL_VERSION, own_release
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, WatchResponse
from sealring.v1.proof_pb2 import Release

MOVE = Move("r", admin_pb2.RingPlan(ring="r-0"), 0.0)


class Scene:
    """A driver whose machine notes the ends of changes, and plans that do what `make` does."""

    def __init__(self) -> None:
        self.now, self.due = 7.0, math.inf
        self.looks: list[float] = []
        self.ended: list[Any] = []
        self.sent: list[Any] = []
        self.unloaded: list[str] = []
        self.saved: list[int] = []
        self.former: dict[str, Any] = {}
        self.make: Any = None
        self.error: SealringError | None = None
        part: Any = SimpleNamespace
        cluster = part(
            state=part(
                sessions=part(send=lambda *sent: self.sent.append(sent)),
                watchers=part(tell=self.sent.append),
                former={"r": ["a ring"]},
            ),
            look=self.look,
            reports=part(take=self.report, beaten=self.beaten),
            deadline=lambda now: self.due,
            ended=lambda change, error, now: self.ended.append((change, error)) or [],
        )
        member = StoredMember(id="a", draining=161)
        store = part(
            members=part(find=lambda one: member if one == "a" else None, save=self.save),
            deployments=part(save_former=self.save_former),
        )
        plans = part(make=self.plan, unload=self.unload)
        self.driver = ClusterDriver(
            *(cluster, store, part(), plans), wall=lambda: 0.0, clock=lambda: self.now
        )

    def look(self, now: float, wall: float) -> list[Any]:
        self.looks.append(now)
        return []

    def report(self, member: str, report: Any, now: float) -> list[Any]:
        return [Send(member, report)]

    def beaten(self, session: Any, heartbeat: Any, now: float, *, first: bool) -> list[Any]:
        return [Send(session.member, first)]  # type: ignore[arg-type]

    async def plan(self, change: Any) -> None:
        await self.make()

    def unload(self, unload: Unload) -> None:
        if self.error is not None:
            raise self.error
        self.unloaded.append(unload.deployment)

    def save(self, member: StoredMember) -> None:
        if self.error is not None:
            raise self.error
        self.saved.append(member.draining)

    def save_former(self, known: Any) -> None:
        if self.error is not None:
            raise self.error
        self.former = dict(known)


def test_messages_go_to_their_receivers() -> None:
    scene = Scene()
    message, event = CoordinatorMessage(), WatchResponse()
    with structlog.testing.capture_logs() as logs:
        scene.driver.do([Send("a", message), Tell(event), Note("what", {"ring": "r"}, serious=True)])
    assert scene.sent == [("a", message), event]
    assert logs == [{"event": "what", "ring": "r", "log_level": "warning"}]


@pytest.mark.parametrize("full", [False, True])
def test_what_cannot_be_stored_is_logged(full: bool) -> None:
    scene = Scene()
    scene.error = Unavailable("the disk is full", reason="STATE_UNWRITABLE") if full else None
    with structlog.testing.capture_logs() as logs:
        scene.driver.do([Unload("r", "why"), Drained("a"), Drained("gone"), Formed()])
    assert (scene.unloaded, scene.saved) == (([], []) if full else (["r"], [1]))
    assert scene.former == ({} if full else {"r": ["a ring"]})
    if full:
        assert [(one["event"], one["reason"]) for one in logs] == [("not_stored", "STATE_UNWRITABLE")] * 3
    else:
        assert [(one["event"], one["why"]) for one in logs] == [("model_unloaded", "why")]


@pytest.mark.parametrize("raised", [None, Unavailable("silent", reason="NODES_SILENT"), KeyError("a defect")])
async def test_a_change_ends_however_it_goes(raised: Exception | None) -> None:
    scene = Scene()

    async def make() -> None:
        if raised is not None:
            raise raised

    scene.make = make
    with structlog.testing.capture_logs() as logs:
        scene.driver.do([MOVE])
        while not scene.ended:
            await asyncio.sleep(0)
    ((change, error),) = scene.ended
    assert change is MOVE
    if isinstance(raised, KeyError):
        assert error.code == "INTERNAL"
        assert [one["log_level"] for one in logs] == ["error"]
    else:
        assert error is raised


async def test_changes_that_are_under_way_when_it_stops_do_not_end() -> None:
    scene, begun = Scene(), asyncio.Event()

    async def make() -> None:
        begun.set()
        await asyncio.Event().wait()

    scene.make = make
    scene.driver.do([Place("m")])
    await begun.wait()
    await scene.driver.close()
    assert scene.ended == []


@pytest.mark.parametrize(("due", "looks"), [(math.inf, 1), (7.0, 3)])
async def test_it_looks_at_events_and_while_something_is_due(due: float, looks: int) -> None:
    scene = Scene()
    scene.due = due
    running = asyncio.create_task(scene.driver.run())
    while len(scene.looks) < looks:
        await asyncio.sleep(0.001)
    scene.due = math.inf
    scene.driver.changed()
    before = len(scene.looks)
    while len(scene.looks) == before:
        await asyncio.sleep(0.001)
    running.cancel()


@pytest.mark.parametrize("turned", [False, True])
async def test_what_members_report_is_looked_at_and_heartbeats_if_they_say_something_new(
    turned: bool,
) -> None:
    scene = Scene()
    running = asyncio.create_task(scene.driver.run())

    async def looks() -> int:
        for _ in range(9):
            await asyncio.sleep(0)
        return len(scene.looks)

    session: Any = SimpleNamespace(member="a", heartbeat=None, beat=lambda heartbeat: turned)
    known = await looks()
    scene.driver.reported("a", "it is up")  # type: ignore[arg-type]
    assert await looks() == known + 1
    scene.driver.beaten(session, membership_pb2.Heartbeat())
    assert await looks() == known + 2
    session.heartbeat = membership_pb2.Heartbeat()
    scene.driver.beaten(session, membership_pb2.Heartbeat())
    assert await looks() == known + 2 + turned
    assert scene.sent == [("a", "it is up"), ("a", True), ("a", False)]
    running.cancel()


# What the machine does with epochs


def cluster(rings: Any) -> Cluster:
    unused: Any = None
    return Cluster(rings, unused, unused, CoordinatorSettings(), lambda ring: 1, 0.0)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_ring_that_serves_again_has_forgotten_its_last_trouble(phase: Phase) -> None:
    rings = table(r=Machine(phase))
    running = rings.running["r"]
    running.served, running.groupless = 1, {2, 3}
    running.state = lambda: membership_pb2.RingState(ring="r")
    rings.not_moved = {"r": "no room"}
    note, tell = follow(rings, running, [Changed()], 7.0)
    serves = phase is Phase.SERVING
    assert (running.served, running.groupless) == ((4, set()) if serves else (1, {2, 3}))
    assert rings.not_moved == ({} if serves else {"r": "no room"})
    assert tell == Tell(WatchResponse(ring=membership_pb2.RingState(ring="r")))
    assert note == Note("ring_changed", {"ring": "r", "epoch": 4, "phase": phase.value, "why": "why"})


def test_a_commit_names_the_rings_before_and_a_ring_is_stored_once() -> None:
    rings = table(r=Machine())
    running = rings.running["r"]

    def committed(*layers: int, caches: bytes = b"weights") -> tuple[list[int], bool]:
        """The layers of each former ring's first member, and whether rings are to be stored."""
        members = zip("ab", (0, layers[0]), (layers[0], sum(layers)), strict=True)
        stages = [
            admin_pb2.StagePlan(member=each, first_layer=first, end_layer=end) for each, first, end in members
        ]
        running.plan = admin_pb2.RingPlan(ring="r", stages=stages)
        stored, *sent = follow(rings, running, [Commit(1, (), (caches, caches))], 7.0)
        if not isinstance(stored, Formed):
            sent.insert(0, stored)
        assert [one.member for one in sent] == ["a", "b"]
        return [one.stages[0].end_layer for one in sent[0].message.commit.former], isinstance(stored, Formed)

    assert committed(1, 9) == ([], True)
    assert committed(1, 9) == ([], False)
    assert committed(1, 9, caches=b"others") == ([1], True)
    assert [committed(each, 9) for each in range(2, 9)][-1] == ([7, 6, 5, 4], True)
    after = State(Sessions(), Watchers(), 1.0)
    after.former.update(rings.former)
    rings = after
    assert committed(8, 9) == ([7, 6, 5, 4], False), "of this run or of one before"


OLDER = Release(oldest=PROTOCOL_VERSION - 1, protocol=PROTOCOL_VERSION - 1)


@pytest.mark.parametrize("drafter", [False, True])
def test_an_older_gateway_ends_no_epoch_that_it_can_have_no_part_in(drafter: bool) -> None:
    """It reads no roster of two cuts, and guesses nothing from hidden states; members agree alone."""
    machine = Machine()
    machine.members = ["a", "b"]  # type: ignore[assignment]
    rings = table(r=machine)
    running = rings.running["r"]
    running.protocol = PROTOCOL_VERSION
    running.plan.stages[0].prompt_end_layer = 0 if drafter else 3
    running.deployment.profile.draft.taps[:] = [1] * drafter
    rings.watchers.add("gateway", OLDER)
    assert cluster(rings).gateway_came(7.0) == []
    assert machine.calls == []
    assert rings.protocol(running) == PROTOCOL_VERSION
    rings.sessions.open(NodeSession("a", b"", release=OLDER, clock=lambda: 0.0))
    with pytest.raises(FailedPrecondition, match="need this release on node"):
        rings.protocol(running)


def test_an_older_machine_is_behind_until_it_is_updated_or_gone() -> None:
    """Also while it is away: it comes back to a roster that it has to read."""
    rings = table()
    for release, name in ((OLDER, "node a"), (own_release(), "")):
        session = NodeSession("a", b"", release=release, clock=lambda: 0.0)
        rings.sessions.open(session)
        assert rings.behind() == name
        rings.sessions.closed(session)
        assert rings.behind() == name
    rings.sessions.open(NodeSession("a", b"", release=OLDER, clock=lambda: 0.0))
    rings.watchers.remove(rings.watchers.add("gate", OLDER))
    evicted = PermissionDenied("it was evicted")
    rings.sessions.throw_out("a", "evicted", evicted)
    assert rings.behind() == "gate"
    rings.watchers.throw_out("gate", evicted)
    assert not rings.behind()


@pytest.mark.parametrize(
    ("undecided", "protocol", "newest", "ends"),
    [
        (False, 5, 4, True),
        (False, 5, 5, False),
        (False, 5, 6, False),
        (True, 5, 4, False),
        (False, 0, 4, False),
        (False, 5, 9, False),
    ],
)
def test_a_gateway_that_lacks_a_rings_protocol_ends_its_epoch_if_another_is_shared(
    undecided: bool, protocol: int, newest: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway speaks up to `newest`; one of 9 shares none with the members."""
    machine = Machine()
    machine.undecided, machine.members = undecided, ["a", "b"]  # type: ignore[assignment]
    rings = table(r=machine)
    rings.running["r"].protocol = protocol
    monkeypatch.setattr("sealring.mesh.rpc.protocol.OLDEST_PROTOCOL", 1)
    monkeypatch.setattr("sealring.mesh.rpc.protocol.PROTOCOL_VERSION", 6)
    rings.watchers.add("gateway", Release(oldest=9 if newest == 9 else 1, protocol=newest))
    assert cluster(rings).gateway_came(7.0) == []
    why = "a gateway came that does not speak protocol 5"
    assert machine.calls == [("fault", ("a", 4, why, 7.0), {})] * ends
