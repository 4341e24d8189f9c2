"""Advances the epoch machines of rings, and sends what they decide to members and gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from sealring.coordinator.rings.epochs import Action, Commit, End, Phase, Prepare
from sealring.coordinator.rings.running import RingTable, RunningRing
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.streams.sessions import Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.clock import Clock, awake_clock
from sealring.mesh.errors import FailedPrecondition
from sealring.mesh.rpc.protocol import agree
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, WatchResponse

_LOOK_SECONDS = 1.0

log = structlog.get_logger()


class RingDriver:
    """Carries out the actions of epoch machines, and lets their time pass while `run` runs."""

    def __init__(
        self,
        table: RingTable,
        publisher: RosterPublisher,
        sessions: Sessions,
        watchers: Watchers,
        *,
        clock: Clock = awake_clock,
    ) -> None:
        """`clock` stands still while this machine sleeps: members are not late for that."""
        self.clock = clock
        self._table = table
        self._publisher = publisher
        self._sessions = sessions
        self._watchers = watchers
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Lets time pass: deadlines, back-offs and grace periods. Runs until cancelled.

        Looks often while something is due, because a clock that stands still in sleep has to be looked at.
        """
        while True:
            self._changed.clear()
            deadlines = [running.machine.deadline() for running in self._table.running.values()]
            due = min((deadline for deadline in deadlines if deadline is not None), default=None)
            wait = None if due is None else min(max(0.0, due - self.clock()), _LOOK_SECONDS)
            try:
                async with asyncio.timeout(wait):  # wait_for may swallow a cancellation (cpython 86296)
                    await self._changed.wait()
            except TimeoutError:
                for name, running in self._table.running.items():
                    self.apply(name, running.machine.tick(self.clock()))

    def changed(self) -> None:
        """Has `run` look at the deadlines again."""
        self._changed.set()

    def apply(self, name: str, actions: list[Action]) -> None:
        """Carries out the actions of a ring's machine, in order."""
        running = self._table.running[name]
        for action in actions:
            if isinstance(action, Prepare):
                if over := self._prepare(running, action):
                    self.apply(name, over)
                    return
            elif isinstance(action, Commit):
                commit = membership_pb2.CommitEpoch(
                    ring=name, epoch=action.epoch, group_addresses=action.addresses, caches=action.caches
                )
                self._send(running, CoordinatorMessage(commit=commit))
            elif isinstance(action, End):
                self.end(running, action, unload=False)
            else:
                self._report(name, running)
        self._changed.set()

    def end(self, running: RunningRing, action: End, *, unload: bool, staying: Collection[str] = ()) -> None:
        """Ends an epoch at every member. With `unload` members drop their stages, except those `staying`."""
        for stage in running.plan.stages:
            end = membership_pb2.EndEpoch(
                ring=running.plan.ring,
                epoch=action.epoch,
                reason=action.reason,
                unload=unload and stage.member not in staying,
            )
            self._sessions.send(stage.member, CoordinatorMessage(end=end))

    def protocol(self, running: RunningRing) -> int:
        """The protocol that all members and, if possible, all gateways speak. Raises FailedPrecondition."""
        releases = {
            f"node {stage.member_name}": session.release
            for stage in running.plan.stages
            if (session := self._sessions.find(stage.member)) is not None
        }
        try:
            return agree(releases | self._watchers.releases)
        except FailedPrecondition:
            return agree(releases)

    def _prepare(self, running: RunningRing, action: Prepare) -> list[Action]:
        """Sends phase one to every member, or returns the end of an epoch whose members share no protocol."""
        try:
            running.protocol = self.protocol(running)
        except FailedPrecondition as error:
            member = running.machine.members[0]
            return running.machine.fault(member, action.epoch, str(error), self.clock())
        roster = self._publisher.current
        for stage in running.plan.stages:
            prepare = running.prepare(stage, action.epoch, roster.version, roster.hash, running.protocol)
            self._sessions.send(stage.member, CoordinatorMessage(prepare=prepare))
        return []

    def _report(self, name: str, running: RunningRing) -> None:
        machine = running.machine
        log.info(
            "ring_changed", ring=name, epoch=machine.epoch, phase=machine.phase.value, why=machine.reason
        )
        if machine.phase is Phase.SERVING:
            self._table.not_moved.pop(name, None)
            running.served = machine.epoch
            running.groupless.clear()
        self._watchers.tell(WatchResponse(ring=running.state()))

    def _send(self, running: RunningRing, message: CoordinatorMessage) -> None:
        for stage in running.plan.stages:
            self._sessions.send(stage.member, message)
