"""Deployments: asked, measured, planned, signed into the roster, deleted. One change at a time."""

from __future__ import annotations

import asyncio

from sealring.coordinator.nodes.survey import Survey
from sealring.coordinator.planning.planner import CLEAR, with_ring
from sealring.coordinator.planning.specs import as_pipeline
from sealring.coordinator.rings.views import RingViews
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store, StoredDeployment
from sealring.mesh.clock import Clock
from sealring.mesh.errors import AlreadyExists
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

        Raises AlreadyExists (NAME_TAKEN), NotFound (UNKNOWN_MODEL), and what the planner raises.
        """
        checked = self._survey.check(spec)
        self._store.deployments.check_free(checked.name)
        answers = await self._survey.ask(checked)
        made = await self._survey.plan(checked, answers)
        shapes = await self._survey.shapes(checked, made, answers)
        return admin_pb2.PlanDeploymentResponse(plan=made, shapes=shapes)

    async def create(self, spec: admin_pb2.DeploymentSpec, actor: str) -> admin_pb2.DeploymentPlan:
        """Plan, store, sign; the rings form by themselves. Raises what `plan` raises."""
        checked = self._survey.check(spec)
        self._store.deployments.check_free(checked.name)
        answers = await self._survey.ask(checked)
        async with self.changing:
            made = await self._survey.plan(checked, answers)
            self._check_ring_names(made)
            now = self._clock()
            details = {"model": spec.model, "rings": len(made.rings), "plan_hash": made.plan_hash}
            with self._publisher.change(grows=True):
                self._store.deployments.add(StoredDeployment(spec, made, int(now)))
                self._store.audit.append(now, actor, "create_deployment", spec.name, details)
        return made

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
        answers = await self._survey.ask(spec, replacing=ring)
        answers = {member: answer for member, answer in answers.items() if member in freed}
        async with self.changing:
            known = self._store.deployments.get(name)
            if known.created != before.created or old not in known.plan.rings:
                return  # it fell back, moved, or was made anew meanwhile
            made = await self._survey.plan(spec, answers, digest=known.plan.profile.digest, replacing=ring)
            made.rings[0].pipeline = True
            changed = with_ring(known.plan, ring, made.rings[0])
            if all(one.pipeline for one in changed.rings):
                changed.reasons[:] = [one for one in changed.reasons if one != CLEAR]
            changed.reasons.append(f"{ring} is a pipeline, because its group did not come up: {why}")
            with self._publisher.change():
                self._store.deployments.replace(StoredDeployment(known.asked, changed, known.created))
                details = {"deployment": name, "why": why, "plan_hash": changed.plan_hash}
                self._store.audit.append(self._clock(), "coordinator", "fall_back", ring, details)

    async def delete(self, name: str, actor: str) -> None:
        """Its rings end and its members are free. Raises NotFound (UNKNOWN_DEPLOYMENT)."""
        async with self.changing:
            self._store.deployments.get(name)
            with self._publisher.change():
                self._store.deployments.remove(name)
                self._store.audit.append(self._clock(), actor, "delete_deployment", name, {})

    def list(self) -> list[admin_pb2.Deployment]:
        """Every deployment with the state of its rings."""
        return [
            admin_pb2.Deployment(
                plan=deployment.plan,
                rings=self._views.statuses(deployment.plan),
                created=deployment.created,
            )
            for deployment in self._store.deployments.all()
        ]

    def _check_ring_names(self, made: admin_pb2.DeploymentPlan) -> None:
        taken = {ring.ring for other in self._store.deployments.all() for ring in other.plan.rings}
        for ring in made.rings:
            if ring.ring in taken:
                raise AlreadyExists(
                    f"there is a ring {ring.ring} already",
                    hint="choose another with --name",
                    reason="NAME_TAKEN",
                    param="name",
                )
