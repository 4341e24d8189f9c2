"""Plans a ring anew over the nodes that are online when it loses a member for good.

A member is lost if it was evicted or banned, drains, is trusted too little, or is away for longer than a
grace period. Choices by hand stay: a ring keeps to the nodes that the deployment names, and to the layers of
its split; with both it waits. A number of stages gives way until as many nodes are online again and no
request uses the ring."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Coroutine

import structlog

from sealring.coordinator.nodes.profiles import ProfileReply
from sealring.coordinator.nodes.survey import Survey
from sealring.coordinator.planning.planner import with_ring
from sealring.coordinator.planning.specs import as_pipeline
from sealring.coordinator.rings.deployments import DeploymentService
from sealring.coordinator.rings.rings import Rings
from sealring.coordinator.rings.views import RingViews
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredDeployment
from sealring.coordinator.streams.sessions import Sessions
from sealring.mesh.clock import Clock, awake_clock
from sealring.mesh.errors import FailedPrecondition, ResourceExhausted, SealringError
from sealring.mesh.pki.certificates import Role
from sealring.mesh.roster.model import TENSOR
from sealring.v1 import admin_pb2

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 60.0
_LONG_AGO = 1
log = structlog.get_logger()


@dataclasses.dataclass(frozen=True)
class _Try:
    """A move that was tried: the ring, the members to do without, the nodes, and the time."""

    ring: admin_pb2.RingPlan
    lost: set[str]
    over: frozenset[str]
    at: float

    def same(self, other: _Try) -> bool:
        """Whether the other would give the same result, unless a node has got the model since, or something
        stored has changed (`Moves.stored`)."""
        known = (self.ring, self.lost, self.over) == (other.ring, other.lost, other.over)
        return known and other.at < self.at + _RETRY_SECONDS


class Moves:
    """Looks after the rings while `run` runs. `clock` is the wall clock."""

    def __init__(
        self,
        store: Store,
        publisher: RosterPublisher,
        sessions: Sessions,
        survey: Survey,
        rings: Rings,
        views: RingViews,
        deployments: DeploymentService,
        settings: CoordinatorSettings,
        *,
        clock: Clock,
        awake: Clock = awake_clock,
    ) -> None:
        """`awake` counts seconds without those in which this machine slept: no member is lost for these."""
        self._awake = awake
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._survey = survey
        self._rings = rings
        self._views = views
        self._deployments = deployments
        self._drain_timeout = settings.drain_timeout
        self._grace = settings.replace_after
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._away: dict[tuple[str, str], float] = {}
        self._quiet: dict[str, float] = {}
        self._moving: set[str] = set()
        self._tried: dict[str, _Try] = {}

    async def run(self) -> None:
        """Begins moves as they are due. Runs until cancelled."""
        while True:
            self.look(self._awake())
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self, now: float) -> None:
        """Notes the absent members and the quiet rings, and begins the moves that are due."""
        planned = self._views.planned
        self._note([ring for _, ring in planned], now)
        for deployment, ring in planned:
            lost = self._lost(ring, now)
            for member in lost:
                self._rings.offline(member)  # also of a serving ring whose members are all silent
            if lost or self._may_grow(deployment, ring, now):
                self._try(deployment, ring, lost, now)
            else:
                self._tried.pop(ring.ring, None)

    def _try(
        self, deployment: StoredDeployment, ring: admin_pb2.RingPlan, lost: set[str], now: float
    ) -> None:
        """Begins a move, unless it was tried a moment ago over the same nodes."""
        over = self._survey.able(deployment.name, (ring.ring,))
        now_tried, before = _Try(ring, lost, over, now), self._tried.get(ring.ring)
        again = before is None or not before.same(now_tried)
        if again and ring.ring not in self._moving and (lost or len(over) >= deployment.asked.stages):
            self._tried[ring.ring] = now_tried
            self._spawn(self._move(deployment.name, ring.ring, lost))

    def stored(self) -> None:
        """Forgets which moves were tried: deployments or members may have changed, and there may be room."""
        self._tried.clear()

    def resume(self) -> None:
        """Goes on with the drains of this coordinator's last run. Call it before any ring forms."""
        for member in self._store.members.all(Role.MEMBER):
            if member.draining > self._clock():
                self._begin_drain(member.id, member.draining, returning=True)

    def drain_end(self) -> int:
        """The end of a drain that begins now, in seconds since 1970."""
        return int(self._clock() + self._drain_timeout) + 1

    def draining(self, member: str, until: int) -> None:
        """Begins a drain: the member's rings move once all are idle, or at `until`. Call it after the store
        has the drain."""
        self._begin_drain(member, until)

    def staying(self, member: str) -> None:
        """Ends a drain without a move. Call it after the store has that."""
        drain = self._drains.pop(member, None)
        if drain is not None:
            drain.cancel()
            self._rings.keep_serving(member, False)

    def no_group(self, deployment: str, ring: str, why: str) -> None:
        """A tensor ring's group does not come up: it becomes a pipeline."""
        self._spawn(self._fall_back(deployment, ring, why))

    async def _fall_back(self, deployment: str, ring: str, why: str) -> None:
        try:
            await self._deployments.fall_back(deployment, ring, why)
            log.warning("tensor_fell_back", ring=ring, why=why)
        except SealringError as error:
            log.warning("tensor_not_fallen_back", ring=ring, reason=error.reason, why=error.message)

    async def close(self) -> None:
        """Cancels the tasks. The next run resumes drains."""
        self._drains.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin_drain(self, member: str, until: float, *, returning: bool = False) -> None:
        self._rings.keep_serving(member, True)
        self._drains[member] = self._spawn(self._drain(member, until - self._clock(), returning))

    async def _drain(self, member: str, seconds: float, returning: bool) -> None:
        try:
            async with asyncio.timeout(seconds):
                if returning:
                    await self._returned(member)
                while not self._idle(member):
                    await self._sessions.next_beat()
        except TimeoutError:
            log.warning("drain_timeout", member=member)
        try:
            for deployment, ring in self._rings_of(member):
                await self._move(deployment, ring, {member})
        finally:
            if self._drains.get(member) is asyncio.current_task():
                del self._drains[member]
                self._over(member)

    async def _returned(self, member: str) -> None:
        """Waits for a member that has not connected in this run, for the grace period at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                while self._sessions.find(member) is None:
                    await self._sessions.next_beat()

    def _over(self, member: str) -> None:
        """Marks a drain as over, so that the next run of the coordinator does not resume it."""
        self._rings.keep_serving(member, False)
        self._rings.sync()
        known = self._store.members.find(member)
        if known is not None and known.draining:
            try:
                known.draining = _LONG_AGO
                self._store.members.save(known)
            except SealringError as error:  # the next run resumes it, and finds that it is over
                log.warning("drain_not_marked", member=member, reason=error.reason, why=error.message)

    def _idle(self, member: str) -> bool:
        session = self._sessions.find(member)
        return session is None or all(ring in session.idle for _, ring in self._rings_of(member))

    def _rings_of(self, member: str) -> list[tuple[str, str]]:
        return [
            (deployment.name, ring.ring)
            for deployment in self._store.deployments.all()
            for ring in deployment.plan.rings
            if any(stage.member == member for stage in ring.stages)
        ]

    # Lost members, and rings that may grow

    def _note(self, rings: list[admin_pb2.RingPlan], now: float) -> None:
        """Notes the times at which members went away and rings became quiet. While the coordinator hears of
        no node at all, it is cut off itself, and no member counts as away."""
        away = {
            (ring.ring, member): self._away.get((ring.ring, member), now)
            for ring in rings
            for member in self._views.awaited(ring.ring)
        }
        self._away = away if any(True for _ in self._sessions) else {}
        self._quiet = {
            ring.ring: self._quiet.get(ring.ring, now)
            for ring in rings
            if all(self._is_idle(stage.member, ring.ring) for stage in ring.stages)
        }

    def _is_idle(self, member: str, ring: str) -> bool:
        session = self._sessions.find(member)
        return session is not None and ring in session.idle

    def _lost(self, ring: admin_pb2.RingPlan, now: float) -> set[str]:
        """The members that the ring has to do without."""
        awaited = self._views.awaited(ring.ring)
        gone = {one for one in awaited if now >= self._away.get((ring.ring, one), now) + self._grace}
        return gone | set(self._views.obstacles(ring.ring))

    def _may_grow(self, deployment: StoredDeployment, ring: admin_pb2.RingPlan, now: float) -> bool:
        """Whether the ring is quiet and has fewer stages than were asked."""
        return self._is_quiet(ring, now) and len(ring.stages) < deployment.asked.stages

    def _is_quiet(self, ring: admin_pb2.RingPlan, now: float) -> bool:
        """Whether no request has used the ring for the grace period."""
        return now >= self._quiet.get(ring.ring, now) + self._grace

    # Moving

    async def _move(self, name: str, ring: str, lost: set[str]) -> None:
        """Plans one ring anew, without the `lost` members; with none lost, for the stages that were asked."""
        self._moving.add(ring)
        try:
            await self._move_ring(name, ring, lost)
        except SealringError as error:
            write = log.warning if lost else log.info
            write("ring_not_moved", ring=ring, reason=error.reason, why=error.message)
            if lost:
                self._rings.not_moved(ring, error.message)
        except Exception:  # a defect, which must not keep the other rings of a drain from their moves
            log.exception("ring_not_moved", ring=ring)
        finally:
            self._moving.discard(ring)

    async def _move_ring(self, name: str, ring: str, lost: set[str]) -> None:
        deployment = self._store.deployments.get(name)
        old = next((one for one in deployment.plan.rings if one.ring == ring), None)
        if old is None:  # its deployment was deleted and made anew
            return
        freed = [stage.member for stage in old.stages]
        spec = self._spec(deployment, freed, pipeline=old.pipeline)
        answers = await self._survey.ask(spec, replacing=(ring,))
        async with self._deployments.changing:
            deployment = self._store.deployments.get(name)
            digest = deployment.plan.profile.digest
            if not self._still(old, lost):
                return
            made = await self._plan(spec, answers, digest, ring, gives_way=bool(lost))
            if not self._still(old, lost):
                return
            made.rings[0].pipeline = old.pipeline
            changed = with_ring(deployment.plan, ring, made.rings[0])
            with self._publisher.change():
                deployment.plan.CopyFrom(changed)
                self._store.deployments.save(deployment)
                details = {
                    "deployment": name,
                    "leaving": " ".join(sorted(lost)),
                    "plan_hash": changed.plan_hash,
                }
                self._store.audit.append(self._clock(), "coordinator", "move_ring", ring, details)

    def _still(self, ring: admin_pb2.RingPlan, lost: set[str]) -> bool:
        """Whether a move still has its reason: members may be back, or no longer drain."""
        if all(one != ring for _, one in self._views.planned):
            return False
        now_lost = self._lost(ring, self._awake()) | self._drains.keys()
        return now_lost >= lost if lost else ring.ring in self._quiet

    async def _plan(
        self,
        spec: admin_pb2.DeploymentSpec,
        answers: dict[str, ProfileReply],
        digest: str,
        ring: str,
        *,
        gives_way: bool,
    ) -> admin_pb2.DeploymentPlan:
        """The plan as asked, or if it `gives_way` in as few stages as hold the model."""
        if spec.members and not spec.split:
            able = self._survey.able(spec.name, (ring,))
            named = [
                member
                for member in spec.members
                if member in able and (reply := answers.get(member)) is not None and reply.profile
            ]  # a node that connected after the questions has no reply
            spec.members[:] = named or spec.members
        try:
            return await self._survey.plan(spec, answers, digest=digest, replacing=(ring,))
        except (FailedPrecondition, ResourceExhausted):
            if not spec.stages or not gives_way or spec.strategy == TENSOR:
                raise
            spec.stages = 0
            return await self._survey.plan(spec, answers, digest=digest, replacing=(ring,))

    def _spec(
        self, deployment: StoredDeployment, members: list[str], *, pipeline: bool
    ) -> admin_pb2.DeploymentSpec:
        """The specification that was asked, for one ring, with the context and rows that clients were
        promised.

        `pipeline` is set for a ring of a tensor deployment that fell back to a pipeline."""
        asked = admin_pb2.DeploymentSpec()
        asked.CopyFrom(deployment.asked)
        if pipeline:
            as_pipeline(asked)
        if asked.split and asked.members:
            asked.members[:] = members
        asked.replicas = 1
        asked.context = deployment.plan.spec.context
        asked.max_rows = deployment.plan.spec.max_rows
        return self._survey.check(asked)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
