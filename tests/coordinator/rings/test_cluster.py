"""The cluster's machine over any order of events: what holds, and that what is possible comes about."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sealring.coordinator.nodes.links import Links
from sealring.coordinator.planning.speeds import Speeds
from sealring.coordinator.rings.actions import Drained, Move, Place, Send, Tell, Unload
from sealring.coordinator.rings.cluster import Cluster
from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.ondemand import LOST_SECONDS
from sealring.coordinator.rings.reports import Report
from sealring.coordinator.rings.state import Known, State, Wanted
from sealring.coordinator.rings.views import model_states
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredDeployment, StoredRoster
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.errors import FailedPrecondition, Internal, ResourceExhausted, SealringError, Unavailable
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import (
    Demand,
    EpochFault,
    EpochPrepared,
    EpochUp,
    Heartbeat,
    ModelDemand,
    Problem,
    RingHealth,
    ServingEpoch,
)

NODES, MODELS = "abcd", ("one", "two", "three")
TURN, GRACE, WALL = 60.0, 30.0, 1000.0
SETTINGS = CoordinatorSettings(replace_after=GRACE)
LOADED = membership_pb2.LOAD_PHASE_LOADED
YIELDING = membership_pb2.LOAD_PHASE_YIELDING


class World(RuleBasedStateMachine):
    """Four nodes that hold a ring each. `fixed` has a ring of two, each model on demand is a ring of one.

    Nodes read their messages, a gateway hears of models, and changes of plans end, whenever rules say so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epochs: dict[str, Any] = defaultdict(lambda: itertools.count(1))
        self.ended: list[Any] = []
        self.start()
        self.members = {one: Known(one, 10) for one in NODES}
        self.held: dict[str, tuple[str, ...]] = {}
        """The members of each ring that is planned, by deployment."""
        self.deployed: dict[str, admin_pb2.DeploymentSpec] = {}
        self.inbox: dict[str, list[Any]] = {one: [] for one in NODES}
        self.serving: dict[str, dict[str, ServingEpoch]] = {one: {} for one in NODES}
        self.changes: list[Move | Place] = []
        self.freed: dict[str, list[str]] = {}
        """The models in place of which one is about to be loaded."""
        self.told: list[Any] = []
        self.phases: dict[str, int] = {}
        self.refused: set[str] = set()
        self.waits = dict.fromkeys(MODELS, 0)
        self.answers = dict.fromkeys(MODELS, 0)
        self.asked = dict.fromkeys(MODELS, 0)
        self.loaded_at = dict.fromkeys(MODELS, -math.inf)
        self.drained: dict[str, set[str]] = {}
        """The rings that a member which drains had to hand over, and has not tried to."""
        self.busy = self.full = False

    # The world

    def start(self) -> None:
        """A coordinator that knows nothing but what is stored."""
        self.state = State(Sessions(), Watchers(), GRACE)
        measured = Speeds(), Links(clock=lambda: WALL + self.now)
        self.cluster = Cluster(
            self.state, *measured, SETTINGS, lambda ring: next(self.epochs[ring]), self.now
        )
        self.gateway = self.state.watchers.add("gateway", NodeSession("", b"", clock=lambda: 0.0).release)

    @initialize(keep=st.lists(st.sampled_from([1, 90, 0]), min_size=3, max_size=3), pinned=st.booleans())
    def begin(self, keep: list[int], pinned: bool) -> None:
        self.deployed["fixed"] = admin_pb2.DeploymentSpec(name="fixed", stages=2)
        self.held["fixed"] = ("a", "b")
        for name, seconds in zip(MODELS, keep, strict=True):
            self.deployed[name] = admin_pb2.DeploymentSpec(
                name=name, stages=1, on_demand=True, keep_alive=seconds, pinned=pinned and name == "one"
            )
        for one in NODES:
            self.come(one, kept=False)
        self.store()
        self.settle()

    def store(self) -> None:
        """What is stored has changed: a roster of the rings whose members are all enrolled."""
        deployments = []
        for name, spec in self.deployed.items():
            plan = admin_pb2.DeploymentPlan(spec=spec)
            if name in self.held:
                stages = [admin_pb2.StagePlan(member=one, member_name=one) for one in self.held[name]]
                plan.rings.add(ring=f"{name}-0", stages=stages)
            deployments.append(StoredDeployment(name=name, asked=spec, plan=plan))
        rings = {
            f"{name}-0"
            for name, nodes in self.held.items()
            if all(one in self.members for one in nodes)
            and min(self.members[one].trust for one in nodes) >= self.deployed[name].trust_floor
        }
        wanted = Wanted(StoredRoster(version=1), rings, dict(self.members), deployments)
        self.do(self.cluster.stored(wanted, self.now, WALL + self.now))

    def do(self, actions: Iterable[Any]) -> bool:
        done = list(actions)
        for action in done:
            if isinstance(action, Send):
                if self.state.sessions.find(action.member) is not None:
                    self.inbox[action.member].append(action.message)
            elif isinstance(action, Tell):
                self.told.append(action.event)
            elif isinstance(action, Unload):
                assert not self.answers[action.deployment], "no answer is cut off"
                if not self.full:
                    self.held.pop(action.deployment)
                    self.store()
            elif isinstance(action, Drained):
                rings = {f"{name}-0" for name, nodes in self.held.items() if action.member in nodes}
                left = self.drained.pop(action.member, set()) & rings
                assert not left, "each ring has moved, or could not"
                if not self.full:
                    self.members[action.member] = Known(action.member, 10, draining=1)
            elif isinstance(action, Move | Place):
                self.begun(action)
        return bool(done)

    def begun(self, change: Move | Place) -> None:
        self.changes.append(change)
        rings = [one.ring.ring for one in self.changes if isinstance(one, Move) and not self.is_stale(one)]
        assert len(rings) == len(set(rings)), "a ring has one move at a time"
        assert sum(isinstance(one, Place) for one in self.changes) <= 1, "models are placed one by one"
        if isinstance(change, Move):
            for member in change.lost & self.drained.keys():
                self.drained[member].discard(change.ring.ring)

    def is_stale(self, move: Move) -> bool:
        """Whether a move was for a drain that was taken back."""
        return not self.cluster.still(move, self.now)

    def settle(self) -> None:
        """Looks until nothing is due, as a driver does after an event."""
        for _ in range(20):
            if not self.do(self.cluster.look(self.now, WALL + self.now)):
                return
        raise AssertionError("something is due again and again")

    def demand(self) -> None:
        """The gateway reports, by the phases that it has heard of."""
        models = [
            ModelDemand(
                deployment=name,
                active=self.answers[name],
                waiting=self.waits[name],
                asked=self.asked[name],
                holding=self.phases.get(name) == YIELDING,
            )
            for name in MODELS
        ]
        self.state.watchers.demanded(self.gateway, Demand(models=models))

    def beat(self) -> None:
        for session in self.state.sessions:
            used = {f"{name}-0" for name in MODELS if self.answers[name]} | (
                {"fixed-0"} if self.busy else set()
            )
            session.idle = {ring for ring in self.serving[session.member] if ring not in used}

    # Nodes

    def come(self, node: str, *, kept: bool) -> None:
        if self.state.sessions.find(node) is not None or node not in self.members:
            return
        if not kept:
            self.serving[node].clear()
        session = NodeSession(node, bytes(16), clock=lambda: 0.0)
        self.state.sessions.open(session)
        self.do(self.cluster.came(node, self.serving[node], self.now))
        up = {name: one.prepared.epoch for name, one in self.serving[node].items()}
        first = Heartbeat(rings=[RingHealth(ring=name, epoch=epoch) for name, epoch in up.items()])
        self.do(self.cluster.reports.beaten(session, first, self.now, first=True))

    def go(self, node: str, *, gone: bool) -> None:
        session = self.state.sessions.find(node)
        if session is not None:
            session.said_goodbye = gone
            self.state.sessions.closed(session)
            self.inbox[node].clear()
            self.do(self.cluster.left(node, self.now, gone=gone))

    def act(self, node: str) -> None:
        """A node follows its messages."""
        while self.inbox[node]:
            message = self.inbox[node].pop(0)
            kind = message.WhichOneof("message")
            told = getattr(message, kind)
            if kind == "end":
                self.ended.append(told)
                if self.epoch_of(node, told.ring) == told.epoch:
                    del self.serving[node][told.ring]
                continue
            if kind == "prepare":
                self.serving[node][told.ring] = ServingEpoch(prepared=told)
            report = EpochPrepared if kind == "prepare" else EpochUp
            self.report(node, report(ring=told.ring, epoch=told.epoch))

    def epoch_of(self, node: str, ring: str) -> int:
        """The epoch of a ring that a node has prepared, or 0."""
        return self.serving[node].get(ring, ServingEpoch()).prepared.epoch

    def report(self, node: str, report: Report) -> None:
        self.do(self.cluster.reports.take(node, report, self.now))

    @rule(node=st.sampled_from(NODES), kept=st.booleans())
    def a_node_comes(self, node: str, kept: bool) -> None:
        self.come(node, kept=kept)
        self.settle()

    @rule(node=st.sampled_from(NODES), gone=st.booleans())
    def a_node_leaves(self, node: str, gone: bool) -> None:
        self.go(node, gone=gone)
        self.settle()

    @rule(node=st.sampled_from(NODES))
    def a_node_acts(self, node: str) -> None:
        self.act(node)
        self.settle()

    @rule(node=st.sampled_from(NODES), name=st.sampled_from(["fixed", *MODELS]), late=st.integers(0, 2))
    def an_epoch_breaks(self, node: str, name: str, late: int = 0) -> None:
        """By the word of a node. A stranger's counts for nothing, and a word that is late ends nothing."""
        running = self.state.running.get(f"{name}-0")
        if running is None or running.machine.epoch < late:
            return
        before = running.machine.phase, running.machine.epoch
        died = Problem(reason="CHILD_ENDED", message="it died")
        epoch = running.machine.epoch - late
        self.report(node, EpochFault(ring=f"{name}-0", epoch=epoch, problem=died))
        if late or node not in running.machine.members:
            assert (running.machine.phase, running.machine.epoch) == before
        self.settle()

    @rule(node=st.sampled_from(NODES), undo=st.booleans())
    def a_node_drains(self, node: str, undo: bool) -> None:
        if node not in self.members or bool(self.members[node].draining) != undo:
            return
        self.members[node] = Known(node, 10, draining=0 if undo else int(WALL + self.now + 60))
        self.drained.pop(node, None)
        if not undo:
            self.drained[node] = {f"{name}-0" for name, nodes in self.held.items() if node in nodes}
        self.store()
        self.settle()

    @rule(node=st.sampled_from(NODES))
    def a_node_is_evicted_or_joins_again(self, node: str) -> None:
        if node in self.members:
            del self.members[node]
            self.drained.pop(node, None)
            self.go(node, gone=True)
        else:
            self.members[node] = Known(node, 10)
        self.store()
        self.settle()

    # Clients and operators

    @rule(name=st.sampled_from(MODELS))
    def a_client_asks(self, name: str) -> None:
        if name in self.deployed:
            self.waits[name] += 1
            self.asked[name] += 1
            self.refused.discard(name)
            self.gateway_hears()

    @rule(name=st.sampled_from(MODELS))
    def an_answer_ends_or_a_client_leaves(self, name: str) -> None:
        if self.answers[name]:
            self.answers[name] -= 1
        else:
            self.waits[name] = 0
        self.beat()
        self.gateway_hears()

    @rule()
    def gateway_hears(self) -> None:
        """Begins what waits for a loaded model, and tells those that wait for one that was refused."""
        for event in self.told:
            if event.HasField("model"):
                self.phases[event.model.deployment] = event.model.phase
                if event.model.HasField("problem"):
                    self.refused.add(event.model.deployment)
            elif event.HasField("model_gone"):
                del self.phases[event.model_gone.deployment]
        self.told.clear()
        for name in MODELS:
            if self.phases.get(name) == LOADED:
                self.answers[name] += self.waits[name]
                self.waits[name] = 0
            if name in self.refused:
                self.waits[name] = 0
        self.refused.clear()
        self.demand()
        self.settle()

    @rule(busy=st.booleans())
    def the_fixed_ring_is_used(self, busy: bool) -> None:
        self.busy = busy
        self.beat()
        self.settle()

    @rule(full=st.booleans())
    def the_disk_is_full_or_not(self, full: bool) -> None:
        self.full = full

    @rule(name=st.sampled_from(MODELS))
    def a_deployment_is_deleted_or_made(self, name: str) -> None:
        if name in self.deployed:
            self.deployed.pop(name)
            self.held.pop(name, None)
            self.waits[name] = self.answers[name] = 0
        else:
            self.deployed[name] = admin_pb2.DeploymentSpec(name=name, stages=1, on_demand=True, keep_alive=90)
        self.store()
        self.gateway_hears()

    @rule()
    def the_coordinator_starts_again(self) -> None:
        if self.deployed:
            self.changes.clear()
            self.freed.clear()
            self.phases.clear()
            self.told.clear()
            for inbox in self.inbox.values():
                inbox.clear()
            self.start()
            draining = {one: known for one, known in self.members.items() if known.draining > WALL + self.now}
            self.drained = {
                one: {f"{name}-0" for name, nodes in self.held.items() if one in nodes} for one in draining
            }
            self.store()
            self.gateway_hears()

    # Plans

    def nodes_for(self, count: int, freed: Iterable[str]) -> tuple[str, ...] | None:
        taken = {node for name, nodes in self.held.items() if name not in freed for node in nodes}
        free = [
            one
            for one, known in self.members.items()
            if one not in taken and not known.draining and self.state.sessions.find(one) is not None
        ]
        return tuple(free[:count]) if len(free) >= count else None

    def end(self, change: Move | Place, error: SealringError | None = None) -> None:
        self.changes.remove(change)
        self.do(self.cluster.ended(change, error, self.now))
        self.settle()

    def make(self, change: Move | Place) -> None:
        """The next part of a change: a model is loaded after room was found."""
        name, machine = change.deployment, self.cluster.on_demand
        if isinstance(change, Move):
            made = self.nodes_for(2 if name == "fixed" else 1, [name])
            if made is None and (change.lost or change.pipeline):
                made = self.nodes_for(1, [name])
            if made is not None and self.cluster.still(change, self.now):
                self.held[name] = made
                self.store()
            self.end(change, None if made else FailedPrecondition("too few nodes"))
        elif name not in self.freed:
            victims = machine.loads.victims(name, self.now)
            places = range(len(victims.now) + 1)
            chosen = next((victims.now[:one] for one in places if self.nodes_for(1, victims.now[:one])), None)
            if chosen is None and not self.nodes_for(1, victims.all):
                self.end(change, ResourceExhausted("too large", reason="DOES_NOT_FIT"))
                return
            freed = machine.room(name, chosen, self.now)
            if freed is None:
                self.end(change)
            else:
                self.freed[name] = freed
        else:
            freed = self.freed.pop(name)
            made = self.nodes_for(1, freed)
            if made is not None and not self.full and self.cluster.still(change, self.now):
                for one in freed:
                    assert not self.answers[one], "no answer is cut off"
                    assert self.now >= self.loaded_at[one] + TURN, "each has its turn"
                    assert not self.deployed[one].pinned
                    del self.held[one]
                self.held[name] = made
                self.store()
            error = Unavailable("full", reason="STATE_UNWRITABLE") if self.full else None
            self.end(change, error if made else ResourceExhausted("too large"))

    @precondition(lambda self: self.changes)
    @rule(which=st.integers(0, 9))
    def a_change_goes_on(self, which: int) -> None:
        self.make(self.changes[which % len(self.changes)])

    @precondition(lambda self: self.changes)
    @rule(which=st.integers(0, 9), error=st.sampled_from([Internal("a defect"), Unavailable("silent")]))
    def a_change_fails(self, which: int, error: SealringError) -> None:
        change = self.changes[which % len(self.changes)]
        self.freed.pop(change.deployment, None) if isinstance(change, Place) else None
        self.end(change, error)

    @rule(seconds=st.sampled_from([0.3, 5.0, 31.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        """As a driver looks: at deadlines alone."""
        end = self.now + seconds
        while (due := self.cluster.deadline(self.now)) < end:
            assert due > self.now, "what is due was done"
            self.now = due
            self.settle()
        self.now = end

    # What holds

    @invariant()
    def rings_in_service_are_those_of_the_roster(self) -> None:
        parked = {one for one, known in self.members.items() if known.draining} - self.cluster.moves.draining
        wanted = {
            ring.ring: ring
            for _, ring in self.state.wanted.planned
            if ring.ring in self.state.wanted.rings and not parked & {stage.member for stage in ring.stages}
        }
        assert {name: one.plan for name, one in self.state.running.items()} == wanted

    @invariant()
    def models_that_hold_memory_have_rings(self) -> None:
        for name, load in self.cluster.on_demand.loads.models.items():
            if load.phase.value == "loaded" and self.loaded_at[name] == -math.inf:
                self.loaded_at[name] = self.now
            elif load.phase.value not in ("loaded", "yielding"):
                self.loaded_at[name] = -math.inf
            if load.phase.value in ("loaded", "yielding"):
                assert name in self.held

    @invariant()
    def gateways_have_been_told_all(self) -> None:
        if self.deployed:
            states = model_states(self.state, self.cluster.on_demand, self.now, WALL + self.now)
            told = {name: one.phase for name, one in self.state.shown.items()}
            assert {one.deployment: one.phase for one in states} == told

    def teardown(self) -> None:
        """Once all is well, every ring serves, and every client has its answer."""
        if not self.deployed:
            return
        self.busy = self.full = False
        self.members = {one: Known(one, 10) for one in NODES}
        self.drained.clear()
        self.store()
        for one in NODES:
            self.come(one, kept=False)
        for _ in range(300):
            for one in NODES:
                self.act(one)
            for change in list(self.changes):
                if change in self.changes:
                    self.make(change)
            self.answers = dict.fromkeys(MODELS, 0)
            self.beat()
            self.gateway_hears()
            self.time_passes(1.0)
        assert self.waits == dict.fromkeys(MODELS, 0)
        assert not self.changes
        assert self.phases.keys() == self.deployed.keys()
        assert self.state.running["fixed-0"].machine.phase is Phase.SERVING
        kept = len(self.held) == len(
            NODES
        )  # where each node holds a ring, and no model is ever idle for too long
        assert len(self.held["fixed"]) == 2 or kept, "it has grown again"
        assert all(one.machine.phase is Phase.SERVING for one in self.state.running.values())
        assert self.cluster.moves.draining == set()


def test_a_member_that_is_trusted_too_little_for_one_ring_stays_in_another() -> None:
    """It is lost to the first alone: its stream stays open, so that nothing would bring it back."""
    world = World()
    world.deployed["fixed"] = admin_pb2.DeploymentSpec(name="fixed", stages=2, trust_floor=20)
    world.deployed["one"] = admin_pb2.DeploymentSpec(name="one", stages=1, on_demand=True)
    world.held = {"fixed": ("a", "b"), "one": ("a",)}
    world.members = {one: Known(one, 20) for one in NODES}
    for one in NODES:
        world.come(one, kept=False)
    world.store()
    for _ in range(3):
        for one in NODES:
            world.act(one)
        world.settle()
    assert {one.machine.phase for one in world.state.running.values()} == {Phase.SERVING}
    world.members["a"] = Known("a", 10)
    world.store()
    world.time_passes(GRACE + 5)
    assert [one.lost for one in world.changes if isinstance(one, Move)] == [{"a"}]
    assert world.state.running.keys() == {"one-0"}
    assert world.state.running["one-0"].machine.phase is Phase.SERVING


def served(*names: str) -> World:
    """A world in which these models are loaded, on the nodes c and d, and a third has found no room."""
    world = World()
    world.begin([0, 0, 0], pinned=False)
    for name in names:
        world.a_client_asks(name)
        through(world)
    world.time_passes(TURN + 1)
    return world


def through(world: World) -> None:
    """Changes are made and epochs form, as far as they go at once."""
    for _ in range(9):
        for change in list(world.changes):
            world.make(change)
        for one in NODES:
            world.act(one)
        world.gateway_hears()


def test_a_model_is_not_unloaded_for_a_client_that_has_left() -> None:
    """Nor while it is planned what takes its place: others ask for it again meanwhile."""
    world = served("one", "two")
    assert world.held.keys() == {"fixed", "one", "two"}
    world.answers = dict.fromkeys(MODELS, 0)
    world.beat()
    world.a_client_asks("three")
    while "three" not in world.freed:
        world.make(world.changes[0])
        world.gateway_hears()
    (victim,) = world.freed["three"]
    world.an_answer_ends_or_a_client_leaves("three")
    world.gateway_hears()
    world.a_client_asks(victim)
    assert world.answers[victim] == 1
    world.make(world.changes[0])
    assert world.held.keys() == {"fixed", "one", "two"}


def test_a_gateway_that_goes_is_forgotten_with_the_wishes_of_its_clients() -> None:
    world = World()
    world.begin([90, 0, 0], pinned=False)
    load = world.cluster.on_demand.loads.models["one"]
    for asked in (1, 2):
        report = ModelDemand(deployment="one", asked=asked, keep_alive=7)
        world.state.watchers.demanded(world.gateway, Demand(models=[report]))
        world.settle()
    assert load.keep_alive == 7
    forgotten = weakref.ref(world.gateway)
    world.state.watchers.remove(world.gateway)
    del world.gateway
    world.settle()
    gc.collect()
    assert forgotten() is None
    assert load.keep_alive == 90


@pytest.mark.parametrize(("gone", "seconds"), [(True, 0.0), (False, SETTINGS.heartbeat_timeout)])
def test_who_says_goodbye_is_missed_at_once_and_a_stream_that_breaks_after_a_while(
    gone: bool, seconds: float
) -> None:
    world = served("one")
    ring = world.state.running["one-0"].machine
    (node,) = world.held["one"]
    world.go("a", gone=False)
    world.go(node, gone=gone)
    world.time_passes(seconds - 0.1)
    assert (ring.phase is Phase.SERVING) == (not gone)
    world.time_passes(10.0)
    assert (ring.phase is Phase.SERVING) == (not gone), "nothing at all is heard of a ring of one"
    fixed = world.state.running["fixed-0"].machine
    assert fixed.phase is Phase.WAITING
    assert fixed.reason == "a is offline"


def test_what_serves_goes_on_when_the_coordinator_starts_again() -> None:
    """A ring of which a member has lost its epoch does not."""
    world = served("one", "two")
    before = {name: one.machine.epoch for name, one in world.state.running.items()}
    world.the_coordinator_starts_again()
    for node in NODES:
        world.come(node, kept=node != world.held["two"][0])
    world.time_passes(SETTINGS.heartbeat_timeout + 1)
    for node in NODES:
        world.act(node)
    world.gateway_hears()
    assert {one.ring for one in world.ended} <= {"two-0"}
    after = {name: one.machine.epoch for name, one in world.state.running.items()}
    assert after == before | {"two-0": before["two-0"] + 1}
    assert world.state.running["one-0"].machine.phase is Phase.SERVING
    assert world.cluster.on_demand.loads.models["one"].phase.value == "loaded"


def test_models_that_have_yielded_in_vain_stay() -> None:
    world = served("one", "two")
    world.answers = dict.fromkeys(MODELS, 0)
    world.beat()
    world.a_client_asks("three")
    while "three" not in world.freed:
        world.make(world.changes[0])
        world.gateway_hears()
    (victim,) = world.freed.pop("three")
    loads = world.cluster.on_demand.loads
    assert loads.models[victim].phase.value == "yielding"
    world.end(world.changes[0], ResourceExhausted("nodes have less memory now"))
    assert loads.models[victim].phase.value == "loaded"
    assert loads.yielded_to == ""


def loading() -> tuple[World, str]:
    """A model that was placed on a node and has not come up yet."""
    world = World()
    world.begin([0, 0, 0], pinned=False)
    world.a_client_asks("one")
    while "one" not in world.held:
        world.make(world.changes[0])
    (node,) = world.held["one"]
    return world, node


def test_a_load_does_not_wait_long_for_a_member_that_has_left() -> None:
    """It is placed on other nodes: no answer depends on it yet."""
    world, node = loading()
    world.go(node, gone=False)
    world.settle()
    world.time_passes(LOST_SECONDS - 0.5)
    assert "one" in world.held
    world.time_passes(2.0)
    through(world)
    assert world.held["one"] != (node,)
    assert world.answers["one"] == 1


def test_a_load_that_cannot_be_given_up_is_not_tried_at_every_look() -> None:
    """While the disk is full; `settle` refuses what is due again and again."""
    world, node = loading()
    world.a_node_is_evicted_or_joins_again(node)
    world.the_disk_is_full_or_not(full=True)
    world.time_passes(LOST_SECONDS + 1)
    assert "one" in world.held


def test_a_load_that_does_not_form_is_given_up_after_three_tries() -> None:
    world = World()
    world.begin([0, 0, 0], pinned=False)
    world.a_client_asks("one")
    for _ in range(40):
        for change in list(world.changes):
            world.make(change)
        for name, running in list(world.state.running.items()):
            if name == "one-0" and running.machine.phase is Phase.PREPARING:
                world.an_epoch_breaks(running.machine.members[0], "one")
        world.gateway_hears()
        if not world.waits["one"]:
            break
        world.time_passes(1.0)
    assert world.waits["one"] == 0
    assert "one" not in world.held
    error = world.cluster.on_demand.loads.models["one"].error
    assert error is not None
    assert error.reason == "MODEL_NOT_LOADED"
    assert "it died" in error.message


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
