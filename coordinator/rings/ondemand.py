"""Models on demand among the rings and nodes of a cluster. Pure; times are arguments.

Which models are loaded is stored: such a deployment has rings. All else is heard anew from gateways and nodes
by the next coordinator, for which every loaded model begins its turn and its keep-alive again. What is loaded
next, and what makes room for it, is decided in `loads.py`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sealring.coordinator.rings import epochs, loads
from sealring.coordinator.rings.actions import Action, Note, Place, Unload
from sealring.coordinator.rings.loads import Heard, Load, LoadPhase, Loads, Policy, and_, not_loaded, verb
from sealring.coordinator.rings.running import RunningRing
from sealring.coordinator.rings.state import State
from sealring.mesh.errors import Internal, RosterError, SealringError, Unavailable
from sealring.mesh.ring.wishes import Wishes
from sealring.v1.membership_pb2 import ModelDemand

LOST_SECONDS = 5.0
"""How long a ring that has never served waits for a member before it is planned anew without it: no answer
depends on it yet, so a shorter time than `replace_after` costs nothing but a load."""

ABSENT_SECONDS = 30.0
"""How long a node may have been away when a model is asked for, so that what waits for the model waits for
the node: as long as a ring waits for a member by default (`replace_after`). A node that goes later is waited
for until it comes, because it may be asleep. None has gone before its coordinator started."""

_FAILURES = 2
"""Epochs in a row that end before they serve, after which a load begins anew."""

_AGAIN_SECONDS = 1.0
"""Until what could not be written, or was overtaken by a change, is tried again."""


@dataclass
class _Demand:
    """What each gateway's stream has said of one model: how often it was asked for, and for how long."""

    asked: dict[Hashable, int] = field(default_factory=dict)
    wishes: Wishes[Hashable] = field(default_factory=Wishes)

    def hear(self, reports: Mapping[Hashable, ModelDemand | None], now: float) -> bool:
        """Takes the newest reports of all streams; whether the model was asked for since the last ones."""
        before, used = self.asked, False
        self.asked = {stream: one.asked if one else 0 for stream, one in reports.items()}
        self.wishes.keep([stream for stream, one in reports.items() if one])  # a gateway takes them along
        for stream, one in reports.items():
            if one and one.asked > before.get(stream, 0):
                keep_alive = one.keep_alive if one.keep_alive >= 0 else math.inf
                self.wishes.ask(stream, keep_alive if one.HasField("keep_alive") else None, now)
            used |= bool(one) and self.asked[stream] > before.get(stream, self.asked[stream])
        return used


class OnDemand:
    """The models on demand of a cluster. One is placed at a time."""

    def __init__(self, state: State, now: float) -> None:
        self.loads = Loads()
        self.absent_seconds = ABSENT_SECONDS
        self._state = state
        self._demands: dict[str, _Demand] = {}
        self._missed: dict[str, float] = {}
        """The models that were placed by this coordinator and do not serve yet: since when their rings have
        lacked a member, or infinity."""
        self._stuck: dict[str, str] = {}
        """Why models are unloaded whose rings do not form."""
        self._placing = self._overtaken = False
        """A model is being placed; nodes or deployments have changed since."""
        self._freed: list[str] | None = None
        """The models in place of which it is loaded, once that is decided."""
        self._began = now
        self._gone: dict[str, float] = {}

    # Events

    def came(self, member: str, now: float) -> None:
        """A node's stream is there: there may be room."""
        self._gone.pop(member, None)
        self.look_anew(now)

    def left(self, member: str, now: float) -> None:
        """A node's stream broke or ended. The node may come back, unless it was evicted."""
        self._gone[member] = now

    def look_anew(self, now: float) -> None:
        """No refusal of the past holds any longer, nor one that is being found out."""
        self._overtaken = True
        self.loads.look_anew(now)

    def due(self, now: float) -> Iterator[Action]:
        """Takes in what gateways and nodes report; the models to unload and to place."""
        self._sync(now)
        said = {
            stream: {one.deployment: one for one in reversed(demand.models)}
            for stream, demand in self._state.watchers.demands.items()
        }
        for name, load in self.loads.models.items():
            self._hear(name, load, {stream: models.get(name) for stream, models in said.items()}, now)
        for name, load in self.loads.models.items():
            if load.phase is LoadPhase.LOADING:
                yield from self._follow(name, now)
        for name in self.loads.tick(now):
            yield Unload(name, "nobody uses it")
        waiting = self.loads.waiting(now)
        if waiting and not self._placing:
            self._placing, self._overtaken = True, False
            yield Place(waiting[0])

    @property
    def waits(self) -> bool:
        """Whether time alone changes a model."""
        models = self.loads.models.values()
        return any(load.phase is not LoadPhase.NOT_LOADED or load.wanted or load.error for load in models)

    # Places

    def room(self, name: str, chosen: Sequence[str] | None, now: float) -> list[str] | None:
        """The models to unload for one that waits, if that may be now; else None.

        It fits once those `chosen` are unloaded; with None only once others are that may not be now.
        """
        models = self.loads
        if not self._waits(name):
            return None
        if models.yielded_to == name:
            self._freed = models.freed(name)
        elif chosen is not None and not chosen:
            self._freed = []
        elif chosen is None or models.yielded_to:
            models.postponed(name, models.victims(name, now), now)
        else:
            models.make_room(name, chosen, now)
        return self._freed

    def still(self, place: Place) -> bool:
        """Whether a model waits yet, and those in place of which it is loaded are quiet."""
        return self._waits(place.deployment) and self.loads.freed(place.deployment) == self._freed

    def placed(self, place: Place, error: SealringError | None, now: float) -> Iterator[Action]:
        """The end of a Place: the model has rings, or waits for room, or could not be loaded for an error.

        For the error what waits for it fails, unless nodes are awaited, or came or changed meanwhile: such
        nodes may not have been asked for the model, so all are asked again.
        """
        name, freed = place.deployment, self._freed
        self._placing, self._freed = False, None
        waited = self._waits(name)
        self._sync(now)
        load = self.loads.models.get(name)
        if load is None or (error is not None and self._overtaken):
            return
        if error is None:
            if waited and load.phase is LoadPhase.LOADING:
                self._missed[name] = math.inf
                yield Note("model_placed", {"deployment": name, "unloaded": freed})
        elif isinstance(error, Internal) or error.reason == "NODES_CHANGED":
            load.not_before = now + _AGAIN_SECONDS
        elif freed and not isinstance(error, RosterError | Unavailable):  # of which no room would help
            self.loads.keep_all(name, now)
            yield Note("room_not_enough", {"deployment": name, "reason": error.reason})
        elif waited and (awaited := self._away(load.asked_since - self.absent_seconds)):
            load.not_before, load.reason = now + loads.LOOK_SECONDS, f"it waits for {and_(awaited)}"
        else:
            if away := self._away(-math.inf):
                error = not_loaded(name, f"{and_(away)} {verb(away)} away, and {error.message}")
            self.loads.refused(name, error, now)
            fields = {"deployment": name, "reason": error.reason, "why": error.message}
            yield Note("model_refused", fields, serious=True)

    def _waits(self, name: str) -> bool:
        load = self.loads.models.get(name)
        return load is not None and load.phase is LoadPhase.WAITING

    # What is heard and seen

    def _sync(self, now: float) -> None:
        deployed = {}
        for one in self._state.wanted.deployments:
            if (spec := one.plan.spec).on_demand:
                policy = Policy(spec.keep_alive or math.inf, spec.pinned)
                deployed[one.name] = policy, bool(one.plan.rings)
        self.loads.sync(deployed, now)
        for name, why in self._stuck.items():
            if name in self.loads.models and self.loads.models[name].phase is LoadPhase.NOT_LOADED:
                self._missed.pop(name, None)
                self.loads.stuck(name, why, now)
        self._stuck.clear()
        for kept in (self._demands, self._missed):
            for name in kept.keys() - self.loads.models.keys():
                del kept[name]

    def _hear(
        self, name: str, load: Load, reports: Mapping[Hashable, ModelDemand | None], now: float
    ) -> None:
        demand = self._demands.setdefault(name, _Demand())
        if load.phase is LoadPhase.NOT_LOADED:
            demand.wishes = Wishes()  # they held for the last load
        known = [one for one in reports.values() if one is not None]
        heard = Heard(
            active=self._steps(name) or any(one.active for one in known),
            waiting=sum(one.waiting for one in known),
            used=demand.hear(reports, now),
            holding=len(known) == len(reports) and all(one.holding for one in known),
            keep_alive=demand.wishes.longest(load.policy.keep_alive),
        )
        self.loads.hear(name, heard, now)

    def _steps(self, name: str) -> bool:
        """Whether a ring of a model executes steps by the word of its members: of a gateway that is cut off
        from this coordinator, or of an earlier release, nothing else is known."""
        return any(
            running.machine.phase is epochs.Phase.SERVING
            and not all(self._state.is_idle(stage.member, ring) for stage in running.plan.stages)
            for ring, running in self._running(name)
        )

    def _running(self, name: str) -> list[tuple[str, RunningRing]]:
        running = self._state.running
        return [(ring, running[ring]) for ring in self._state.wanted.rings_of(name) if ring in running]

    def _follow(self, name: str, now: float) -> Iterator[Action]:
        """Notes that all rings of a model serve, or gives up a load that gets nowhere."""
        machines, load = [running.machine for _, running in self._running(name)], self.loads.models[name]
        whole = len(machines) == len(self._state.wanted.rings_of(name))
        if whole and all(one.phase is epochs.Phase.SERVING for one in machines):
            self._missed.pop(name, None)
            self.loads.serving(name, now)
            return
        if name in self._missed:
            complete = whole and not any(one.awaited for one in machines)
            self._missed[name] = math.inf if complete else min(self._missed[name], now)
        failed = next((one for one in machines if one.failures >= _FAILURES), None)
        lost = now >= self._missed.get(name, math.inf) + LOST_SECONDS
        if (failed is not None or lost) and now >= load.not_before:
            load.not_before = now + loads.LOOK_SECONDS  # until it is tried again, if nothing can be stored
            faulty = failed or next((one for one in machines if one.awaited), None)
            why = faulty.reason if faulty else "a member of its rings has left"
            yield Note("model_not_loaded", {"deployment": name, "why": why}, serious=True)
            self._stuck[name] = why
            yield Unload(name, why)

    def _away(self, since: float) -> list[str]:
        """The names of nodes that are away and went later than `since`, or have not come yet since this
        coordinator began."""
        members = self._state.wanted.members
        self._gone = {member: at for member, at in self._gone.items() if member in members}
        return [
            one.name
            for member, one in members.items()
            if not one.draining
            and self._state.sessions.find(member) is None
            and self._gone.get(member, self._began) > since
        ]
