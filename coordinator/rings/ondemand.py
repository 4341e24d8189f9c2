"""Loads and unloads the models of deployments on demand, as their machine decides (`loads.py`).

Which models are loaded is in the database: such a deployment has rings. All else is heard anew from gateways
and nodes by the next coordinator, for which every loaded model begins its turn and its keep-alive again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence

import structlog

from sealring.coordinator.nodes.profiles import ProfileReply
from sealring.coordinator.rings.deployments import DeploymentService, ring_names
from sealring.coordinator.rings.epochs import Phase as RingPhase
from sealring.coordinator.rings.loads import (
    Heard,
    Load,
    Loads,
    Phase,
    Policy,
    Victims,
    and_,
    fewest,
    not_loaded,
    verb,
)
from sealring.coordinator.rings.running import RingTable
from sealring.coordinator.store import Store, StoredDeployment
from sealring.coordinator.streams.outbox import Outbox
from sealring.coordinator.streams.sessions import Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.clock import Clock, awake_clock
from sealring.mesh.errors import Conflict, NotFound, RosterError, SealringError, Unavailable
from sealring.mesh.pki.certificates import Role
from sealring.mesh.ring.wishes import Wishes
from sealring.mesh.rpc.problem import to_problem
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import ModelGone, ModelState, WatchResponse

_LOOK_SECONDS = 0.5
_LOST_SECONDS = 5.0
"""How long a ring that has never served waits for a member before it is planned anew without it: no answer
depends on it yet, so a shorter time than `replace_after` costs nothing but a load."""

_FAILURES = 2
"""Epochs in a row that end before they serve, after which a load begins anew."""

ABSENT_SECONDS = 30.0
"""How long a node may have been away when a model is asked for, so that what waits for the model waits for
the node: as long as a ring waits for a member by default (`replace_after`). A node that goes later is waited
for until it comes, because it may be asleep. None has gone before its coordinator started."""

_SHOWN_SECONDS = 10
"""Times are rounded to this before gateways get them: exact ones change with every request and second."""

_SHOWN_PERCENT = 5
"""Progress is rounded to this before gateways get it."""

_PHASES = {
    Phase.NOT_LOADED: membership_pb2.LOAD_PHASE_NOT_LOADED,
    Phase.WAITING: membership_pb2.LOAD_PHASE_WAITING,
    Phase.LOADING: membership_pb2.LOAD_PHASE_LOADING,
    Phase.LOADED: membership_pb2.LOAD_PHASE_LOADED,
    Phase.YIELDING: membership_pb2.LOAD_PHASE_YIELDING,
}
log = structlog.get_logger()


class OnDemand:
    """Looks after the models on demand while `run` runs. `clock` is the wall clock."""

    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        watchers: Watchers,
        table: RingTable,
        deployments: DeploymentService,
        *,
        clock: Clock,
        awake: Clock = awake_clock,
    ) -> None:
        """`awake` counts seconds without those in which this machine slept: nobody could ask then."""
        self.loads = Loads()
        self.absent_seconds = ABSENT_SECONDS
        self._store = store
        self._sessions = sessions
        self._watchers = watchers
        self._table = table
        self._deployments = deployments
        self._clock = clock
        self._awake = awake
        self._known: list[StoredDeployment] = []
        self._stale = True  # `_known` is older than what is stored
        self._asked: dict[str, dict[Outbox[WatchResponse], int]] = {}  # by model and stream
        self._wishes: dict[str, Wishes[Outbox[WatchResponse]]] = {}  # by model, of streams
        self._placed: dict[str, float] = {}  # since when a load of this run has missed no member
        self._sent: dict[str, ModelState] = {}
        self._began = awake()
        self._left: dict[str, float] = {}  # when nodes went that are not back
        self._changes = 0
        self._work: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Looks at once when something has changed, and otherwise twice a second. Runs until cancelled."""
        try:
            while True:
                self._watchers.asked.clear()
                await self.look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._watchers.asked.wait()
        finally:
            if self._work is not None:
                self._work.cancel()

    def stored(self) -> None:
        """Has `run` look again, at deployments and members that may have changed."""
        self._stale = True
        self._look_anew()

    # Nodes that come and go (SessionListener)

    def online(self, member: str) -> None:
        """There may be room now."""
        self._left.pop(member, None)
        self._look_anew()

    def _look_anew(self) -> None:
        """No refusal of the past holds any longer, nor one that is being found out."""
        self._changes += 1
        self.loads.look_anew(self._awake())
        self._watchers.asked.set()

    def lost(self, member: str) -> None:
        """It may come back."""
        self._left[member] = self._awake()

    def offline(self, member: str) -> None:
        """It may come back, unless it was evicted."""
        self._left[member] = self._awake()

    def _away(self, since: float) -> list[str]:
        """The names of nodes that are away and went later than `since`, or have not come yet since this
        coordinator began."""
        members = {one.id: one for one in self._store.members.all(Role.MEMBER)}
        self._left = {member: at for member, at in self._left.items() if member in members}
        return [
            one.name
            for one in members.values()
            if not one.draining
            and self._sessions.find(one.id) is None
            and self._left.get(one.id, self._began) > since
        ]

    async def look(self) -> None:
        """Takes in what has happened, unloads idle models, and begins to place one that waits."""
        now = self._awake()
        self._sync(now)
        for name in list(self.loads.models):
            self._hear(name, now)
            if self.loads.models[name].phase is Phase.LOADING:
                await self._follow(name, now)
        for name in self.loads.tick(now):
            if await self._unload(name, "nobody uses it"):
                self.loads.unloaded(name, now)
        if self.loads.waiting(now) and (self._work is None or self._work.done()):
            self._work = asyncio.get_running_loop().create_task(self._place())
        self._tell()

    def snapshot(self) -> list[WatchResponse]:
        """The events for a gateway that begins to watch."""
        return [WatchResponse(model=state) for state in self._sent.values()]

    def status(self, name: str) -> admin_pb2.LoadStatus | None:
        """The state of a model for operators; None for a deployment that is not on demand."""
        load = self.loads.models.get(name)
        if load is None:
            return None
        return admin_pb2.LoadStatus(
            phase=_PHASES[load.phase],
            reason=load.error.message if load.error is not None else load.reason,
            expires=self._expires(name),
            waiting=load.heard.waiting,
        )

    def _sync(self, now: float) -> None:
        self.loads.sync(self._deployed(), now)
        for name in self._asked.keys() - self.loads.models.keys():
            del self._asked[name]
            self._wishes.pop(name, None)
            self._placed.pop(name, None)

    def _deployed(self) -> dict[str, tuple[Policy, bool]]:
        """The stored deployments on demand, each with its policy and whether it has rings."""
        if self._stale:
            self._known, self._stale = self._store.deployments.all(), False
        found = (one for one in self._known if one.plan.spec.on_demand)
        return {one.name: (policy_of(one.plan.spec), bool(one.plan.rings)) for one in found}

    def _rings(self, name: str) -> list[str]:
        found = next((one for one in self._known if one.name == name), None)
        return [ring.ring for ring in found.plan.rings] if found else []

    # What gateways and nodes report

    def _hear(self, name: str, now: float) -> None:
        reports = {
            stream: next((one for one in demand.models if one.deployment == name), None)
            for stream, demand in self._watchers.demands.items()
        }
        known = {stream: one for stream, one in reports.items() if one is not None}
        before = self._asked.get(name, {})
        self._asked[name] = {stream: one.asked if one else 0 for stream, one in reports.items()}
        if self.loads.models[name].phase is Phase.NOT_LOADED:
            self._wishes.pop(name, None)  # they held for that load
        used, wishes = False, self._wishes.setdefault(name, Wishes())
        wishes.keep(known)  # a gateway that goes takes its clients' along
        for stream, one in known.items():
            if one.asked > before.get(stream, 0):
                wishes.ask(stream, _keep_alive(one), now)
            used |= one.asked > before.get(stream, one.asked)
        holding = all(one is not None and one.holding for one in reports.values())
        stepping = not all(map(self._is_idle, self._rings(name)))
        heard = Heard(
            active=stepping or any(one.active for one in known.values()),
            waiting=sum(one.waiting for one in known.values()),
            used=used,
            holding=holding,
            keep_alive=wishes.longest(self.loads.models[name].policy.keep_alive),
        )
        self.loads.hear(name, heard, now)

    def _is_idle(self, ring: str) -> bool:
        """Whether no request uses a ring by the word of its members: of a gateway that is cut off from this
        coordinator, or of an earlier release, nothing else is known."""
        running = self._table.running.get(ring)
        if running is None or running.machine.phase is not RingPhase.SERVING:
            return True
        sessions = [self._sessions.find(stage.member) for stage in running.plan.stages]
        return all(session is not None and ring in session.idle for session in sessions)

    async def _follow(self, name: str, now: float) -> None:
        """Notes that all rings of a model serve, or gives up a load of this run that gets nowhere."""
        rings = [self._table.running.get(ring) for ring in self._rings(name)]
        running = [ring for ring in rings if ring is not None]
        if len(running) == len(rings) and all(one.machine.phase is RingPhase.SERVING for one in running):
            self._placed.pop(name, None)
            self.loads.serving(name, now)
            return
        complete = len(running) == len(rings) and not any(one.machine.awaited for one in running)
        if name in self._placed and complete:
            self._placed[name] = now
        failed = next((one for one in running if one.machine.failures >= _FAILURES), None)
        if failed is not None or now >= self._placed.get(name, math.inf) + _LOST_SECONDS:
            status = failed or next((one for one in running if one.machine.awaited), None)
            why = status.machine.reason if status else "a member of its rings has left"
            log.warning("model_not_loaded", deployment=name, why=why)
            if await self._unload(name, why):
                self.loads.stuck(name, why, now)

    # Loading and unloading

    async def _unload(self, name: str, why: str) -> bool:
        """Takes a model's rings away. False if an operator has deleted it, or the database cannot be written:
        the next look tries again."""
        try:
            await self._deployments.unload(name, why)
        except SealringError as error:
            log.warning("model_not_unloaded", deployment=name, reason=error.reason, why=error.message)
            return False
        self._placed.pop(name, None)
        log.info("model_unloaded", deployment=name, why=why)
        return name in self.loads.models

    async def _place(self) -> None:
        """Places the models that wait, the longest waiting first, as far as there is room."""
        for name in self.loads.waiting(self._awake()):
            changes = self._changes
            try:
                await self._place_one(name)
            except (Conflict, NotFound) as error:
                if error.reason not in ("NODES_CHANGED", "DEPLOYMENT_CHANGED", "UNKNOWN_DEPLOYMENT"):
                    self._refuse(name, error, changes)
            except SealringError as error:
                self._refuse(name, error, changes)
            except Exception:  # a defect, which must not keep the other models from being loaded
                log.exception("model_not_loaded", deployment=name)
                if self._waits(name):
                    self.loads.postponed(name, Victims((), (), math.inf), self._awake())
        self._watchers.asked.set()

    async def _place_one(self, name: str) -> None:
        """Raises what `DeploymentService.load` raises."""
        loads = self.loads
        victims = loads.victims(name, self._awake())
        able = [*victims.now, *victims.later]
        spec, answers = await self._deployments.offers(name, self._deployments.rings_of(able))
        victims = loads.victims(name, self._awake())  # some may have come or gone meanwhile
        able = [*victims.now, *victims.later]
        if loads.yielded_to == name:
            freed = loads.freed(name)
            if freed is not None:
                await self._load(name, spec, answers, freed)
            return
        refusal: list[SealringError] = []

        async def fits(freed: Sequence[str]) -> bool:
            try:
                await self._deployments.fit(spec, answers, freed)
            except Conflict:
                raise
            except SealringError as error:
                refusal.append(error)
                return False
            return True

        chosen = await fewest(victims.now, fits)
        if chosen == []:
            await self._load(name, spec, answers, [])
        elif chosen is None and not await fits(able):
            raise self._while_silent(name, refusal[-1], answers)
        elif not self._waits(name):
            return
        elif chosen is None or loads.yielded_to:
            loads.postponed(name, victims, self._awake())
        else:
            log.info("models_make_room", deployment=name, unloaded=chosen)
            loads.make_room(name, chosen, self._awake())

    async def _load(
        self, name: str, spec: admin_pb2.DeploymentSpec, answers: dict[str, ProfileReply], freed: list[str]
    ) -> None:
        if not self._waits(name):
            return
        try:
            await self._deployments.load(spec, answers, freed)
        except SealringError as error:
            if not freed or isinstance(error, RosterError | Unavailable):  # no room would help
                raise
            log.info("room_not_enough", deployment=name, reason=error.reason)  # it is looked for anew
            self.loads.keep_all(name, self._awake())
            return
        now = self._awake()
        self._placed[name] = now
        self._sync(now)
        if name in self.loads.models:
            self.loads.placed(name, [one for one in freed if one in self.loads.models], now)
        log.info("model_placed", deployment=name, unloaded=freed)

    def _while_silent(
        self, name: str, error: SealringError, answers: dict[str, ProfileReply]
    ) -> SealringError:
        """The error of a plan, as one for now if there are nodes that may have the model."""
        silent = {member for member, reply in answers.items() if reply.undecided}
        names = [one.name for one in self._store.members.all(Role.MEMBER) if one.id in silent]
        return not_loaded(name, f"of {and_(names)} nothing is known, and {error.message}") if names else error

    def _waits(self, name: str) -> bool:
        load = self.loads.models.get(name)
        return load is not None and load.phase is Phase.WAITING

    def _refuse(self, name: str, error: SealringError, changes: int) -> None:
        """Fails what waits for a model, unless nodes are awaited, or came or changed after the first
        `changes`: such nodes may not have been asked for the model, so all are asked again."""
        if self._changes > changes:
            return
        if self._waits(name):
            asked = self.loads.models[name].asked_since
            if awaited := self._away(asked - self.absent_seconds):
                self.loads.awaits(name, awaited, self._awake())
                return
            if away := self._away(-math.inf):
                error = not_loaded(name, f"{and_(away)} {verb(away)} away, and {error.message}")
        log.warning("model_refused", deployment=name, reason=error.reason, why=error.message)
        if name in self.loads.models:
            self.loads.refused(name, error, self._awake())

    # States for gateways

    def _tell(self) -> None:
        states = {state.deployment: state for state in self._states()}
        for name in self._sent.keys() - states.keys():
            self._watchers.tell(WatchResponse(model_gone=ModelGone(deployment=name)))
        for name, state in states.items():
            if self._sent.get(name) != state:
                self._watchers.tell(WatchResponse(model=state))
        self._sent = states

    def _states(self) -> Iterator[ModelState]:
        for one in self._known:
            spec, profile = one.plan.spec, one.plan.profile
            state = ModelState(
                deployment=one.name,
                aliases=spec.aliases,
                rings=sorted(ring_names(spec)),
                model_type=profile.model_type,
                context=spec.context,
                memory=sum(profile.layer_bytes) + profile.embed_bytes + profile.head_bytes,
                digest=profile.digest,
                parameters=profile.parameters,
                precision=profile.precision,
            )
            if (load := self.loads.models.get(one.name)) is not None:
                self._add_load(state, load)
            self._add_progress(state, one)
            yield state

    def _add_progress(self, state: ModelState, deployment: StoredDeployment) -> None:
        """Adds how far the slowest member of the rings that form is, in percent, and in `status`'s words."""
        running = (self._table.running.get(ring.ring) for ring in deployment.plan.rings)
        forming = [one.machine for one in running if one and one.machine.phase is RingPhase.PREPARING]
        if forming:
            what, share = min((one.slowest for one in forming), key=lambda each: each[1])
            state.progress = int(share * 100) // _SHOWN_PERCENT * _SHOWN_PERCENT
            state.reason = state.reason or f"{what} {state.progress} %"

    def _add_load(self, state: ModelState, load: Load) -> None:
        state.phase, state.reason = _PHASES[load.phase], load.reason
        keep_alive = load.policy.keep_alive
        state.keep_alive = round(keep_alive) if math.isfinite(keep_alive) else -1
        if load.error is not None:
            state.problem.CopyFrom(to_problem(load.error))
        seconds = self.loads.seconds(state.deployment, self._awake())
        state.seconds = math.ceil(seconds / _SHOWN_SECONDS) * _SHOWN_SECONDS
        state.expires = self._expires(state.deployment)

    def _expires(self, name: str) -> int:
        """When a model is unloaded unless it is used, in seconds since 1970; 0 if it is not."""
        left = self.loads.expires(name) - self._awake()
        if not math.isfinite(left):
            return 0
        return round((self._clock() + left) / _SHOWN_SECONDS) * _SHOWN_SECONDS


def _keep_alive(demand: membership_pb2.ModelDemand) -> float | None:
    if not demand.HasField("keep_alive"):
        return None
    return float(demand.keep_alive) if demand.keep_alive >= 0 else math.inf


def policy_of(spec: admin_pb2.DeploymentSpec) -> Policy:
    """The operator's wishes of a deployment on demand."""
    return Policy(float(spec.keep_alive) if spec.keep_alive else math.inf, spec.pinned)
