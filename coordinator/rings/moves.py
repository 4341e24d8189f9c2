"""Rings that lose a member for good: replanned without it if the model fits, else down until it does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import structlog

from sealring.coordinator.planning.planner import plan_hash
from sealring.coordinator.planning.survey import Survey
from sealring.coordinator.rings.deployments import DeploymentService
from sealring.coordinator.rings.rings import Rings
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredDeployment
from sealring.coordinator.streams.sessions import Sessions
from sealring.mesh.clock import Clock
from sealring.mesh.errors import SealringError
from sealring.v1 import admin_pb2

log = structlog.get_logger()


class Moves:
    """Works in the background."""

    def __init__(
        self,
        store: Store,
        publisher: RosterPublisher,
        sessions: Sessions,
        survey: Survey,
        rings: Rings,
        deployments: DeploymentService,
        settings: CoordinatorSettings,
        *,
        clock: Clock,
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._survey = survey
        self._rings = rings
        self._deployments = deployments
        self._drain_timeout = settings.drain_timeout
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._drains: dict[str, asyncio.Task[None]] = {}

    def evicted(self, member: str) -> None:
        """The member is out of the roster, and its ring with it."""
        self._spawn(self._move(member))

    def draining(self, member: str) -> None:
        """The member's ring goes on until it is idle or the time is over, and then moves."""
        self._rings.keep_serving(member, True)
        self._drains[member] = self._spawn(self._drain(member))

    def staying(self, member: str) -> None:
        """The member does not leave after all: nothing of what its draining began goes on."""
        drain = self._drains.pop(member, None)
        if drain is not None:
            drain.cancel()
            self._rings.keep_serving(member, False)

    async def close(self) -> None:
        """End what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _drain(self, member: str) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout):
                while not self._idle(member):
                    await self._sessions.next_beat()
        except TimeoutError:
            log.warning("drain_timeout", member=member)
        try:
            await self._move(member)
        finally:
            if self._drains.get(member) is asyncio.current_task():
                del self._drains[member]
                self._rings.keep_serving(member, False)
                self._rings.sync()

    def _idle(self, member: str) -> bool:
        session = self._sessions.find(member)
        ring = self._ring_of(member)
        return session is None or ring is None or ring in session.idle

    def _leaving(self, member: str) -> bool:
        found = self._store.members.find(member)
        return found is None or found.draining

    def _ring_of(self, member: str) -> str | None:
        return next((ring for _, ring in self._rings_of(member)), None)

    def _rings_of(self, member: str) -> list[tuple[str, str]]:
        return [
            (deployment.name, ring.ring)
            for deployment in self._store.deployments.all()
            for ring in deployment.plan.rings
            if any(stage.member == member for stage in ring.stages)
        ]

    async def _move(self, member: str) -> None:
        for deployment, ring in self._rings_of(member):
            try:
                await self._move_ring(deployment, ring, member)
            except SealringError as error:
                log.warning("ring_not_moved", ring=ring, reason=error.reason, why=error.message)
                self._rings.not_moved(ring, error.message)

    async def _move_ring(self, name: str, ring: str, leaving: str) -> None:
        deployment = self._store.deployments.get(name)
        old = next((one for one in deployment.plan.rings if one.ring == ring), None)
        if old is None:  # its deployment was deleted and made anew
            return
        freed = [stage.member for stage in old.stages]
        spec = self._spec(deployment, leaving)
        answers = await self._survey.ask(spec, freed=freed)
        async with self._deployments.changing:
            deployment = self._store.deployments.get(name)
            if old not in deployment.plan.rings or not self._leaving(leaving):
                return
            digest = deployment.plan.profile.digest
            made = await self._survey.plan(spec, answers, digest=digest, freed=freed)
            changed = _with_ring(deployment.plan, ring, made.rings[0])
            with self._publisher.change():
                self._store.deployments.replace(
                    StoredDeployment(deployment.asked, changed, deployment.created)
                )
                details = {"deployment": name, "leaving": leaving, "plan_hash": changed.plan_hash}
                self._store.audit.append(self._clock(), "coordinator", "move_ring", ring, details)

    def _spec(self, deployment: StoredDeployment, leaving: str) -> admin_pb2.DeploymentSpec:
        """What was asked, for one ring, with the context and rows that clients were promised."""
        asked = admin_pb2.DeploymentSpec()
        asked.CopyFrom(deployment.asked)
        members = [member for member in asked.members if member != leaving]
        del asked.members[:]
        if not asked.split:
            asked.members.extend(members)
        asked.replicas = 1
        asked.context = deployment.plan.spec.context
        asked.max_rows = deployment.plan.spec.max_rows
        return self._survey.check(asked)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _with_ring(
    plan: admin_pb2.DeploymentPlan, name: str, ring: admin_pb2.RingPlan
) -> admin_pb2.DeploymentPlan:
    changed = admin_pb2.DeploymentPlan()
    changed.CopyFrom(plan)
    for place in changed.rings:
        if place.ring == name:
            place.CopyFrom(ring)
            place.ring = name
    changed.plan_hash = plan_hash(changed.spec, changed.profile, changed.rings)
    return changed
