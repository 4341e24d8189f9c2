"""The cluster's machine: brings what is seen of nodes, gateways and epochs to what is wanted. Pure.

    wanted: the deployments and the newest roster (`stored`), demand and drains
    seen:   nodes (`came`, `left`), gateways (`gateway_came`), epochs (`reports`), time (`look`)
    done:   messages (Send, Tell), changes of plans (Move, Place, Unload), Drained, Note

Every method takes the time in seconds of a clock that stands still while this machine sleeps, and returns
what is to be done, in order. Call `look` after every event and at `deadline`.

* The rings in service are those of the newest roster without members whose drain is over.
* A ring has one move under way at most, and one model is placed at a time.
* A drain is over only once each ring of its member has moved, or could not.
* Nothing is due twice: a `look` that is repeated does nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping

from sealring.coordinator.nodes.links import Links
from sealring.coordinator.planning.speeds import Speeds
from sealring.coordinator.rings import epochs
from sealring.coordinator.rings.actions import Action, Change, Drained, Move, Tell
from sealring.coordinator.rings.epochs import RingEpochs, Timeouts
from sealring.coordinator.rings.following import ended, follow
from sealring.coordinator.rings.moves import Moves
from sealring.coordinator.rings.ondemand import OnDemand
from sealring.coordinator.rings.reports import Reports
from sealring.coordinator.rings.running import RunningRing, reported_links
from sealring.coordinator.rings.state import State, Wanted
from sealring.coordinator.rings.views import model_states
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.errors import FailedPrecondition, SealringError
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import ServingEpoch, WatchResponse

LOOK_SECONDS = 1.0
"""Between looks at what only time changes."""


class Cluster:
    """One machine for all rings and models. `state` is what it decides by."""

    def __init__(
        self,
        state: State,
        speeds: Speeds,
        links: Links,
        settings: CoordinatorSettings,
        next_epoch: Callable[[str], int],
        now: float,
    ) -> None:
        """`speeds` and `links` take what nodes measure; `next_epoch` gives a ring's next number (see
        `RingEpochs`)."""
        self.state = state
        self.moves = Moves(state, settings.replace_after)
        self.on_demand = OnDemand(state, now)
        self.reports = Reports(state, self.moves, speeds, links)
        self._next_epoch = next_epoch
        self._timeouts = Timeouts(
            settings.prepare_timeout, settings.commit_timeout, settings.heartbeat_timeout
        )
        self._returning = True

    # Events

    def stored(self, wanted: Wanted, now: float, wall: float) -> list[Action]:
        """What is stored has changed. `wall` is the time in seconds since 1970."""
        self.state.wanted = wanted
        self.moves.stored(now, wall, first=self._returning)
        actions = self._sync(now)
        self._returning = False
        self.on_demand.look_anew(now)
        return actions

    def came(self, member: str, reported: Mapping[str, ServingEpoch], now: float) -> list[Action]:
        """A node's stream is there, or the node has proved which software it runs.

        `reported` are the epochs that it has up, by ring, whose numbers and rosters are of this coordinator.
        One goes on if it would be prepared alike now.
        """
        self.on_demand.came(member, now)
        actions: list[Action] = []
        for running in self.state.of(member) if self.state.is_here(member) else ():
            one, machine = reported.get(running.plan.ring, ServingEpoch()), running.machine
            known = one.prepared
            protocol = known.protocol if machine.undecided else running.protocol
            as_now = running.prepare(
                running.stage_of(member), known.epoch, known.roster_version, known.roster_hash, protocol
            )  # the node itself checks that its ring has the same members and layers in each new roster
            serving = known.epoch if known == as_now else 0
            if serving and machine.undecided:
                running.protocol = known.protocol
            links = reported_links(one.links, running)
            decided = machine.online(member, now, serving=serving, links=links)
            actions += follow(self.state, running, decided, now)
        return actions

    def left(self, member: str, now: float, *, gone: bool) -> list[Action]:
        """A node's stream broke; or the node is `gone`: it said goodbye, or was thrown out."""
        self.moves.look_anew()
        self.on_demand.left(member, now)
        actions: list[Action] = []
        for running in self.state.of(member):
            event = running.machine.offline if gone else running.machine.lost
            actions += follow(self.state, running, event(member, now), now)
        return actions

    def gateway_came(self, now: float) -> list[Action]:
        """Forms rings anew whose protocol a new gateway lacks, if members and gateways share another.

        Such rings formed while the gateway was away, for example after a restart of this coordinator.
        """
        actions: list[Action] = []
        for running in self.state.running.values():
            machine = running.machine
            if machine.undecided or not running.protocol:
                continue
            with contextlib.suppress(FailedPrecondition):
                if self.state.protocol(running) >= running.protocol:
                    continue
                why = f"a gateway came that does not speak protocol {running.protocol}"
                actions += follow(
                    self.state, running, machine.fault(machine.members[0], machine.epoch, why, now), now
                )
        return actions

    def look(self, now: float, wall: float) -> list[Action]:
        """What is due at this time."""
        actions: list[Action] = []
        for running in self.state.running.values():
            actions += follow(self.state, running, running.machine.tick(now), now)
        for name, member in self.moves.note(now):  # also of a serving ring whose members are all silent
            running = self.state.running[name]
            actions += follow(self.state, running, running.machine.offline(member, now), now)
        moves = self.moves.due(now)
        if any(isinstance(one, Drained) for one in moves):
            actions += self._sync(now)
        actions += [*moves, *self.on_demand.due(now)]
        return [*actions, *self._news(now, wall)]

    def deadline(self, now: float) -> float:
        """The time of the next `look` that may have work; infinity if only events bring it."""
        dues = [due for one in self.state.running.values() if (due := one.machine.deadline()) is not None]
        waits = self.moves.waits or self.on_demand.waits
        return min(*dues, now + LOOK_SECONDS if waits else math.inf, math.inf)

    def still(self, change: Change, now: float) -> bool:
        """Whether a change of plans is wanted yet."""
        if isinstance(change, Move):
            return self.moves.still(change, now)
        return self.on_demand.still(change)

    def ended(self, change: Change, error: SealringError | None, now: float) -> Iterator[Action]:
        """A change of plans was made, was not wanted any more, or failed with an error."""
        if isinstance(change, Move):
            return self.moves.moved(change, error)
        return self.on_demand.placed(change, error, now)

    # Rings

    def _sync(self, now: float) -> list[Action]:
        """Starts, replaces and ends rings, so that those of the newest roster are in service."""
        state, actions = self.state, list[Action]()
        planned = {ring.ring for _, ring in state.wanted.planned}
        wanted = {ring.ring: (ring, plan) for ring, plan in self._wanted()}
        state.not_moved = {name: why for name, why in state.not_moved.items() if name in planned}
        for name, running in list(state.running.items()):
            if name not in wanted:
                actions += self._end(name, gone=name not in planned)
            elif wanted[name][0] != running.plan:
                staying = {stage.member for stage in wanted[name][0].stages}
                actions += self._end(name, gone=False, staying=staying)
        for name, (ring, plan) in wanted.items():
            if name not in state.running:
                actions += self._start(ring, plan, now)
        return actions

    def _wanted(self) -> Iterator[tuple[admin_pb2.RingPlan, admin_pb2.DeploymentPlan]]:
        wanted, serves = self.state.wanted, self.moves.draining
        parked = {member for member, one in wanted.members.items() if one.draining} - serves
        for deployment, ring in wanted.planned:
            if ring.ring in wanted.rings and not any(stage.member in parked for stage in ring.stages):
                yield ring, deployment.plan

    def _start(
        self, ring: admin_pb2.RingPlan, plan: admin_pb2.DeploymentPlan, now: float
    ) -> Iterator[Action]:
        name = ring.ring
        machine = RingEpochs(
            {stage.member: stage.member_name for stage in ring.stages},
            lambda: self._next_epoch(name),
            self._timeouts,
            undecided=self._returning,
            weights={stage.member: stage.weight_bytes for stage in ring.stages},
        )
        self.state.not_moved.pop(name, None)
        running = self.state.running[name] = RunningRing(ring, plan, machine, self.state.patience)
        yield Tell(WatchResponse(ring=running.state()))
        for stage in ring.stages:
            if self.state.is_here(stage.member):
                yield from follow(self.state, running, machine.online(stage.member, now), now)

    def _end(self, name: str, *, gone: bool, staying: Collection[str] = ()) -> Iterator[Action]:
        running = self.state.running.pop(name)
        kept = any(one.name == running.spec.name for one in self.state.wanted.deployments)
        reason = "its members are changing"
        if gone:
            reason = "the model was unloaded" if kept else "the deployment was deleted"
        for one in running.machine.close(reason):
            if isinstance(one, epochs.End):
                yield from ended(running, one, unload=True, staying=staying)
        down = running.state()
        down.reason = reason
        end = WatchResponse(gone=membership_pb2.RingGone(ring=name)) if gone else WatchResponse(ring=down)
        yield Tell(end)

    # Models

    def _news(self, now: float, wall: float) -> Iterator[Action]:
        """What has changed of the models for gateways."""
        states = {one.deployment: one for one in model_states(self.state, self.on_demand, now, wall)}
        for name in self.state.shown.keys() - states.keys():
            yield Tell(WatchResponse(model_gone=membership_pb2.ModelGone(deployment=name)))
        for name, state in states.items():
            if self.state.shown.get(name) != state:
                yield Tell(WatchResponse(model=state))
        self.state.shown = states
