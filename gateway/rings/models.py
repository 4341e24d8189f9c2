"""The models that the coordinator names beside rings: those on demand, and further names of any model."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator

from sealring.gateway.scheduler.queue import retry_after
from sealring.mesh.clock import Clock, awake_clock
from sealring.mesh.errors import NotFound, SealringError, Unavailable
from sealring.mesh.ring.limits import MAX_KEEP_ALIVE
from sealring.mesh.ring.wishes import Wishes
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.rpc.protocol12 import read_singly, say_singly
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import membership_pb2 as membership
from sealring.v1.membership_pb2 import Demand, ModelDemand, ModelState

MAX_MODELS = 4096
"""Models of which the coordinator's states are kept."""

_ABSENT = frozenset(
    {
        membership.LOAD_PHASE_NOT_LOADED,
        membership.LOAD_PHASE_WAITING,
        membership.LOAD_PHASE_LOADING,
    }
)
_AVAILABILITY = {
    membership.LOAD_PHASE_NOT_LOADED: inference.MODEL_AVAILABILITY_NOT_LOADED,
    membership.LOAD_PHASE_WAITING: inference.MODEL_AVAILABILITY_LOADING,
    membership.LOAD_PHASE_LOADING: inference.MODEL_AVAILABILITY_LOADING,
    membership.LOAD_PHASE_LOADED: inference.MODEL_AVAILABILITY_LOADING,
    membership.LOAD_PHASE_YIELDING: inference.MODEL_AVAILABILITY_NOT_LOADED,
}
"""States of a model on demand without a serving ring, as clients see them. In the last two phases the
model has just lost its ring: it forms anew, or the coordinator is about to report the model as not loaded."""


class ModelStates:
    """States of models by deployment, and what this gateway's clients want of those on demand."""

    def __init__(self, awake: Clock = awake_clock) -> None:
        """`awake` counts seconds without those in which this machine slept."""
        self._awake = awake
        self._states: dict[str, ModelState] = {}
        self._asked: Counter[str] = Counter()
        self._loading: Counter[str] = Counter()  # clients that wait for a model and have sent no request
        self._wishes: dict[str, Wishes[str]] = {}  # of tenants, while a model is loaded
        self._changed = asyncio.Event()
        self.wanted = asyncio.Event()
        """Set when the coordinator should hear of a change at once."""

    def __iter__(self) -> Iterator[ModelState]:
        return iter(list(self._states.values()))

    def get(self, name: str) -> ModelState | None:
        return self._states.get(name)

    def use(self, state: ModelState) -> bool:
        """Takes a state of the coordinator; False for a new model where there are too many."""
        name = state.deployment
        if name not in self._states and len(self._states) >= MAX_MODELS:
            return False
        read_singly(state, "card")
        self._states[name] = state
        if state.phase == membership.LOAD_PHASE_NOT_LOADED and not self._loading[name]:
            self._wishes.pop(name, None)
        self.look()
        self.wanted.set()
        return True

    def remove(self, name: str) -> None:
        """Forgets a model."""
        self._states.pop(name, None)
        self._wishes.pop(name, None)
        self.look()

    def on_demand(self, name: str) -> bool:
        """Whether a model is on demand: its rings are kept while it is not loaded."""
        state = self._states.get(name)
        return state is not None and state.phase != membership.LOAD_PHASE_UNSPECIFIED

    def absent(self, name: str) -> bool:
        """Whether a model is on demand and not loaded."""
        state = self._states.get(name)
        return state is not None and state.phase in _ABSENT

    def holding(self, name: str) -> bool:
        """Whether no further request of a model may begin."""
        state = self._states.get(name)
        return state is not None and state.phase == membership.LOAD_PHASE_YIELDING

    def aliases(self) -> dict[str, str]:
        """Further names of models, each with the deployment's."""
        return {alias: state.deployment for state in self._states.values() for alias in state.aliases}

    def problem(self, name: str) -> SealringError | None:
        """The reason why a model on demand could not be loaded a moment ago."""
        state = self._states.get(name)
        return from_problem(state.problem) if state is not None and state.problem.code else None

    def ask(self, name: str, keep_alive: int | None, tenant: str) -> None:
        """Counts a tenant's request for a model."""
        if not self.on_demand(name):
            return
        self._asked[name] += 1
        seconds = None if keep_alive is None else _seconds(min(keep_alive, MAX_KEEP_ALIVE))
        self._wishes.setdefault(name, Wishes()).ask(tenant, seconds, self._awake())
        self.wanted.set()

    def check(self, name: str, patience: float) -> None:
        """Raises Unavailable (MODEL_LOADING) if a model will not be loaded within `patience` seconds, and
        the reason why it could not be loaded a moment ago."""
        state = self._states.get(name)
        if state is None or not self.absent(name):
            return
        if (problem := self.problem(name)) is not None:
            raise problem
        if state.seconds > patience:
            raise self.loading_error(name)

    def loading_error(self, name: str) -> Unavailable:
        """The error for a request whose deadline is earlier than the model."""
        state = self._states.get(name) or ModelState()
        why = f": {state.reason}" if state.reason else ""
        return Unavailable(
            f"{name} is being loaded{why}",
            hint="try again later, or with a later deadline",
            reason="MODEL_LOADING",
            retry_after=retry_after(state.seconds or 5),
        )

    async def loaded(self, name: str, ready: Callable[[], bool]) -> None:
        """Waits until a model is loaded and `ready`, which `look` asks again. Raises what keeps it from
        being loaded, and NotFound (MODEL_NOT_FOUND) if it is deleted meanwhile."""
        self._loading[name] += 1
        self.wanted.set()
        try:
            while self.absent(name) or not ready():
                if (problem := self.problem(name)) is not None:
                    raise problem
                if not self.on_demand(name):
                    raise NotFound(f"there is no model {name!r}", reason="MODEL_NOT_FOUND", param="model")
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._loading[name] -= 1
            self.wanted.set()

    def look(self) -> None:
        """Wakes those who wait in `loaded`."""
        self._changed.set()

    def demand(self, counts: Callable[[str], tuple[int, int]]) -> Demand | None:
        """The report for the coordinator; None if no model is on demand. `counts` are a model's requests
        that a ring has begun, and those that wait."""
        found = []
        for name in sorted(self._states):
            if not self.on_demand(name):
                continue
            active, waiting = counts(name)
            one = ModelDemand(
                deployment=name,
                active=active,
                waiting=waiting + self._loading[name],
                asked=self._asked[name],
                holding=self.holding(name),
            )
            deployed = _seconds(self._states[name].keep_alive)
            if name in self._wishes and (longest := self._wishes[name].longest(deployed)) is not None:
                one.keep_alive = math.ceil(longest) if math.isfinite(longest) else -1
            found.append(one)
        return Demand(models=found) if found else None

    def describe(self, model: inference.Model) -> None:
        """Adds what is known of a model to its description."""
        state = self._states.get(model.name)
        if model.rings:
            model.availability = inference.MODEL_AVAILABILITY_LOADED
        if state is None:
            return
        if self.on_demand(model.name) and (self.absent(model.name) or not model.rings):
            unknown = inference.MODEL_AVAILABILITY_UNSPECIFIED  # of a newer coordinator
            model.availability = _AVAILABILITY.get(state.phase, unknown)
        model.aliases.extend(state.aliases)
        model.memory, model.reason, model.progress = state.memory, state.reason, state.progress
        model.digest = model.digest or state.digest
        model.card.CopyFrom(state.card)
        say_singly(model, "card")
        model.context = model.context or state.context
        model.model_type = model.model_type or state.model_type
        if not self.absent(model.name):
            model.expires = state.expires


def _seconds(keep_alive: int) -> float:
    return math.inf if keep_alive < 0 else float(keep_alive)
