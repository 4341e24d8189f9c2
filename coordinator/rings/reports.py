"""Takes the reports of members on their rings: how epochs go, and how long steps take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import structlog

from sealring.coordinator.nodes.links import Links
from sealring.coordinator.planning.speeds import Speeds
from sealring.coordinator.rings.driver import RingDriver
from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.running import RingTable, RunningRing, is_address, reported_links
from sealring.coordinator.streams.sessions import NodeSession
from sealring.mesh.errors import EpochEnded, FailedPrecondition
from sealring.mesh.rpc.problem import from_problem, one_line
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage

_MAX_REASON = 200
_MAX_WHAT = 64
_CACHES_BYTES = 32
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
"""Reasons for the end of an epoch whose fault lies with a neighbour of the member that reports it, with the
gateway, or between."""

log = structlog.get_logger()


class RingReports:
    """Passes reports to the ring's machine. Those of nodes that are no members of the ring are dropped."""

    def __init__(
        self,
        table: RingTable,
        driver: RingDriver,
        speeds: Speeds,
        links: Links,
        no_group: Callable[[str, str, str], None],
    ) -> None:
        """`speeds` takes the step times that members measure when they load a stage, and `links` what they
        measure of the ways to their neighbours. `no_group` is called with deployment, ring and reason when a
        ring's group does not come up."""
        self._links = links
        self._table = table
        self._driver = driver
        self._speeds = speeds
        self._no_group = no_group

    def prepared(self, member: str, message: membership_pb2.EpochPrepared) -> None:
        """A member finished phase one."""
        running = self._table.find(member, message.ring)
        if running is None:
            return
        now = self._driver.clock()
        if running.backend and not is_address(message.group_address):  # it is sent to every member
            reason = f"{running.name_of(member)}: it names no address for its group"
            self._driver.apply(message.ring, running.machine.fault(member, message.epoch, reason, now))
            return
        self._note_speed(member, message)
        links = reported_links(message.links, running)
        address = message.group_address if running.backend else ""
        caches = message.caches[:_CACHES_BYTES]  # they are sent to every member
        actions = running.machine.prepared(member, message.epoch, links, now, address, caches)
        self._driver.apply(message.ring, actions)

    def progressed(self, member: str, message: membership_pb2.EpochProgress) -> None:
        """A member is preparing."""
        running = self._table.find(member, message.ring)
        if running is not None:
            what, now = one_line(message.what, _MAX_WHAT), self._driver.clock()
            actions = running.machine.advanced(member, message.epoch, what, message.fraction, now)
            self._driver.apply(message.ring, actions)

    def up(self, member: str, message: membership_pb2.EpochUp) -> None:
        """A member finished phase two."""
        running = self._table.find(member, message.ring)
        if running is not None:
            links = reported_links(message.links, running)
            self._note_links(member, links, running)
            actions = running.machine.up(member, message.epoch, self._driver.clock(), links)
            self._driver.apply(message.ring, actions)

    def faulted(self, member: str, message: membership_pb2.EpochFault) -> None:
        """A member cannot go on."""
        running = self._table.find(member, message.ring)
        if running is None:
            return
        problem = from_problem(message.problem)
        write = log.info if problem.reason == _ORDERLY else log.warning
        write("epoch_fault", ring=message.ring, epoch=message.epoch, member=member, why=problem.reason)
        reason = f"{running.name_of(member)}: {problem.message or problem.reason}"[:_MAX_REASON]
        root = problem.reason not in _OF_OTHERS
        actions = running.machine.fault(member, message.epoch, reason, self._driver.clock(), root=root)
        self._driver.apply(message.ring, actions)
        # A neighbour that lost its peer may end the epoch before the rank without a group reports, and the
        # next epoch may have begun: epochs since the last that served count as well.
        if problem.reason == EpochEnded.no_group and running.served < message.epoch <= running.machine.epoch:
            running.groupless.add(message.epoch)
            able = running.backend and running.spec.or_pipeline
            if able and len(running.groupless) >= _GROUPLESS_EPOCHS:
                running.groupless.clear()
                self._no_group(running.spec.name, message.ring, reason)

    def gateway_came(self) -> None:
        """Forms rings anew whose protocol a new gateway lacks, if members and gateways share another.

        Such rings formed while the gateway was away, for example after a restart of this coordinator.
        """
        for name, running in self._table.running.items():
            machine = running.machine
            if machine.undecided or not running.protocol:
                continue
            with contextlib.suppress(FailedPrecondition):
                if self._driver.protocol(running) < running.protocol:
                    why = f"a gateway came that does not speak protocol {running.protocol}"
                    now = self._driver.clock()
                    self._driver.apply(name, machine.fault(machine.members[0], machine.epoch, why, now))

    def beaten(self, session: NodeSession, heartbeat: membership_pb2.Heartbeat, *, first: bool) -> None:
        """Takes a heartbeat. The `first` of a session is compared with the epochs that should run."""
        for health in heartbeat.rings:
            running = self._table.find(session.member, health.ring)
            if running is None:
                continue
            if health.attended:
                running.machine.attended(health.epoch, self._driver.clock())
            running.beaten(session.member, health)
            alone = len(self._table.of(session.member)) == 1  # else the other ring changes the step times
            members = len(running.machine.members)
            running.step_times.beaten(session.member, health.step_us if alone else 0, members)
        self._warn_if_slow(session)
        if first:
            self._compare(session, heartbeat)

    def _warn_if_slow(self, session: NodeSession) -> None:
        """Notes on the session, and logs, that a member has become slow or is no longer."""
        member = session.member
        factor = max((running.step_times.slow(member) for _, running in self._table.of(member)), default=0.0)
        if bool(factor) != bool(session.slow):
            log.warning(
                "member_slow" if factor else "member_not_slow", member=member, factor=round(factor, 1)
            )
        session.slow = ""
        if factor:
            session.slow = (
                f"its steps take {factor:.1f} times as long as before, against those of the ring's others: "
                "look for heat, Low Power Mode, swapping or other programs (sealring doctor on it)"
            )

    def _compare(self, session: NodeSession, heartbeat: membership_pb2.Heartbeat) -> None:
        """Ends epochs that a node should run and does not, and those that it runs and should not."""
        reported = {health.ring: health.epoch for health in heartbeat.rings}
        for name, running in self._table.of(session.member):
            machine = running.machine
            if machine.phase is Phase.SERVING and reported.get(name) != machine.epoch:
                reason, now = f"{running.name_of(session.member)} was restarted", self._driver.clock()
                self._driver.apply(name, machine.fault(session.member, machine.epoch, reason, now))
        for name, epoch in reported.items():
            known = self._table.running.get(name)
            if known is None or epoch != known.machine.epoch or known.machine.phase is Phase.WAITING:
                end = membership_pb2.EndEpoch(
                    ring=name, epoch=epoch, reason="the epoch is over", unload=known is None
                )
                session.send(CoordinatorMessage(end=end))

    def _note_links(
        self, member: str, links: Sequence[membership_pb2.LinkInfo], running: RunningRing
    ) -> None:
        """Notes what a member measured of the way to its next one; of another's it knows nothing."""
        members = list(running.machine.members)
        for link in links:
            if max(link.from_rank, link.to_rank) < len(members) and members[link.from_rank] == member:
                self._links.note(
                    *(member, members[link.to_rank], link.address),
                    *(link.round_trip_us, link.bytes_per_second),
                )

    def _note_speed(self, member: str, message: membership_pb2.EpochPrepared) -> None:
        if len(self._table.of(member)) > 1:  # the other ring may have had steps at that moment
            return
        for deployment, ring in self._table.planned:
            for stage in ring.stages:
                whole = not deployment.plan.spec.backend  # a rank of a tensor ring times parts of layers
                if whole and ring.ring == message.ring and stage.member == member:
                    self._speeds.note(stage, deployment.plan.profile, message)
