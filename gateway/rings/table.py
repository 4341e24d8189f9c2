"""Rings that exist, and what each of them may serve: by the verified roster and by the coordinator's word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sealring.edge.metrics import ModelLoad
from sealring.gateway.rings.models import ModelStates
from sealring.gateway.rings.ring import Ring
from sealring.mesh.clock import Clock, awake_clock, wall_clock
from sealring.mesh.prompt.tools import capabilities_of
from sealring.mesh.roster import model as rosters
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import membership_pb2 as membership

MAX_RINGS = 4096
"""Rings of which the coordinator's states are kept."""


class RingTable:
    """The rings of this gateway by name and by deployment, with their trust and their states.

    A ring may be here that no roster holds at the moment: it is being planned anew.
    """

    def __init__(self, wall: Clock = wall_clock, awake: Clock = awake_clock) -> None:
        self._wall = wall
        self._rings: dict[str, Ring] = {}
        self._by_deployment: dict[str, list[Ring]] = {}
        self._created: dict[str, int] = {}
        self._trust: dict[str, int] = {}
        self._in_clear: set[str] = set()
        self.roster: rosters.Roster | None = None
        self.states: dict[str, membership.RingState] = {}
        self.models_named = ModelStates(awake)

    def __iter__(self) -> Iterator[Ring]:
        return iter(list(self._rings.values()))

    def get(self, name: str) -> Ring | None:
        return self._rings.get(name)

    def of(self, deployment: str) -> Sequence[Ring]:
        return self._by_deployment.get(deployment, ())

    def add(self, ring: Ring) -> None:
        self._rings[ring.name] = ring
        self._by_deployment.setdefault(ring.deployment, []).append(ring)

    def remove(self, name: str) -> Ring:
        """Takes a ring out. Raises KeyError."""
        ring = self._rings.pop(name)
        others = [other for other in self._by_deployment.pop(ring.deployment) if other is not ring]
        if others:
            self._by_deployment[ring.deployment] = others
        return ring

    def use_roster(self, roster: rosters.Roster | None) -> None:
        self.roster = roster
        self._in_clear = {ring.id for ring in self.signed() if ring.clear_links}
        self._trust = {ring.id: 0 if ring.clear_links else ring.min_trust for ring in self.signed()}
        for ring in self.signed():
            self._created.setdefault(ring.deployment, int(self._wall()))

    def use_state(self, state: membership.RingState) -> bool:
        """Takes a state of the coordinator; False for a new ring where there are too many."""
        if state.ring not in self.states and len(self.states) >= MAX_RINGS:
            return False
        self.states[state.ring] = state
        return True

    def signed(self) -> Sequence[rosters.Ring]:
        """The rings in the roster; none once it has expired."""
        return self.roster.rings if self.roster else ()

    def trust(self, ring: Ring, unknown: int = 0) -> int:
        """The trust that the roster gives a ring; `unknown` where no roster holds it at the moment."""
        return self._trust.get(ring.name, unknown)

    def in_clear(self, ring: Ring) -> bool:
        """Whether the ring's links are in clear."""
        return ring.name in self._in_clear

    def deployments(self) -> list[str]:
        """The names of the models that can be asked for."""
        named = (state.deployment for state in self.models_named)
        on_demand = {name for name in named if self.models_named.on_demand(name)}
        return sorted(
            {*self._by_deployment, *(state.deployment for state in self.states.values()), *on_demand}
        )

    def models(self) -> list[inference.Model]:
        """One entry per deployment."""
        return [self._model(name) for name in self.deployments()]

    def serving(self) -> list[inference.RingLoad]:
        """The rings that serve, with their load."""
        found = []
        for ring in self:
            if ring.attached and ring.serving:
                load, state = ring.load(), self.states.get(ring.name)
                found.append(
                    inference.RingLoad(
                        ring=ring.name,
                        waiting=load.waiting,
                        running=load.running,
                        rows=ring.serving.max_rows,
                        model_type=state.model_type if state else "",
                        capabilities=ring.abilities.capabilities,
                        vision_not_installed=ring.abilities.vision_not_installed,
                    )
                )
        return found

    def loads(self) -> dict[str, ModelLoad]:
        """The load of each model, summed over its rings."""
        loads: dict[str, ModelLoad] = {}
        for ring in self:
            load, (tokens, held) = ring.load(), ring.kept()
            model = loads.setdefault(ring.deployment, ModelLoad())
            model.waiting += load.waiting
            model.running += load.running
            model.kv_usage = max(model.kv_usage, load.kv_usage)
            model.kept_tokens += tokens
            model.kept_bytes += held
        return loads

    def _model(self, name: str) -> inference.Model:
        rings = self.of(name)
        signed = [ring for ring in self.signed() if ring.deployment == name]
        serving = [ring for ring in rings if ring.attached and ring.serving]
        model = inference.Model(
            name=name,
            model_type=self._model_type(name),
            context=min((ring.context for ring in signed), default=0),
            min_trust=min((ring.min_trust for ring in signed), default=0),
            rings=len(serving),
            rows=sum(ring.serving.max_rows for ring in serving if ring.serving),
            created=self._created.get(name, 0),
            digest=next((ring.model_digest.hex() for ring in signed), ""),
            capabilities=capabilities_of(one for ring in rings for one in ring.abilities.capabilities),
            vision_not_installed=any(ring.abilities.vision_not_installed for ring in rings),
        )
        self.models_named.describe(model)
        if not model.rings and not model.reason:
            model.reason = next((one.reason for one in self._states_of(name) if one.reason), "")
        return model

    def _model_type(self, name: str) -> str:
        """The coordinator's word; it has one for a ring that is still forming, too."""
        return next((state.model_type for state in self._states_of(name) if state.model_type), "")

    def _states_of(self, name: str) -> Iterator[membership.RingState]:
        return (state for state in self.states.values() if state.deployment == name)
