"""Rings and models as gateways, operators and other parts of the coordinator see them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.loads import LoadPhase
from sealring.coordinator.rings.ondemand import OnDemand
from sealring.coordinator.rings.running import RunningRing
from sealring.coordinator.rings.state import State
from sealring.coordinator.store import StoredDeployment
from sealring.mesh.errors import FailedPrecondition, InvalidInput, NotFound
from sealring.mesh.names import ring_id
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.rpc.protocol12 import say_singly
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import ModelState, RingState, WatchResponse

_SHOWN = 8
_SHOWN_SECONDS = 10
"""Times are rounded to this before gateways get them: exact ones change with every request and second."""

_SHOWN_PERCENT = 5
"""Progress is rounded to this before gateways get it."""

_PHASES = {
    LoadPhase.NOT_LOADED: membership_pb2.LOAD_PHASE_NOT_LOADED,
    LoadPhase.WAITING: membership_pb2.LOAD_PHASE_WAITING,
    LoadPhase.LOADING: membership_pb2.LOAD_PHASE_LOADING,
    LoadPhase.LOADED: membership_pb2.LOAD_PHASE_LOADED,
    LoadPhase.YIELDING: membership_pb2.LOAD_PHASE_YIELDING,
}


class RingViews:
    """Reads the rings; changes none."""

    def __init__(self, state: State) -> None:
        self._state = state

    def snapshot(self) -> list[WatchResponse]:
        """The events for a gateway that begins to watch; none of rings that may turn out to serve."""
        running = self._state.running
        known = [running[name] for name in sorted(running) if not running[name].machine.undecided]
        parked = [
            RingState(
                ring=ring.ring,
                phase=membership_pb2.RING_PHASE_DOWN,
                deployment=deployment.name,
                reason=self._parked(deployment, ring).reason,
                model_type=deployment.plan.profile.model_type,
                patience=self._state.patience,
            )
            for deployment, ring in self._state.wanted.planned
            if ring.ring not in running
        ]
        states = [*(one.state() for one in known), *parked]
        return [
            self._state.watchers.roster_event(self._state.wanted.roster),
            *(WatchResponse(ring=state) for state in states),
            *(WatchResponse(model=state) for state in self._state.shown.values()),
        ]

    def statuses(self, deployment: StoredDeployment) -> Iterable[admin_pb2.RingStatus]:
        """The rings of a deployment as operators see them."""
        for ring in deployment.plan.rings:
            running = self._state.running.get(ring.ring)
            status = self._parked(deployment, ring) if running is None else running.status()
            if running is not None and running.machine.awaited:
                status.reason += self._stuck(ring.ring)
            yield status

    def serving(self, name: str) -> RunningRing:
        """The ring of that name, or the only one for "".

        Raises NotFound (NO_SUCH_RING), InvalidInput (WHICH_RING), FailedPrecondition (RING_DOWN).
        """
        running = self._state.running
        if not name and len(running) > 1:
            raise InvalidInput(
                "there are several rings",
                hint=f"name one of: {', '.join(sorted(running)[:_SHOWN])}",
                reason="WHICH_RING",
                param="ring",
            )
        found = running.get(name) if name else next(iter(running.values()), None)
        if found is None:
            raise NotFound(
                f"there is no ring {name[:64]!r}" if name else "there is no ring",
                hint="see: sealring deployment list",
                reason="NO_SUCH_RING",
                param="ring",
            )
        if found.machine.phase is not Phase.SERVING:
            raise FailedPrecondition(
                f"ring {found.plan.ring} does not serve at the moment",
                hint="see: sealring deployment list",
                reason="RING_DOWN",
            )
        return found

    def model_changed(self, member: str, stated: Collection[bytes]) -> bool:
        """Whether a member serves other files of a model than planned, by the digests that it states.

        It states one digest for each ring. The files have changed if a stated digest belongs to no planned
        ring while the digest of a serving ring is missing. A missing digest alone is no change: an epoch has
        begun or ended since the question. Digests are counted, because the files of one ring's model may
        have become those of another's.
        """
        planned = self._state.of(member)
        serving = [running for running in planned if running.machine.phase is Phase.SERVING]
        known, served = (
            Counter(bytes.fromhex(one.deployment.profile.digest) for one in some)
            for some in (planned, serving)
        )
        return not served <= Counter(stated) and not known >= Counter(stated)

    def _parked(self, deployment: StoredDeployment, ring: admin_pb2.RingPlan) -> admin_pb2.RingStatus:
        """The status of a planned ring that is out of service, with the members that keep it out."""
        names = {stage.member: stage.member_name for stage in ring.stages}
        obstacles = self._state.obstacles(deployment, ring)
        why = "; ".join(f"{names[member]} {obstacle}" for member, obstacle in obstacles.items())
        return admin_pb2.RingStatus(
            ring=ring.ring,
            phase=membership_pb2.RING_PHASE_DOWN,
            reason=(why or "the newest roster does not hold it") + self._stuck(ring.ring),
        )

    def _stuck(self, ring: str) -> str:
        why = self._state.not_moved.get(ring)
        return f"; others could not take over: {why}" if why else ""


def model_states(state: State, on_demand: OnDemand, now: float, wall: float) -> Iterator[ModelState]:
    """The models for gateways; `now` as in `OnDemand`, `wall` in seconds since 1970."""
    for one in state.wanted.deployments:
        spec, profile = one.plan.spec, one.plan.profile
        told = ModelState(
            deployment=one.name,
            aliases=spec.aliases,
            rings=sorted(ring_names(spec)),
            model_type=profile.model_type,
            context=spec.context,
            memory=sum(profile.layer_bytes) + profile.embed_bytes + profile.head_bytes,
            digest=profile.digest,
            card=profile.card,
        )
        say_singly(told, "card")
        if (load := on_demand.loads.models.get(one.name)) is not None:
            told.phase, told.reason = _PHASES[load.phase], load.reason
            keep_alive = load.policy.keep_alive
            told.keep_alive = round(keep_alive) if math.isfinite(keep_alive) else -1
            if load.error is not None:
                told.problem.CopyFrom(to_problem(load.error))
            seconds = on_demand.loads.seconds(one.name, now)
            told.seconds = math.ceil(seconds / _SHOWN_SECONDS) * _SHOWN_SECONDS
            told.expires = _expires(on_demand, one.name, now, wall)
        _add_progress(told, state, one)
        yield told


def load_status(on_demand: OnDemand, name: str, now: float, wall: float) -> admin_pb2.LoadStatus | None:
    """The state of a model for operators; None for a deployment that is not on demand."""
    load = on_demand.loads.models.get(name)
    if load is None:
        return None
    return admin_pb2.LoadStatus(
        phase=_PHASES[load.phase],
        reason=load.error.message if load.error is not None else load.reason,
        expires=_expires(on_demand, name, now, wall),
        waiting=load.heard.waiting,
    )


def ring_names(spec: admin_pb2.DeploymentSpec) -> set[str]:
    """The rings that a deployment has when it is loaded."""
    return {ring_id(spec.name, replica) for replica in range(max(1, spec.replicas))}


def _add_progress(told: ModelState, state: State, deployment: StoredDeployment) -> None:
    """Adds how far the slowest member of the rings that form is, in percent, and in `status`'s words."""
    running = (state.running.get(ring.ring) for ring in deployment.plan.rings)
    forming = [one.machine for one in running if one and one.machine.phase is Phase.PREPARING]
    if forming:
        _, reached, share = min((one.slowest for one in forming), key=lambda each: each[2])
        told.progress = int(share * 100) // _SHOWN_PERCENT * _SHOWN_PERCENT
        told.reason = told.reason or f"{reached.what} {told.progress} %"


def _expires(on_demand: OnDemand, name: str, now: float, wall: float) -> int:
    """When a model is unloaded unless it is used, in seconds since 1970; 0 if it is not."""
    left = on_demand.loads.expires(name) - now
    if not math.isfinite(left):
        return 0
    return round((wall + left) / _SHOWN_SECONDS) * _SHOWN_SECONDS
