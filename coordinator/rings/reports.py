"""Takes the reports of members on their rings: how epochs go, and how long steps take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import structlog

from sealring.coordinator.nodes.links import Links
from sealring.coordinator.planning.speeds import Speeds
from sealring.coordinator.rings import epochs
from sealring.coordinator.rings.cluster import Cluster
from sealring.coordinator.rings.driver import ClusterDriver
from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.running import RunningRing, is_address, reported_links
from sealring.coordinator.streams.sessions import NodeSession
from sealring.mesh.errors import EpochEnded
from sealring.mesh.rpc.problem import from_problem, one_line
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, EpochPrepared, EpochProgress, EpochUp

Report: TypeAlias = EpochProgress | EpochPrepared | EpochUp | membership_pb2.EpochFault

_MAX_REASON = 200
_MAX_WHAT = 64
_CACHES_BYTES = 32
_GROUPLESS_EPOCHS = 2
"""Epochs in a row without a group, after which a ring that may becomes a pipeline."""

_ORDERLY = "GATEWAY_LEFT"
_OF_OTHERS = """
    BROKEN_OFF EPOCH_TIMEOUT GATEWAY_ENDED GATEWAY_GONE GATEWAY_LEFT HANDSHAKE_BROKEN_OFF
    HANDSHAKE_TIMEOUT LINK_POISONED NO_CONFIRMATION NO_SUCH_EPOCH PEER_FROZEN PEER_LOST PEER_SILENT
    PEER_UNREACHABLE RECORD_LOST RECORD_OVERDUE REKEY_TIMEOUT RING_FAILED
"""
"""Reasons for the end of an epoch whose fault lies with a neighbour of the member that reports it, with the
gateway, or between."""

_SLOW = (
    "its steps take {:.1f} times as long as before, against those of the ring's others: look for heat, Low "
    "Power Mode, swapping or other programs (sealring doctor on it)"
)
log = structlog.get_logger()


class RingReports:
    """Passes reports to the ring's machine. Those of nodes that are no members of the ring are dropped."""

    def __init__(self, cluster: Cluster, driver: ClusterDriver, speeds: Speeds, links: Links) -> None:
        """`speeds` takes the step times that members measure when they load a stage, and `links` what they
        measure of the ways to their neighbours."""
        self._cluster = cluster
        self._state = cluster.state
        self._driver = driver
        self._speeds = speeds
        self._links = links

    def take(self, member: str, report: Report) -> None:
        """Takes a member's report on the epoch of one of its rings."""
        running = self._state.find(member, report.ring)
        if running is None:
            return
        now = self._driver.clock()
        if isinstance(report, EpochProgress):
            what = one_line(report.what, _MAX_WHAT)
            decided = running.machine.advanced(member, report.epoch, what, report.fraction, now)
        elif isinstance(report, EpochPrepared):
            decided = self._prepared(member, report, running, now)
        elif isinstance(report, EpochUp):
            links = reported_links(report.links, running)
            self._note_links(member, links, running)
            decided = running.machine.up(member, report.epoch, now, links)
        else:
            self._faulted(member, report, running, now)
            return
        self._driver.event(self._cluster.follow(report.ring, decided, now))

    def _prepared(
        self, member: str, report: EpochPrepared, running: RunningRing, now: float
    ) -> list[epochs.Action]:
        if running.backend and not is_address(report.group_address):  # it is sent to every member
            reason = f"{running.name_of(member)}: it names no address for its group"
            return running.machine.fault(member, report.epoch, reason, now)
        if len(self._state.of(member)) == 1 and not running.spec.backend:
            # Else another ring may have had steps at that moment, or a rank has timed parts of layers.
            self._speeds.note(running.stage_of(member), running.deployment.profile, report)
        links = reported_links(report.links, running)
        address = report.group_address if running.backend else ""
        caches = report.caches[:_CACHES_BYTES]  # they are sent to every member
        return running.machine.prepared(member, report.epoch, links, now, address, caches)

    def _faulted(
        self, member: str, report: membership_pb2.EpochFault, running: RunningRing, now: float
    ) -> None:
        problem, machine = from_problem(report.problem), running.machine
        write = log.info if problem.reason == _ORDERLY else log.warning
        write("epoch_fault", ring=report.ring, epoch=report.epoch, member=member, why=problem.reason)
        reason = f"{running.name_of(member)}: {problem.message or problem.reason}"[:_MAX_REASON]
        decided = machine.fault(
            member, report.epoch, reason, now, root=problem.reason not in _OF_OTHERS.split()
        )
        self._driver.event(self._cluster.follow(report.ring, decided, now))
        # A neighbour that lost its peer may end the epoch before the rank without a group reports, and the
        # next epoch may have begun: epochs since the last that served count as well.
        if problem.reason == EpochEnded.no_group and running.served < report.epoch <= machine.epoch:
            running.groupless.add(report.epoch)
            able = running.backend and running.spec.or_pipeline
            if able and len(running.groupless) >= _GROUPLESS_EPOCHS:
                running.groupless.clear()
                self._driver.event(self._cluster.moves.fall_back(report.ring, reason, now))

    def beaten(
        self, session: NodeSession, heartbeat: membership_pb2.Heartbeat, *, first: bool, turned: bool
    ) -> None:
        """Takes a heartbeat; has it `turned`, other rings are idle than before. The `first` of a session is
        compared with the epochs that should run."""
        for health in heartbeat.rings:
            running = self._state.find(session.member, health.ring)
            if running is None:
                continue
            if health.attended:
                running.machine.attended(health.epoch, self._driver.clock())
            running.beaten(session.member, health)
            alone = len(self._state.of(session.member)) == 1  # else the other ring changes the step times
            members = len(running.machine.members)
            running.step_times.beaten(session.member, health.step_us if alone else 0, members)
        self._warn_if_slow(session)
        if first:
            self._compare(session, heartbeat)
            self._cluster.moves.look_anew()  # there may be room
        if first or turned:
            self._driver.changed()

    def _warn_if_slow(self, session: NodeSession) -> None:
        """Notes on the session, and logs, that a member has become slow or is no longer."""
        member = session.member
        factor = max((running.step_times.slow(member) for _, running in self._state.of(member)), default=0.0)
        if bool(factor) != bool(session.slow):
            log.warning(
                "member_slow" if factor else "member_not_slow", member=member, factor=round(factor, 1)
            )
        session.slow = _SLOW.format(factor) if factor else ""

    def _compare(self, session: NodeSession, heartbeat: membership_pb2.Heartbeat) -> None:
        """Ends epochs that a node should run and does not, and those that it runs and should not."""
        reported = {health.ring: health.epoch for health in heartbeat.rings}
        for name, running in self._state.of(session.member):
            machine = running.machine
            if machine.phase is Phase.SERVING and reported.get(name) != machine.epoch:
                reason, now = f"{running.name_of(session.member)} was restarted", self._driver.clock()
                self._driver.event(
                    self._cluster.follow(name, machine.fault(session.member, machine.epoch, reason, now), now)
                )
        for name, epoch in reported.items():
            known = self._state.running.get(name)
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
