"""Deployments: asked, measured, planned, signed into the roster, deleted. One change at a time.

A deployment on demand has no rings while its model is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from sealring.coordinator.nodes.profiles import ProfileReply
from sealring.coordinator.nodes.survey import Survey
from sealring.coordinator.rings.plans import Plans, without_rings
from sealring.coordinator.rings.views import RingViews, ring_names
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store, StoredDeployment
from sealring.mesh.clock import Clock
from sealring.mesh.errors import AlreadyExists, PermissionDenied
from sealring.v1 import admin_pb2


class DeploymentService:
    """What operators do with deployments."""

    def __init__(
        self,
        store: Store,
        publisher: RosterPublisher,
        survey: Survey,
        plans: Plans,
        views: RingViews,
        *,
        clock: Clock,
    ) -> None:
        self._plans = plans
        self._store = store
        self._publisher = publisher
        self._survey = survey
        self._views = views
        self._clock = clock

    async def plan(self, spec: admin_pb2.DeploymentSpec) -> admin_pb2.PlanDeploymentResponse:
        """The plan that `create` would follow now, and what other shapes would bring. A deployment of that
        name stays: the plan is made as if it were not there.

        Raises NotFound (UNKNOWN_MODEL), Unavailable (NODES_SILENT), and what the planner raises.
        """
        checked, freed, answers = await self._ask(spec, planned_anew=True)
        made = await self._survey.plan(checked, answers, replacing=freed)
        shapes = await self._survey.shapes(checked, made, answers, replacing=freed)
        return admin_pb2.PlanDeploymentResponse(plan=made, shapes=shapes)

    def check_paths(self, spec: admin_pb2.DeploymentSpec) -> None:
        """Raises PermissionDenied (PATH_NOT_DEPLOYED) where it names a folder that no deployment does."""
        deployed = {path for one in self._store.deployments.all() for path in _paths(one.asked)}
        for path in _paths(spec) - deployed:
            raise PermissionDenied(
                f"a member may not have nodes open {path[:200]}, which is not deployed",
                hint="name a model as `sealring model list` does, or plan it on the coordinator's machine",
                reason="PATH_NOT_DEPLOYED",
            )

    async def create(self, spec: admin_pb2.DeploymentSpec, actor: str) -> admin_pb2.DeploymentPlan:
        """Plan, store, sign; the rings form by themselves, and those of a deployment on demand when it is
        asked for. Raises AlreadyExists (NAME_TAKEN), and what `plan` raises."""
        checked, freed, answers = await self._ask(spec)
        async with self._plans.changing:
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

    async def _ask(
        self, spec: admin_pb2.DeploymentSpec, *, planned_anew: bool = False
    ) -> tuple[admin_pb2.DeploymentSpec, list[str], dict[str, ProfileReply]]:
        """The checked specification, the rings that would make room for it, and the nodes' replies. Room is
        made for a model on demand alone; `planned_anew`, a deployment of the same name leaves its own."""
        checked = self._survey.check(spec)
        if not planned_anew:
            self._check_names(checked)
        free = [
            one.name
            for one in self._store.deployments.all()
            if (planned_anew and one.name == checked.name)
            or (checked.on_demand and one.asked.on_demand and not one.asked.pinned)
        ]
        freed = self._plans.rings_of(free)
        return checked, freed, await self._survey.ask(checked, replacing=freed)

    async def delete(self, name: str, actor: str) -> None:
        """Ends a deployment's rings and frees its members. Raises NotFound (UNKNOWN_DEPLOYMENT)."""
        async with self._plans.changing:
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
                rings=self._views.statuses(deployment),
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


def _taken(message: str, option: str) -> AlreadyExists:
    return AlreadyExists(message, hint=f"choose another with {option}", reason="NAME_TAKEN", param="name")


def _paths(spec: admin_pb2.DeploymentSpec) -> set[str]:
    return {one for one in (spec.model, spec.draft, spec.adapter) if one.startswith("/")}
