"""The state of the rings as gateways, operators and other parts of the coordinator see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.running import RingTable, RunningRing
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store, StoredDeployment
from sealring.coordinator.streams.watchers import roster_event
from sealring.mesh.errors import FailedPrecondition, InvalidInput, NotFound
from sealring.mesh.trust.levels import level_of
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import RingState, WatchResponse

_SHOWN = 8


class RingViews:
    """Reads the rings; changes none."""

    def __init__(self, table: RingTable, store: Store, publisher: RosterPublisher) -> None:
        self._table = table
        self._store = store
        self._publisher = publisher

    @property
    def planned(self) -> Sequence[tuple[StoredDeployment, admin_pb2.RingPlan]]:
        """The rings of all deployments, in service or not."""
        return self._table.planned

    def snapshot(self) -> list[WatchResponse]:
        """The events for a gateway that begins to watch; none of rings that may turn out to serve."""
        running = self._table.running
        known = [running[name] for name in sorted(running) if not running[name].machine.undecided]
        parked = [
            RingState(
                ring=ring.ring,
                phase=membership_pb2.RING_PHASE_DOWN,
                deployment=deployment.name,
                reason=self._parked(ring).reason,
                model_type=deployment.plan.profile.model_type,
                patience=self._table.patience,
            )
            for deployment, ring in self._table.planned
            if ring.ring not in running
        ]
        states = [*(one.state() for one in known), *parked]
        return [roster_event(self._publisher.current), *(WatchResponse(ring=state) for state in states)]

    def statuses(self, plan: admin_pb2.DeploymentPlan) -> Iterable[admin_pb2.RingStatus]:
        """The rings of a deployment as operators see them."""
        for ring in plan.rings:
            running = self._table.running.get(ring.ring)
            status = self._parked(ring) if running is None else running.status()
            if running is not None and running.machine.awaited:
                status.reason += self._stuck(ring.ring)
            yield status

    def awaited(self, ring: str) -> list[str]:
        """The members that a ring in service waits for (see `RingEpochs.awaited`)."""
        running = self._table.running.get(ring)
        return running.machine.awaited if running else []

    def obstacles(self, name: str) -> dict[str, str]:
        """The members that keep a planned ring out of service, each with the reason."""
        if name in self._table.running:
            return {}
        return {
            stage.member: obstacle
            for deployment, ring in self._table.planned
            for stage in ring.stages
            if ring.ring == name
            and (obstacle := self._obstacle(stage.member, deployment.plan.spec.trust_floor))
        }

    def serving(self, name: str) -> RunningRing:
        """The ring of that name, or the only one for "".

        Raises NotFound (NO_SUCH_RING), InvalidInput (WHICH_RING), FailedPrecondition (RING_DOWN).
        """
        running = self._table.running
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
        planned = [running for _, running in self._table.of(member)]
        serving = [running for running in planned if running.machine.phase is Phase.SERVING]
        known, served = (Counter(bytes.fromhex(one.digest) for one in some) for some in (planned, serving))
        return not served <= Counter(stated) and not known >= Counter(stated)

    def _parked(self, ring: admin_pb2.RingPlan) -> admin_pb2.RingStatus:
        """The status of a planned ring that is out of service, with the members that keep it out."""
        obstacles = self.obstacles(ring.ring)
        names = {stage.member: stage.member_name for stage in ring.stages}
        why = "; ".join(f"{names[member]} {obstacle}" for member, obstacle in obstacles.items())
        return admin_pb2.RingStatus(
            ring=ring.ring,
            phase=membership_pb2.RING_PHASE_DOWN,
            reason=(why or "the newest roster does not hold it") + self._stuck(ring.ring),
        )

    def _stuck(self, ring: str) -> str:
        why = self._table.not_moved.get(ring)
        return f"; others could not take over: {why}" if why else ""

    def _obstacle(self, identifier: str, floor: int) -> str:
        member = self._store.members.find(identifier)
        listed = self._publisher.listed(identifier)
        if member is None or listed is None:
            return "was evicted"
        if member.draining:
            return "is draining"
        if refused := self._publisher.standing.refusal(member):
            return f"is not trusted: {refused}"
        if listed.trust < floor:
            return f"has trust level {level_of(listed.trust)}, below the floor {level_of(floor)}"
        return ""
