"""Reports of members on their rings: how epochs go, and how long steps take. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from sealring.coordinator.nodes.links import Links
from sealring.coordinator.planning.speeds import Speeds
from sealring.coordinator.rings import epochs
from sealring.coordinator.rings.actions import Action, Note, Send
from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.following import follow
from sealring.coordinator.rings.moves import Moves
from sealring.coordinator.rings.running import RunningRing, is_address, reported_links
from sealring.coordinator.rings.state import State
from sealring.coordinator.streams.sessions import NodeSession
from sealring.mesh.errors import EpochEnded
from sealring.mesh.rpc.problem import from_problem, one_line
from sealring.mesh.system.pace import Reached
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, EpochFault, EpochPrepared, EpochProgress, EpochUp

Report: TypeAlias = EpochProgress | EpochPrepared | EpochUp | EpochFault

_MAX_REASON = 200
_MAX_WHAT = 64
_MAX_BYTES = 1 << 50
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


class Reports:
    """Takes reports. Those of nodes that are no members of the ring are dropped."""

    def __init__(self, state: State, moves: Moves, speeds: Speeds, links: Links) -> None:
        """`speeds` takes the step times that members measure when they load a stage, and `links` what they
        measure of the ways to their neighbours."""
        self._speeds = speeds
        self._links = links
        self._state = state
        self._moves = moves

    def take(self, member: str, report: Report, now: float) -> Iterator[Action]:
        """A member's report on the epoch of one of its rings."""
        running = self._state.find(member, report.ring)
        if running is None:
            return
        if isinstance(report, EpochFault):
            yield from self._faulted(member, report, running, now)
            return
        machine = running.machine
        if isinstance(report, EpochProgress):
            what = one_line(report.what, _MAX_WHAT)
            done, total = report.done, report.total
            if not total and report.fraction > 0:  # a node of an earlier release has no bytes
                total = running.stage_of(member).weight_bytes
                done = int(min(1.0, report.fraction) * total)
            figures = (min(one, _MAX_BYTES) for one in (done, total, report.rate, report.seconds_left))
            decided = machine.advanced(member, report.epoch, Reached(what, *figures), now)
        elif isinstance(report, EpochPrepared):
            # Else another ring may have had steps at that moment, or a rank has timed parts of layers.
            if len(self._state.of(member)) == 1 and not running.spec.backend:
                self._speeds.note(running.stage_of(member), running.deployment.profile, report)
            decided = _prepared(member, report, running, now)
        else:
            links = reported_links(report.links, running)
            self._note_links(member, links, running)
            decided = machine.up(member, report.epoch, now, links)
        yield from follow(self._state, running, decided, now)

    def _faulted(self, member: str, report: EpochFault, running: RunningRing, now: float) -> Iterator[Action]:
        problem, machine = from_problem(report.problem), running.machine
        fields = {"ring": report.ring, "epoch": report.epoch, "member": member, "why": problem.reason}
        yield Note("epoch_fault", fields, serious=problem.reason != _ORDERLY)
        reason = f"{running.name_of(member)}: {problem.message or problem.reason}"[:_MAX_REASON]
        root = problem.reason not in _OF_OTHERS.split()
        decided = machine.fault(member, report.epoch, reason, now, root=root)
        yield from follow(self._state, running, decided, now)
        # A neighbour that lost its peer may end the epoch before the rank without a group reports, and the
        # next epoch may have begun: epochs since the last that served count as well.
        if problem.reason == EpochEnded.no_group and running.served < report.epoch <= machine.epoch:
            running.groupless.add(report.epoch)
            able = running.backend and running.spec.or_pipeline
            if able and len(running.groupless) >= _GROUPLESS_EPOCHS:
                running.groupless.clear()
                yield from self._moves.fall_back(report.ring, reason, now)

    def beaten(
        self, session: NodeSession, heartbeat: membership_pb2.Heartbeat, now: float, *, first: bool
    ) -> Iterator[Action]:
        """A heartbeat. The `first` of a session is compared with the epochs that should run."""
        rings = self._state.of(session.member)
        for health in heartbeat.rings:
            running = self._state.find(session.member, health.ring)
            if running is not None:  # step times count where no other ring on the node changes them
                running.beaten(session.member, health, now, timed=len(rings) == 1)
        factor = max((running.step_times.slow(session.member) for running in rings), default=0.0)
        if bool(factor) != bool(session.slow):
            what = "member_slow" if factor else "member_not_slow"
            yield Note(what, {"member": session.member, "factor": round(factor, 1)}, serious=True)
        session.slow = _SLOW.format(factor) if factor else ""
        if first:
            yield from self._compare(session.member, heartbeat, now)
            self._moves.look_anew()  # there may be room

    def _compare(self, member: str, heartbeat: membership_pb2.Heartbeat, now: float) -> Iterator[Action]:
        """Ends epochs that a node should run and does not, and those that it runs and should not."""
        reported = {health.ring: health.epoch for health in heartbeat.rings}
        for running in self._state.of(member):
            machine = running.machine
            if machine.phase is Phase.SERVING and reported.get(running.plan.ring) != machine.epoch:
                reason = f"{running.name_of(member)} was restarted"
                decided = machine.fault(member, machine.epoch, reason, now)
                yield from follow(self._state, running, decided, now)
        for name, epoch in reported.items():
            known = self._state.running.get(name)
            if known is None or epoch != known.machine.epoch or known.machine.phase is Phase.WAITING:
                end = membership_pb2.EndEpoch(
                    ring=name, epoch=epoch, reason="the epoch is over", unload=known is None
                )
                yield Send(member, CoordinatorMessage(end=end))

    def _note_links(self, member: str, links: list[membership_pb2.LinkInfo], running: RunningRing) -> None:
        """Notes what a member measured of the way to its next one; of another's it knows nothing."""
        members = list(running.machine.members)
        for link in links:
            if max(link.from_rank, link.to_rank) < len(members) and members[link.from_rank] == member:
                way = link.address, link.round_trip_us, link.bytes_per_second
                self._links.note(member, members[link.to_rank], *way)


def _prepared(member: str, report: EpochPrepared, running: RunningRing, now: float) -> list[epochs.Action]:
    address = report.group_address if running.backend else ""
    if running.backend and not is_address(address):  # it is sent to every member
        reason = f"{running.name_of(member)}: it names no address for its group"
        return running.machine.fault(member, report.epoch, reason, now)
    links = reported_links(report.links, running)
    caches = report.caches[:_CACHES_BYTES]  # they are sent to every member
    return running.machine.prepared(member, report.epoch, links, now, address, caches)
