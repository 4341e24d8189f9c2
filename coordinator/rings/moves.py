"""Rings that lose a member for good: planned anew over the nodes that are there, else down until that works.

A member is lost that was evicted or banned, that drains or is trusted too little, and, after a grace period,
one that is away. What was asked for by hand is kept: a ring stays on the nodes that the deployment names, and
in the layers of its split; with both it waits. A number of stages gives way, until as many nodes are there
again and nobody uses the ring.

A member that has become slow (`pace.py`) gives its place to another node, once nobody uses the ring, unless
the deployment names its nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Coroutine, Set

import structlog

from sealring.coordinator.planning.planner import with_ring
from sealring.coordinator.planning.profiles import Answer
from sealring.coordinator.planning.specs import as_pipeline
from sealring.coordinator.planning.survey import Survey
from sealring.coordinator.rings.deployments import DeploymentService
from sealring.coordinator.rings.pace import Shunned
from sealring.coordinator.rings.rings import Rings
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
    """A move that was tried: of what, without whom, over which nodes, and when."""

    ring: admin_pb2.RingPlan
    lost: set[str]
    slow: Set[str]
    over: frozenset[str]
    at: float

    def same(self, other: _Try) -> bool:
        """Whether the other would come to the same, unless a node has got the model since."""
        known = (self.ring, self.lost, self.slow, self.over) == (
            *(other.ring, other.lost, other.slow, other.over),
        )
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
        deployments: DeploymentService,
        settings: CoordinatorSettings,
        *,
        clock: Clock,
        awake: Clock = awake_clock,
    ) -> None:
        """`awake` counts the seconds in which this coordinator could hear members: none is lost for the time
        that it slept."""
        self._awake = awake
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._survey = survey
        self._rings = rings
        rings.on_no_group = self.no_group
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
        self._shunned = Shunned()

    async def run(self) -> None:
        """Move what has to move, as soon as it can. Runs until cancelled."""
        while True:
            self.look(self._awake())
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self, now: float) -> None:
        """Note who is away and which rings are quiet, and begin the moves that are due."""
        planned = self._rings.planned
        self._note([ring for _, ring in planned], now)
        for deployment, ring in planned:
            lost = self._lost(ring, now)
            for member in lost:
                self._rings.offline(member)  # also of a ring of which nothing was heard
            slow = self._slow(deployment, ring, now) if not lost else frozenset()
            if lost or slow or self._may_grow(deployment, ring, now):
                self._try(deployment, ring, lost, slow, now)
            else:
                self._tried.pop(ring.ring, None)

    def _try(
        self,
        deployment: StoredDeployment,
        ring: admin_pb2.RingPlan,
        lost: set[str],
        slow: Set[str],
        now: float,
    ) -> None:
        """Begin a move, unless it was tried a moment ago and the same nodes are there."""
        over = self._without(deployment.name, ring, slow)
        now_tried, before = _Try(ring, lost, slow, over, now), self._tried.get(ring.ring)
        again = before is None or not before.same(now_tried)
        if again and ring.ring not in self._moving and (lost or len(over) >= deployment.asked.stages):
            self._tried[ring.ring] = now_tried
            self._spawn(self._move(deployment.name, ring.ring, lost, slow))

    def resume(self) -> None:
        """Go on with the drains of this coordinator's last run; before any ring is formed."""
        for member in self._store.members.all(Role.MEMBER):
            if member.draining > self._clock():
                self._begin_drain(member.id, member.draining, returning=True)

    def drain_end(self) -> int:
        """Until when a drain that begins now lasts (seconds since 1970)."""
        return int(self._clock() + self._drain_timeout) + 1

    def draining(self, member: str, until: int) -> None:
        """The member's rings go on until all are idle or the time is over, and then move. Call it once that
        is stored."""
        self._begin_drain(member, until)

    def staying(self, member: str) -> None:
        """The member does not leave after all: nothing of what its draining began goes on. Call it once that
        is stored."""
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
        """End what is under way; drains are resumed by the next run."""
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
        """Waits for a member that this coordinator has not met yet, as long as for any that is away."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                while self._sessions.find(member) is None:
                    await self._sessions.next_beat()

    def _over(self, member: str) -> None:
        """Its rings have moved or wait; a coordinator that starts again does not take the drain up."""
        known = self._store.members.find(member)
        if known is not None and known.draining:
            self._store.members.save(dataclasses.replace(known, draining=_LONG_AGO))
        self._rings.keep_serving(member, False)
        self._rings.sync()

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

    # Who is lost, and which rings may grow

    def _note(self, rings: list[admin_pb2.RingPlan], now: float) -> None:
        """Since when members are away and rings quiet. While the coordinator hears of no node at all, it is
        cut off itself, and nobody is away."""
        away = {
            (ring.ring, member): self._away.get((ring.ring, member), now)
            for ring in rings
            for member in self._rings.awaited(ring.ring)
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
        """The ring's members that it has to do without."""
        awaited = self._rings.awaited(ring.ring)
        gone = {one for one in awaited if now >= self._away.get((ring.ring, one), now) + self._grace}
        return gone | set(self._rings.obstacles(ring.ring))

    def _may_grow(self, deployment: StoredDeployment, ring: admin_pb2.RingPlan, now: float) -> bool:
        """Whether it has fewer stages than were asked for, and nobody has used it for a while."""
        return self._is_quiet(ring, now) and len(ring.stages) < deployment.asked.stages

    def _slow(self, deployment: StoredDeployment, ring: admin_pb2.RingPlan, now: float) -> Set[str]:
        """The ring's members that have become slow and can be replaced now."""
        slow = self._rings.slow(ring.ring)
        self._shunned.note(slow, now)
        able = slow and not deployment.asked.members and self._is_quiet(ring, now)
        return slow if able and self._without(deployment.name, ring, slow) else frozenset()

    def _without(self, deployment: str, ring: admin_pb2.RingPlan, slow: Set[str]) -> frozenset[str]:
        """The nodes over which a ring may be planned anew, without its slow members: only nodes that serve
        nothing else take their place."""
        if not slow:
            return self._survey.able(deployment, ring.ring)
        stages = [stage.member for stage in ring.stages]
        return self._shunned.over(stages, slow, self._survey.free(ring.ring))

    def _is_quiet(self, ring: admin_pb2.RingPlan, now: float) -> bool:
        """Whether nobody has used it for a while."""
        return now >= self._quiet.get(ring.ring, now) + self._grace

    # Moving

    async def _move(self, name: str, ring: str, lost: set[str], slow: Set[str] = frozenset()) -> None:
        """Plan one ring anew, without the members that are `lost` or `slow`; without any, to give it what was
        asked."""
        self._moving.add(ring)
        try:
            await self._move_ring(name, ring, lost, slow)
        except SealringError as error:
            tell = log.warning if lost else log.info
            tell("ring_not_moved", ring=ring, reason=error.reason, why=error.message)
            if lost:
                self._rings.not_moved(ring, error.message)
        except Exception:  # a defect, which must not keep the other rings of a drain from their moves
            log.exception("ring_not_moved", ring=ring)
        finally:
            self._moving.discard(ring)

    async def _move_ring(self, name: str, ring: str, lost: set[str], slow: Set[str]) -> None:
        deployment = self._store.deployments.get(name)
        old = next((one for one in deployment.plan.rings if one.ring == ring), None)
        if old is None:  # its deployment was deleted and made anew
            return
        freed = [stage.member for stage in old.stages]
        spec = self._spec(deployment, freed, pipeline=old.pipeline)
        answers = await self._survey.ask(spec, replacing=ring)
        if slow:
            spec.stages = 0 if spec.split else len(freed)
            over = self._without(name, old, slow)
            answers = {member: answer for member, answer in answers.items() if member in over}
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
                self._store.deployments.replace(
                    StoredDeployment(deployment.asked, changed, deployment.created)
                )
                details = {
                    "deployment": name,
                    "leaving": " ".join(sorted(lost | slow)),
                    "plan_hash": changed.plan_hash,
                }
                self._store.audit.append(self._clock(), "coordinator", "move_ring", ring, details)

    def _still(self, ring: admin_pb2.RingPlan, lost: set[str]) -> bool:
        """Whether a move has its reason yet: members may be back, or stay after all."""
        if all(one != ring for _, one in self._rings.planned):
            return False
        now_lost = self._lost(ring, self._awake()) | self._drains.keys()
        return now_lost >= lost if lost else ring.ring in self._quiet

    async def _plan(
        self,
        spec: admin_pb2.DeploymentSpec,
        answers: dict[str, Answer],
        digest: str,
        ring: str,
        *,
        gives_way: bool,
    ) -> admin_pb2.DeploymentPlan:
        """The plan as it was asked for, else in as few stages as hold the model."""
        if spec.members and not spec.split:
            able = self._survey.able(spec.name, ring)
            named = [
                member
                for member in spec.members
                if member in able and (told := answers.get(member)) is not None and told.profile
            ]  # a node that came after the survey was not asked
            spec.members[:] = named or spec.members
        try:
            return await self._survey.plan(spec, answers, digest=digest, replacing=ring)
        except (FailedPrecondition, ResourceExhausted):
            if not spec.stages or not gives_way or spec.strategy == TENSOR:
                raise
            spec.stages = 0
            return await self._survey.plan(spec, answers, digest=digest, replacing=ring)

    def _spec(
        self, deployment: StoredDeployment, members: list[str], *, pipeline: bool
    ) -> admin_pb2.DeploymentSpec:
        """What was asked, for one ring, with the context and rows that clients were promised; for a
        `pipeline` where that ring of a tensor deployment has become one."""
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
