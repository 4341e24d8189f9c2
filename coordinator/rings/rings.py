"""The rings that the roster holds: runs the epoch machine of each, tells members and gateways."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import structlog

from sealring.coordinator.planning.speeds import Speeds
from sealring.coordinator.rings.epochs import Action, Commit, End, Phase, Prepare, RingEpochs, Timeouts
from sealring.coordinator.rings.running import RunningRing
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredDeployment
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.coordinator.streams.watchers import Watchers, roster_event
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import EpochEnded, FailedPrecondition, InvalidInput, NotFound
from sealring.mesh.rpc.problem import from_problem, one_line
from sealring.mesh.rpc.protocol import agree
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.trust.levels import level_of
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, RingGone, RingState, WatchResponse

_MAX_GRACE_SECONDS = 300
_RELOAD_SECONDS = 30
"""A ring that is down takes new requests until its silent member is replaced (five minutes at most), and for
as many seconds more, in which the new member loads."""

_MAX_REASON = 200
_MAX_WHAT = 64
_GROUPLESS_EPOCHS = 2
"""Epochs in a row without a group, after which a ring that may becomes a pipeline."""

_ORDERLY = "GATEWAY_LEFT"
_OF_OTHERS = {
    _ORDERLY,
    "BROKEN_OFF",
    "EPOCH_TIMEOUT",
    "GATEWAY_ENDED",
    "GATEWAY_GONE",
    "HANDSHAKE_BROKEN_OFF",
    "HANDSHAKE_TIMEOUT",
    "LINK_POISONED",
    "NO_CONFIRMATION",
    "NO_SUCH_EPOCH",
    "PEER_FROZEN",
    "PEER_LOST",
    "PEER_SILENT",
    "PEER_UNREACHABLE",
    "RECORD_LOST",
    "RECORD_OVERDUE",
    "REKEY_TIMEOUT",
    "RING_FAILED",
}
"""What members say of an epoch's end when the fault lies with a neighbour, with the gateway, or between."""

_SHOWN = 8
log = structlog.get_logger()


class Rings:
    """Keeps the rings in step with the roster and with who is online. `planned` are those of the deployments,
    be they in service or not."""

    def __init__(
        self,
        store: Store,
        publisher: RosterPublisher,
        sessions: Sessions,
        watchers: Watchers,
        settings: CoordinatorSettings,
        *,
        clock: Clock = monotonic_clock,
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._watchers = watchers
        watchers.on_came = self.gateway_came
        self._timeouts = Timeouts(
            settings.prepare_timeout, settings.commit_timeout, settings.heartbeat_timeout
        )
        self._patience = int(min(settings.replace_after, _MAX_GRACE_SECONDS)) + _RELOAD_SECONDS
        self._clock = clock
        self._running: dict[str, RunningRing] = {}
        self._still_serving: set[str] = set()
        self.planned: list[tuple[StoredDeployment, admin_pb2.RingPlan]] = []
        self.speeds = Speeds()
        self._not_moved: dict[str, str] = {}
        self._returning = True
        self._wake = asyncio.Event()
        self.on_no_group: Callable[[str, str, str], None] = lambda deployment, ring, why: None

    # What the rings should be

    def sync(self) -> None:
        """Start, replace and end rings so that they are those of the newest roster."""
        self.planned = [(one, ring) for one in self._store.deployments.all() for ring in one.plan.rings]
        planned = {ring.ring for _, ring in self.planned}
        wanted = {ring.ring: (ring, deployment) for ring, deployment in self._wanted()}
        self._not_moved = {name: why for name, why in self._not_moved.items() if name in planned}
        for name in list(self._running):
            if name not in wanted:
                self._end(name, gone=name not in planned)
            elif wanted[name][0] != self._running[name].plan:
                staying = {stage.member for stage in wanted[name][0].stages}
                self._end(name, gone=False, staying=staying)
        for name, (ring, plan) in wanted.items():
            if name not in self._running:
                self._start(ring, plan)
        self._returning = False
        self._wake.set()

    def keep_serving(self, member: str, keep: bool) -> None:
        """While a member drains, its rings go on until this is taken back."""
        (self._still_serving.add if keep else self._still_serving.discard)(member)

    def not_moved(self, ring: str, why: str) -> None:
        """A ring without one of its members found no others; told while it is out of service."""
        self._not_moved[ring] = why

    def _wanted(self) -> Iterator[tuple[admin_pb2.RingPlan, admin_pb2.DeploymentPlan]]:
        parked = self._store.members.draining() - self._still_serving
        for deployment, ring in self.planned:
            members = {stage.member for stage in ring.stages}
            if self._publisher.serves(ring.ring) and not members & parked:
                yield ring, deployment.plan

    def _start(self, ring: admin_pb2.RingPlan, plan: admin_pb2.DeploymentPlan) -> None:
        machine = RingEpochs(
            {stage.member: stage.member_name for stage in ring.stages},
            lambda: self._store.deployments.next_epoch(ring.ring),
            self._timeouts,
            undecided=self._returning,
        )
        self._not_moved.pop(ring.ring, None)
        self._running[ring.ring] = RunningRing(
            *(ring, plan.spec, plan.profile.digest, plan.profile.model_type, machine, self._patience),
            commit=plan.profile.commit,
            hub_files=plan.profile.hub_files,
        )
        self._watchers.tell(WatchResponse(ring=self._running[ring.ring].state()))
        for stage in ring.stages:
            if self._is_here(stage.member):
                self._apply(ring.ring, machine.online(stage.member, self._clock()))

    def _end(self, name: str, *, gone: bool, staying: Collection[str] = ()) -> None:
        running = self._running[name]
        reason = "the deployment was deleted" if gone else "its members are changing"
        for action in running.machine.close(reason):
            if isinstance(action, End):
                self._tell_end(running, action, unload=True, staying=staying)
        del self._running[name]
        if gone:
            self._watchers.tell(WatchResponse(gone=RingGone(ring=name)))
        else:
            self._watchers.tell(WatchResponse(ring=running.down(reason)))

    # What the members say

    def online(self, member: str) -> None:
        """A node's stream is there, or the node has proved what it runs."""
        if not self._is_here(member):
            return
        for name, running in self._of(member):
            said = self._said(member, name)
            serving = self._serving_epoch(member, said.prepared, running)
            links = _links(said.links, running)
            if serving and running.machine.undecided:
                running.protocol = said.prepared.protocol
            actions = running.machine.online(member, self._clock(), serving=serving, links=links)
            self._apply(name, actions)

    def _is_here(self, member: str) -> bool:
        known = self._store.members.find(member) if self._sessions.find(member) is not None else None
        return known is not None and self._publisher.standing.attested(known)

    def lost(self, member: str) -> None:
        """A node's stream broke."""
        for name, running in self._of(member):
            self._apply(name, running.machine.lost(member, self._clock()))

    def offline(self, member: str) -> None:
        """A node is gone."""
        for name, running in self._of(member):
            self._apply(name, running.machine.offline(member, self._clock()))

    def prepared(self, member: str, message: membership_pb2.EpochPrepared) -> None:
        """A member finished phase one."""
        running = self._ring_of(member, message.ring)
        if running is not None:
            links, address = _links(message.links, running), message.group_address
            if running.backend and not _is_address(address):  # it goes to every member
                reason = f"{running.name_of(member)}: it names no address for its group"
                self._apply(message.ring, running.machine.fault(member, message.epoch, reason, self._clock()))
                return
            self._note_speed(member, message)
            address = address if running.backend else ""
            actions = running.machine.prepared(member, message.epoch, links, self._clock(), address)
            self._apply(message.ring, actions)

    def _note_speed(self, member: str, message: membership_pb2.EpochPrepared) -> None:
        if len(self._of(member)) > 1:  # the other ring may have had steps at that moment
            return
        for deployment, ring in self.planned:
            for stage in ring.stages:
                whole = not deployment.plan.spec.backend  # or a step tells nothing of layers
                if whole and ring.ring == message.ring and stage.member == member:
                    self.speeds.note(stage, deployment.plan.profile, message)

    def progressed(self, member: str, message: membership_pb2.EpochProgress) -> None:
        """A member is under way."""
        running = self._ring_of(member, message.ring)
        if running is not None:
            what = one_line(message.what, _MAX_WHAT)
            self._apply(
                message.ring,
                running.machine.advanced(member, message.epoch, what, message.fraction, self._clock()),
            )

    def up(self, member: str, message: membership_pb2.EpochUp) -> None:
        """A member finished phase two."""
        running = self._ring_of(member, message.ring)
        if running is not None:
            self._apply(message.ring, running.machine.up(member, message.epoch, self._clock()))

    def faulted(self, member: str, message: membership_pb2.EpochFault) -> None:
        """A member cannot go on."""
        running = self._ring_of(member, message.ring)
        if running is None:
            return
        problem = from_problem(message.problem)
        tell = log.info if problem.reason == _ORDERLY else log.warning
        tell("epoch_fault", ring=message.ring, epoch=message.epoch, member=member, why=problem.reason)
        reason = f"{running.name_of(member)}: {problem.message or problem.reason}"[:_MAX_REASON]
        root = problem.reason not in _OF_OTHERS
        actions = running.machine.fault(member, message.epoch, reason, self._clock(), root=root)
        self._apply(message.ring, actions)
        # A neighbour that lost its peer may have ended the epoch before the rank without a group says so,
        # and the next may have begun.
        if problem.reason == EpochEnded.no_group and running.served < message.epoch <= running.machine.epoch:
            running.groupless.add(message.epoch)
            able = running.backend and running.spec.or_pipeline
            if able and len(running.groupless) >= _GROUPLESS_EPOCHS:
                running.groupless.clear()
                self.on_no_group(running.spec.name, message.ring, reason)

    def gateway_came(self) -> None:
        """Rings that were formed while a gateway was away, as after this coordinator's restart, may speak
        what it does not: where there is something that all speak, they are formed anew."""
        for name, running in self._running.items():
            machine = running.machine
            if machine.undecided or not running.protocol:
                continue
            with contextlib.suppress(FailedPrecondition):
                if self._protocol(running) < running.protocol:
                    why = f"a gateway came that does not speak protocol {running.protocol}"
                    self._apply(name, machine.fault(machine.members[0], machine.epoch, why, self._clock()))

    def _ring_of(self, member: str, ring: str) -> RunningRing | None:
        """The ring of that name, if it is in service and this is one of its members: what other nodes say of
        it counts for nothing."""
        running = self._running.get(ring)
        return running if running is not None and member in running.machine.members else None

    def _said(self, member: str, ring: str) -> membership_pb2.ServingEpoch:
        """What a node had up of a ring when it came."""
        session = self._sessions.find(member)
        said = session.serving.get(ring) if session is not None else None
        return said or membership_pb2.ServingEpoch()

    def _serving_epoch(self, member: str, said: membership_pb2.PrepareEpoch, running: RunningRing) -> int:
        """The epoch of the ring that a node had up when it came, if it is one that may go on; else 0.

        It may if it was given out, under a roster of this coordinator, and would be prepared alike today.
        That its ring has the same members and layers the node checks itself, against every new roster.
        """
        if said.ring != running.plan.ring or said.epoch > self._store.deployments.last_epoch(said.ring):
            return 0
        signed = self._store.rosters.find(said.roster_version)  # None: so old that it is not kept any more
        if said.roster_version > self._publisher.current.version or (
            signed and signed.hash != said.roster_hash
        ):
            return 0
        stage = running.stage_of(member)
        protocol = said.protocol if running.machine.undecided else running.protocol
        as_now = running.prepare(stage, said.epoch, said.roster_version, said.roster_hash, protocol)
        return said.epoch if said == as_now else 0

    def beaten(self, session: NodeSession, heartbeat: membership_pb2.Heartbeat, *, first: bool) -> None:
        """A heartbeat tells how rings do that miss somebody; the first is compared with what should run."""
        for health in heartbeat.rings:
            running = self._ring_of(session.member, health.ring)
            if running is None:
                continue
            if health.attended:
                running.machine.attended(health.epoch, self._clock())
            running.beaten(session.member, health)
            alone = len(self._of(session.member)) == 1  # else it depends on what the other ring does
            running.pace.beaten(session.member, health.step_us if alone else 0, len(running.machine.members))
        self._tell_pace(session)
        if first:
            self._compare(session, heartbeat)

    def slow(self, ring: str) -> frozenset[str]:
        """The members of a ring that have become slow."""
        running = self._running.get(ring)
        return frozenset(filter(running.pace.slow, running.machine.members) if running else ())

    def _tell_pace(self, session: NodeSession) -> None:
        """Says of a member that has become slow that it has."""
        member = session.member
        factor = max((running.pace.slow(member) for _, running in self._of(member)), default=0.0)
        if bool(factor) != bool(session.slow):
            log.warning(
                "member_slow" if factor else "member_not_slow", member=session.member, factor=round(factor, 1)
            )
        session.slow = ""
        if factor:
            session.slow = (
                f"its steps take {factor:.1f} times as long as before, against those of the ring's others: "
                "look for heat, Low Power Mode, swapping or other programs (sealring doctor on it)"
            )

    def _compare(self, session: NodeSession, heartbeat: membership_pb2.Heartbeat) -> None:
        """What a node says it runs when it comes (back) is compared with what it should run."""
        reported = {health.ring: health.epoch for health in heartbeat.rings}
        for name, running in self._of(session.member):
            machine = running.machine
            if machine.phase is Phase.SERVING and reported.get(name) != machine.epoch:
                reason = f"{running.name_of(session.member)} was restarted"
                self._apply(name, machine.fault(session.member, machine.epoch, reason, self._clock()))
        for name, epoch in reported.items():
            known = self._running.get(name)
            if known is None or epoch != known.machine.epoch or known.machine.phase is Phase.WAITING:
                end = membership_pb2.EndEpoch(
                    ring=name, epoch=epoch, reason="the epoch is over", unload=known is None
                )
                session.send(CoordinatorMessage(end=end))

    # What there is to tell

    def snapshot(self) -> list[WatchResponse]:
        """What a gateway that begins to watch has to know; nothing of rings that may turn out to serve."""
        known = [running for _, running in sorted(self._running.items()) if not running.machine.undecided]
        rings = [running.state() for running in known]
        parked = [
            RingState(
                ring=ring.ring,
                phase=membership_pb2.RING_PHASE_DOWN,
                deployment=deployment.name,
                reason=self._parked(ring).reason,
                model_type=deployment.plan.profile.model_type,
                patience=self._patience,
            )
            for deployment, ring in self.planned
            if ring.ring not in self._running
        ]
        told = [WatchResponse(ring=state) for state in (*rings, *parked)]
        return [roster_event(self._publisher.current), *told]

    def statuses(self, plan: admin_pb2.DeploymentPlan) -> Iterable[admin_pb2.RingStatus]:
        """The rings of a deployment as the operator sees them."""
        for ring in plan.rings:
            running = self._running.get(ring.ring)
            status = self._parked(ring) if running is None else running.status()
            if running is not None and running.machine.awaited:
                status.reason += self._stuck(ring.ring)
            yield status

    def _parked(self, ring: admin_pb2.RingPlan) -> admin_pb2.RingStatus:
        """A planned ring that cannot be in service: which of its members keep it from that."""
        obstacles = self.obstacles(ring.ring)
        names = {stage.member: stage.member_name for stage in ring.stages}
        why = "; ".join(f"{names[member]} {obstacle}" for member, obstacle in obstacles.items())
        return admin_pb2.RingStatus(
            ring=ring.ring,
            phase=membership_pb2.RING_PHASE_DOWN,
            reason=(why or "the newest roster does not hold it") + self._stuck(ring.ring),
        )

    def _stuck(self, ring: str) -> str:
        why = self._not_moved.get(ring)
        return f"; others could not take over: {why}" if why else ""

    def awaited(self, ring: str) -> list[str]:
        """The members that a ring in service waits for (see `RingEpochs.awaited`)."""
        running = self._running.get(ring)
        return running.machine.awaited if running else []

    def obstacles(self, name: str) -> dict[str, str]:
        """The members that keep a planned ring out of service, and what each of them does."""
        if name in self._running:
            return {}
        return {
            stage.member: obstacle
            for deployment, ring in self.planned
            for stage in ring.stages
            if ring.ring == name
            and (obstacle := self._obstacle(stage.member, deployment.plan.spec.trust_floor))
        }

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

    def serving(self, name: str) -> RunningRing:
        """The ring of that name, or the only one for "".

        Raises NotFound (NO_SUCH_RING), InvalidInput (WHICH_RING), FailedPrecondition (RING_DOWN).
        """
        if not name and len(self._running) > 1:
            raise InvalidInput(
                "there are several rings",
                hint=f"name one of: {', '.join(sorted(self._running)[:_SHOWN])}",
                reason="WHICH_RING",
                param="ring",
            )
        found = self._running.get(name) if name else next(iter(self._running.values()), None)
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

    async def run(self) -> None:
        """Let time pass: deadlines, back-offs and grace periods. Runs until cancelled."""
        while True:
            self._wake.clear()
            deadlines = [running.machine.deadline() for running in self._running.values()]
            due = min((deadline for deadline in deadlines if deadline is not None), default=None)
            wait = None if due is None else max(0.0, due - self._clock())
            try:
                async with asyncio.timeout(wait):  # wait_for may swallow a cancellation (cpython 86296)
                    await self._wake.wait()
            except TimeoutError:
                for name, running in self._running.items():
                    self._apply(name, running.machine.tick(self._clock()))

    def model_changed(self, member: str, stated: Collection[bytes]) -> bool:
        """Whether files of a model that a member serves are not those that were planned, by the digests that
        it states, one for each ring: one of them is of no ring that it is to serve, where one that it serves
        is missing.

        One that is missing alone is of an epoch that has begun or ended since the member was asked. They are
        counted, for the files of one ring's model may have become those of another's.
        """
        planned = [running for _, running in self._of(member)]
        serving = [running for running in planned if running.machine.phase is Phase.SERVING]
        known, served = (Counter(bytes.fromhex(one.digest) for one in some) for some in (planned, serving))
        return not served <= Counter(stated) and not known >= Counter(stated)

    # How it is told

    def _apply(self, name: str, actions: list[Action]) -> None:
        running = self._running[name]
        for action in actions:
            if isinstance(action, Prepare):
                if over := self._tell_prepare(running, action):
                    self._apply(name, over)
                    return
            elif isinstance(action, Commit):
                commit = membership_pb2.CommitEpoch(
                    ring=name, epoch=action.epoch, group_addresses=action.addresses
                )
                self._tell(running, CoordinatorMessage(commit=commit))
            elif isinstance(action, End):
                self._tell_end(running, action, unload=False)
            else:
                self._report(name, running.machine)
        self._wake.set()

    def _report(self, name: str, machine: RingEpochs) -> None:
        log.info(
            "ring_changed", ring=name, epoch=machine.epoch, phase=machine.phase.value, why=machine.reason
        )
        if machine.phase is Phase.SERVING:
            self._not_moved.pop(name, None)
            self._running[name].served = machine.epoch
            self._running[name].groupless.clear()
        self._watchers.tell(WatchResponse(ring=self._running[name].state()))

    def _tell_prepare(self, running: RunningRing, action: Prepare) -> list[Action]:
        """What follows at once: the end, where the members have no protocol in common."""
        try:
            running.protocol = self._protocol(running)
        except FailedPrecondition as error:
            member = running.machine.members[0]
            return running.machine.fault(member, action.epoch, str(error), self._clock())
        roster = self._publisher.current
        for stage in running.plan.stages:
            prepare = running.prepare(stage, action.epoch, roster.version, roster.hash, running.protocol)
            self._sessions.send(stage.member, CoordinatorMessage(prepare=prepare))
        return []

    def _protocol(self, running: RunningRing) -> int:
        """What all members and, if there is any such, all gateways speak. Raises FailedPrecondition."""
        releases = {
            f"node {stage.member_name}": session.release
            for stage in running.plan.stages
            if (session := self._sessions.find(stage.member)) is not None
        }
        try:
            return agree(releases | self._watchers.releases)
        except FailedPrecondition:
            return agree(releases)

    def _tell_end(
        self, running: RunningRing, action: End, *, unload: bool, staying: Collection[str] = ()
    ) -> None:
        for stage in running.plan.stages:
            end = membership_pb2.EndEpoch(
                ring=running.plan.ring,
                epoch=action.epoch,
                reason=action.reason,
                unload=unload and stage.member not in staying,
            )
            self._sessions.send(stage.member, CoordinatorMessage(end=end))

    def _tell(self, running: RunningRing, message: CoordinatorMessage) -> None:
        for stage in running.plan.stages:
            self._sessions.send(stage.member, message)

    def _of(self, member: str) -> list[tuple[str, RunningRing]]:
        return [
            (name, running) for name, running in self._running.items() if member in running.machine.members
        ]


def _is_address(text: str) -> bool:
    try:
        return parse_address(text)[1] > 0
    except InvalidInput:
        return False


def _links(
    reported: Sequence[membership_pb2.LinkInfo], running: RunningRing
) -> list[membership_pb2.LinkInfo]:
    return list(reported[: 2 * len(running.plan.stages)])
