"""Plans that the cluster changes by itself: models on demand, and rings without a member or a group.

Each change asks the nodes first. Then it plans, stores and signs under a lock, unless it is not wanted any
more by then, and leaves an entry in the audit log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from sealring.coordinator.nodes.profiles import ProfileReply
from sealring.coordinator.nodes.survey import Survey
from sealring.coordinator.planning.planner import CLEAR, with_ring
from sealring.coordinator.planning.specs import as_pipeline
from sealring.coordinator.rings.actions import Change, Move, Place, Unload
from sealring.coordinator.rings.cluster import Cluster
from sealring.coordinator.rings.loads import Victims, and_, fewest, not_loaded
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store, StoredDeployment
from sealring.mesh.clock import Clock, awake_clock
from sealring.mesh.errors import Conflict, FailedPrecondition, ResourceExhausted, SealringError
from sealring.mesh.pki.certificates import Role
from sealring.mesh.roster.model import TENSOR
from sealring.v1 import admin_pb2


class Plans:
    """Makes the changes that the `cluster` wants. `changing` is held while plans turn into rosters."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        publisher: RosterPublisher,
        survey: Survey,
        *,
        wall: Clock,
        clock: Clock = awake_clock,
    ) -> None:
        """`wall` is the wall clock, `clock` that of the cluster."""
        self.changing = asyncio.Lock()
        self._cluster = cluster
        self._store = store
        self._publisher = publisher
        self._survey = survey
        self._wall = wall
        self._clock = clock

    async def make(self, change: Change) -> None:
        """Makes a change, unless it is not wanted any more.

        Raises what the planner raises, NotFound (UNKNOWN_DEPLOYMENT, UNKNOWN_MODEL), Unavailable
        (NODES_SILENT, MODEL_NOT_LOADED, STATE_UNWRITABLE), Conflict (NODES_CHANGED).
        """
        if isinstance(change, Move):
            await self._move(change)
        else:
            await self._place(change)

    def unload(self, unload: Unload) -> None:
        """Takes a model's rings away. Raises Unavailable (STATE_UNWRITABLE)."""
        with self._publisher.change():
            self._bare(unload.deployment, unload.why)

    def _still(self, change: Change) -> bool:
        return self._cluster.still(change, self._clock())

    def rings_of(self, names: Collection[str]) -> list[str]:
        """The rings that deployments have at the moment."""
        stored = self._store.deployments.all() if names else ()
        return [ring.ring for known in stored if known.name in names for ring in known.plan.rings]

    # On demand

    async def _place(self, place: Place) -> None:
        """Loads a model, or has others make room for it."""
        name, machine = place.deployment, self._cluster.on_demand
        spec = self._survey.check(_asked(self._store.deployments.get(name)))
        able = machine.loads.victims(name, self._clock()).all
        answers = await self._survey.ask(spec, replacing=self.rings_of(able))
        chosen = None
        if machine.loads.yielded_to != name:
            chosen = await self._room(spec, answers, machine.loads.victims(name, self._clock()))
        freed = machine.room(name, chosen, self._clock())
        if freed is not None:
            await self._load(place, spec, answers, freed)

    async def _room(
        self, spec: admin_pb2.DeploymentSpec, answers: dict[str, ProfileReply], victims: Victims
    ) -> list[str] | None:
        """The models to unload for one that waits, as few as may be, of those that may be unloaded now; None
        if it takes others that may be later."""
        refusals: list[SealringError] = []

        async def fits(freed: Sequence[str]) -> bool:
            try:
                await self._fit(spec, answers, freed)
            except Conflict:
                raise
            except SealringError as error:
                refusals.append(error)
                return False
            return True

        chosen = await fewest(victims.now, fits)
        if chosen is None and not await fits(victims.all):
            silent = {member for member, reply in answers.items() if reply.undecided}
            names = [one.name for one in self._store.members.all(Role.MEMBER) if one.id in silent]
            if not names:
                raise refusals[-1]
            raise not_loaded(spec.name, f"of {and_(names)} nothing is known, and {refusals[-1].message}")
        return chosen

    async def _load(
        self,
        place: Place,
        spec: admin_pb2.DeploymentSpec,
        answers: dict[str, ProfileReply],
        freed: Sequence[str],
    ) -> None:
        """Gives a model its rings, in place of those of the models that are `freed`, in one change."""
        async with self.changing:
            made = await self._fit(spec, answers, freed)
            known = self._store.deployments.get(spec.name)
            if not self._still(place) or known.plan.profile.digest != made.profile.digest:
                return
            made.spec.context = known.plan.spec.context
            with self._publisher.change(grows=not freed):
                for other in freed:
                    self._bare(other, f"to make room for {spec.name}")
                details = {"rings": len(made.rings), "plan_hash": made.plan_hash}
                self._replace(known, made, "load_model", spec.name, details)

    async def _fit(
        self, spec: admin_pb2.DeploymentSpec, answers: dict[str, ProfileReply], freed: Sequence[str]
    ) -> admin_pb2.DeploymentPlan:
        """The plan of a model on demand without the models that are `freed`."""
        digest = self._store.deployments.get(spec.name).plan.profile.digest
        return await self._survey.plan(spec, answers, digest=digest, replacing=self.rings_of(freed))

    def _bare(self, name: str, why: str) -> None:
        known = self._store.deployments.get(name)
        self._replace(known, without_rings(known.plan), "unload_model", name, {"why": why})

    # Rings

    async def _move(self, move: Move) -> None:
        name, ring = move.deployment, move.ring.ring
        pipeline = bool(move.pipeline) or move.ring.pipeline
        known = self._store.deployments.get(name)
        grows = not move.lost and not move.pipeline
        if grows and len(self._survey.able(name, (ring,))) < known.asked.stages:
            return
        spec = self._spec(known, move.ring, pipeline=pipeline)
        own = {stage.member for stage in move.ring.stages}
        answers = await self._survey.ask(spec, replacing=(ring,), expected=own - move.lost)
        if move.pipeline:
            spec.members[:] = []
            answers = {member: answer for member, answer in answers.items() if member in own}
        async with self.changing:
            if not self._still(move):
                return
            made = await self._without(move, spec, answers)
            if not self._still(move):
                return
            known = self._store.deployments.get(name)
            made.rings[0].pipeline = pipeline
            changed = with_ring(known.plan, ring, made.rings[0])
            action, why = "move_ring", {"leaving": " ".join(sorted(move.lost))}
            if move.pipeline:
                action, why = "fall_back", {"why": move.pipeline}
                if all(one.pipeline for one in changed.rings):
                    changed.reasons[:] = [one for one in changed.reasons if one != CLEAR]
                reason = f"{ring} is a pipeline, because its group did not come up: {move.pipeline}"
                changed.reasons.append(reason)
            with self._publisher.change():
                details = {"deployment": name, "plan_hash": changed.plan_hash} | why
                self._replace(known, changed, action, ring, details)

    async def _without(
        self, move: Move, spec: admin_pb2.DeploymentSpec, answers: dict[str, ProfileReply]
    ) -> admin_pb2.DeploymentPlan:
        """The plan as asked, or for a ring that lost members in as few stages as hold the model."""
        replacing = (move.ring.ring,)
        digest = self._store.deployments.get(spec.name).plan.profile.digest
        if spec.members and not spec.split:
            able = self._survey.able(spec.name, replacing)
            named = [
                member
                for member in spec.members
                if member in able and (reply := answers.get(member)) is not None and reply.profile
            ]  # a node that connected after the questions has no reply
            spec.members[:] = named or spec.members
        try:
            return await self._survey.plan(spec, answers, digest=digest, replacing=replacing, moves=True)
        except (FailedPrecondition, ResourceExhausted):
            if not spec.stages or not move.lost or spec.strategy == TENSOR:
                raise
            spec.stages = 0
            return await self._survey.plan(spec, answers, digest=digest, replacing=replacing, moves=True)

    def _spec(
        self, known: StoredDeployment, ring: admin_pb2.RingPlan, *, pipeline: bool
    ) -> admin_pb2.DeploymentSpec:
        """The specification of one ring, with the context and rows that clients were promised; for a ring of
        a tensor deployment that falls back, or has done so, that of a `pipeline`."""
        asked = _asked(known)
        if pipeline:
            as_pipeline(asked)
        if asked.split and asked.members:
            asked.members[:] = [stage.member for stage in ring.stages]
        asked.replicas = 1
        asked.max_rows = known.plan.spec.max_rows
        return self._survey.check(asked)

    def _replace(
        self,
        known: StoredDeployment,
        plan: admin_pb2.DeploymentPlan,
        action: str,
        subject: str,
        details: Mapping[str, object],
    ) -> None:
        known.plan.CopyFrom(plan)
        self._store.deployments.save(known)
        self._store.audit.append(self._wall(), "coordinator", action, subject, details)


def _asked(known: StoredDeployment) -> admin_pb2.DeploymentSpec:
    """The specification that was asked, with the context that clients were promised."""
    asked = admin_pb2.DeploymentSpec()
    asked.CopyFrom(known.asked)
    asked.context = known.plan.spec.context
    return asked


def without_rings(plan: admin_pb2.DeploymentPlan) -> admin_pb2.DeploymentPlan:
    """The plan of a model that is not loaded: what was asked for and the model's profile."""
    return admin_pb2.DeploymentPlan(spec=plan.spec, profile=plan.profile)
