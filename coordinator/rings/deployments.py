"""Deployments: asked, measured, planned, signed into the roster, deleted. One change at a time.

A deployment on demand has no rings while its model is not loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from sealring.coordinator.nodes.profiles import ProfileReply
from sealring.coordinator.nodes.survey import Survey
from sealring.coordinator.planning.planner import CLEAR, with_ring
from sealring.coordinator.planning.specs import as_pipeline
from sealring.coordinator.rings.views import RingViews
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store, StoredDeployment
from sealring.mesh.clock import Clock
from sealring.mesh.errors import AlreadyExists, Conflict
from sealring.mesh.names import ring_id
from sealring.v1 import admin_pb2


class DeploymentService:
    """What operators do with deployments. `changing` is held while plans turn into rosters."""

    def __init__(
        self, store: Store, publisher: RosterPublisher, survey: Survey, views: RingViews, *, clock: Clock
    ) -> None:
        self.changing = asyncio.Lock()
        self._store = store
        self._publisher = publisher
        self._survey = survey
        self._views = views
        self._clock = clock

    async def plan(self, spec: admin_pb2.DeploymentSpec) -> admin_pb2.PlanDeploymentResponse:
        """The plan that `create` would follow now, and what other shapes would bring.

        Raises AlreadyExists (NAME_TAKEN), NotFound (UNKNOWN_MODEL), Unavailable (NODES_SILENT), and what
        the planner raises.
        """
        checked = self._survey.check(spec)
        self._check_names(checked)
        freed = self._may_be_freed(checked)
        answers = await self._survey.ask(checked, replacing=freed)
        made = await self._survey.plan(checked, answers, replacing=freed)
        shapes = await self._survey.shapes(checked, made, answers)
        return admin_pb2.PlanDeploymentResponse(plan=made, shapes=shapes)

    async def create(self, spec: admin_pb2.DeploymentSpec, actor: str) -> admin_pb2.DeploymentPlan:
        """Plan, store, sign; the rings form by themselves, and those of a deployment on demand when it is
        asked for. Raises what `plan` raises."""
        checked = self._survey.check(spec)
        self._check_names(checked)
        freed = self._may_be_freed(checked)
        answers = await self._survey.ask(checked, replacing=freed)
        async with self.changing:
            self._check_names(checked)  # before its own rings take the memory that another plan needs
            made = await self._survey.plan(checked, answers, replacing=freed)
            now = self._clock()
            details = {"model": spec.model, "rings": len(made.rings), "plan_hash": made.plan_hash}
            stored = without_rings(made) if checked.on_demand else made
            with self._publisher.change(grows=True):
                self._store.deployments.add(
                    StoredDeployment(name=stored.spec.name, asked=spec, plan=stored, created=int(now))
                )
                self._store.audit.append(now, actor, "create_deployment", spec.name, details)
        return made

    # On demand

    async def offers(
        self, name: str, replacing: Collection[str]
    ) -> tuple[admin_pb2.DeploymentSpec, dict[str, ProfileReply]]:
        """The specification by which a model on demand is loaded, with the context that clients were
        promised, and the nodes' replies. Raises NotFound (UNKNOWN_DEPLOYMENT, UNKNOWN_MODEL),
        Unavailable (NODES_SILENT)."""
        known = self._store.deployments.get(name)
        spec = admin_pb2.DeploymentSpec()
        spec.CopyFrom(known.asked)
        spec.context = known.plan.spec.context
        spec = self._survey.check(spec)
        return spec, await self._survey.ask(spec, replacing=replacing)

    async def fit(
        self,
        spec: admin_pb2.DeploymentSpec,
        answers: dict[str, ProfileReply],
        freed: Sequence[str],
    ) -> admin_pb2.DeploymentPlan:
        """The plan of a model on demand without the models that are `freed`. Raises what `plan` raises."""
        digest = self._store.deployments.get(spec.name).plan.profile.digest
        rings = self.rings_of(freed)
        return await self._survey.plan(spec, answers, digest=digest, replacing=rings)

    async def load(
        self, spec: admin_pb2.DeploymentSpec, answers: dict[str, ProfileReply], freed: Sequence[str]
    ) -> None:
        """Gives a model on demand its rings, in place of those of the models that are `freed`, in one change.

        Raises what `fit` raises, and Conflict (DEPLOYMENT_CHANGED) if it was loaded or made anew meanwhile.
        """
        async with self.changing:
            made = await self.fit(spec, answers, freed)
            known = self._store.deployments.get(spec.name)
            if known.plan.rings or known.plan.profile.digest != made.profile.digest:
                raise Conflict(f"{spec.name} was changed meanwhile", reason="DEPLOYMENT_CHANGED")
            made.spec.context = known.plan.spec.context
            with self._publisher.change(grows=not freed):
                for other in freed:
                    self._unload(other, f"to make room for {spec.name}")
                known.plan.CopyFrom(made)
                self._store.deployments.save(known)
                details = {"rings": len(made.rings), "plan_hash": made.plan_hash}
                self._store.audit.append(self._clock(), "coordinator", "load_model", spec.name, details)

    async def unload(self, name: str, why: str) -> None:
        """Takes the rings of a model on demand away. Raises NotFound (UNKNOWN_DEPLOYMENT)."""
        async with self.changing:
            self._store.deployments.get(name)
            with self._publisher.change():
                self._unload(name, why)

    def rings_of(self, names: Collection[str]) -> list[str]:
        """The rings that deployments have at the moment."""
        return [
            ring.ring
            for known in self._store.deployments.all()
            if known.name in names
            for ring in known.plan.rings
        ]

    def _unload(self, name: str, why: str) -> None:
        known = self._store.deployments.get(name)
        known.plan.CopyFrom(without_rings(known.plan))
        self._store.deployments.save(known)
        self._store.audit.append(self._clock(), "coordinator", "unload_model", name, {"why": why})

    def _may_be_freed(self, spec: admin_pb2.DeploymentSpec) -> list[str]:
        """The rings that would make room for a new deployment: none for one that is not on demand."""
        others = self._store.deployments.all() if spec.on_demand else ()
        free = [one.name for one in others if one.asked.on_demand and not one.asked.pinned]
        return self.rings_of(free) if free else []

    async def fall_back(self, name: str, ring: str, why: str) -> None:
        """A tensor deployment's ring goes on as a pipeline over its own nodes, with the context and rows that
        clients were promised; its other rings stay. Raises what `plan` raises."""
        before = self._store.deployments.get(name)
        old = next((one for one in before.plan.rings if one.ring == ring), None)
        if old is None:  # its deployment was deleted and made anew
            return
        spec = admin_pb2.DeploymentSpec()
        spec.CopyFrom(before.asked)
        spec.context, spec.max_rows = before.plan.spec.context, before.plan.spec.max_rows
        spec.replicas, spec.members[:] = 1, []
        as_pipeline(spec)
        spec = self._survey.check(spec)
        freed = {stage.member for stage in old.stages}
        answers = await self._survey.ask(spec, replacing=(ring,))
        answers = {member: answer for member, answer in answers.items() if member in freed}
        async with self.changing:
            known = self._store.deployments.get(name)
            if known.created != before.created or old not in known.plan.rings:
                return  # it fell back, moved, or was made anew meanwhile
            made = await self._survey.plan(spec, answers, digest=known.plan.profile.digest, replacing=(ring,))
            made.rings[0].pipeline = True
            changed = with_ring(known.plan, ring, made.rings[0])
            if all(one.pipeline for one in changed.rings):
                changed.reasons[:] = [one for one in changed.reasons if one != CLEAR]
            changed.reasons.append(f"{ring} is a pipeline, because its group did not come up: {why}")
            with self._publisher.change():
                known.plan.CopyFrom(changed)
                self._store.deployments.save(known)
                details = {"deployment": name, "why": why, "plan_hash": changed.plan_hash}
                self._store.audit.append(self._clock(), "coordinator", "fall_back", ring, details)

    async def delete(self, name: str, actor: str) -> None:
        """Ends a deployment's rings and frees its members. Raises NotFound (UNKNOWN_DEPLOYMENT)."""
        async with self.changing:
            self._store.deployments.get(name)
            with self._publisher.change():
                self._store.deployments.remove(name)
                self._store.audit.append(self._clock(), actor, "delete_deployment", name, {})

    def list(self, load_status: Callable[[str], admin_pb2.LoadStatus | None]) -> list[admin_pb2.Deployment]:
        """Every deployment with the state of its rings. `load_status` gives the load of a model on demand, by
        its deployment's name."""
        return [
            admin_pb2.Deployment(
                plan=deployment.plan,
                rings=self._views.statuses(deployment.plan),
                created=deployment.created,
                load=load_status(deployment.name),
            )
            for deployment in self._store.deployments.all()
        ]

    def _check_names(self, spec: admin_pb2.DeploymentSpec) -> None:
        """Raises AlreadyExists (NAME_TAKEN) for a name, an alias or a ring of another deployment."""
        self._store.deployments.check_free(spec.name)
        wanted = {spec.name, *spec.aliases}
        rings = ring_names(spec)
        for other in self._store.deployments.all():
            taken = wanted & {other.name, *other.plan.spec.aliases}
            if taken:
                raise _taken(f"deployment {other.name} has the name {min(taken)} already", "--alias")
            both = rings & {*ring_names(other.plan.spec), *(ring.ring for ring in other.plan.rings)}
            if both:
                raise _taken(f"there is a ring {min(both)} already", "--name")


def ring_names(spec: admin_pb2.DeploymentSpec) -> set[str]:
    """The rings that a deployment has when it is loaded."""
    return {ring_id(spec.name, replica) for replica in range(max(1, spec.replicas))}


def without_rings(plan: admin_pb2.DeploymentPlan) -> admin_pb2.DeploymentPlan:
    """The plan of a model that is not loaded: what was asked for and the model's profile."""
    return admin_pb2.DeploymentPlan(spec=plan.spec, profile=plan.profile)


def _taken(message: str, option: str) -> AlreadyExists:
    return AlreadyExists(message, hint=f"choose another with {option}", reason="NAME_TAKEN", param="name")
