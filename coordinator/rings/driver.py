"""Drives the cluster's machine: its events, its time, and what it has done to nodes, gateways and plans."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable

import structlog

from sealring.coordinator.rings.actions import (
    Action,
    Change,
    Drained,
    Formed,
    Note,
    Send,
    Tell,
    Unload,
)
from sealring.coordinator.rings.cluster import LOOK_SECONDS, Cluster
from sealring.coordinator.rings.plans import Plans
from sealring.coordinator.rings.reports import Report
from sealring.coordinator.rings.state import Known, Wanted
from sealring.coordinator.rings.views import load_status
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store, StoredRoster
from sealring.coordinator.streams.sessions import NodeSession
from sealring.mesh.clock import Clock, awake_clock
from sealring.mesh.errors import Internal, SealringError
from sealring.mesh.pki.certificates import Role
from sealring.v1 import admin_pb2, membership_pb2

_LONG_AGO = 1
log = structlog.get_logger()


class ClusterDriver:
    """A listener of the sessions. Looks at what is due while `run` runs."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        publisher: RosterPublisher,
        plans: Plans,
        *,
        wall: Clock,
        clock: Clock = awake_clock,
    ) -> None:
        """`wall` is the wall clock; `clock` stands still while this machine sleeps: nobody is late then."""
        self.clock = clock
        self._wall = wall
        self._cluster = cluster
        self._store = store
        self._publisher = publisher
        self._plans = plans
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # Events

    def stored(self, roster: StoredRoster) -> None:
        """A roster was signed of what is stored now."""
        self.event(self._cluster.stored(self._wanted(roster), self.clock(), self._wall()))

    def online(self, member: str) -> None:
        """A node's stream is there."""
        self.event(self._cluster.came(member, self._reported(member), self.clock()))

    def left(self, member: str, *, gone: bool) -> None:
        """A node's stream broke, or the node is gone."""
        self.event(self._cluster.left(member, self.clock(), gone=gone))

    def reported(self, member: str, report: Report) -> None:
        """A member reports on the epoch of one of its rings."""
        self.event(self._cluster.reports.take(member, report, self.clock()))

    def beaten(self, session: NodeSession, heartbeat: membership_pb2.Heartbeat) -> None:
        """A heartbeat came. It is looked at after a session's first one, and where other rings are idle than
        before."""
        first = session.heartbeat is None
        turned = session.beat(heartbeat)
        self.do(self._cluster.reports.beaten(session, heartbeat, self.clock(), first=first))
        if first or turned:
            self.changed()

    def proved(self, member: str) -> None:
        """A node has proved which software it runs, for which its rings have waited."""
        self._cluster.state.wanted = self._wanted(self._publisher.current)
        self.online(member)

    def gateway_came(self) -> None:
        """A gateway begins to watch."""
        self.event(self._cluster.gateway_came(self.clock()))

    def changed(self) -> None:
        """What nodes or gateways report has changed: `run` looks at it."""
        self._changed.set()

    def event(self, actions: Iterable[Action]) -> None:
        """Does what the machine has decided at an event, and has `run` look at the rest."""
        self.do(actions)
        self.changed()

    # Time

    async def run(self) -> None:
        """Looks after every event, and often while something is due, because a clock that stands still in
        sleep has to be looked at. Runs until cancelled."""
        while True:
            self._changed.clear()
            self.look()
            now = self.clock()
            due = self._cluster.deadline(now)
            wait = min(max(0.0, due - now), LOOK_SECONDS) if math.isfinite(due) else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):  # wait_for may swallow a cancellation (cpython 86296)
                    await self._changed.wait()

    def look(self) -> None:
        """Does what is due."""
        self.do(self._cluster.look(self.clock(), self._wall()))

    async def close(self) -> None:
        """Cancels changes of plans that are under way. The next run resumes drains."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def load_status(self, name: str) -> admin_pb2.LoadStatus | None:
        """The state of a model for operators; None for a deployment that is not on demand."""
        return load_status(self._cluster.on_demand, name, self.clock(), self._wall())

    # Actions

    def do(self, actions: Iterable[Action]) -> None:
        """Does what the machine has decided, in order."""
        for action in actions:
            if isinstance(action, Send):
                self._cluster.state.sessions.send(action.member, action.message)
            elif isinstance(action, Tell):
                self._cluster.state.watchers.tell(action.event)
            elif isinstance(action, Note):
                (log.warning if action.serious else log.info)(action.event, **action.fields)
            elif isinstance(action, Drained | Formed | Unload):
                self._store_one(action)
            else:
                task = asyncio.get_running_loop().create_task(self._make(action))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _make(self, change: Change) -> None:
        error: SealringError | None = None
        try:
            await self._plans.make(change)
        except SealringError as caught:
            error = caught
        except Exception:  # a defect, which must not keep the other rings and models from their changes
            log.exception("change_failed", deployment=change.deployment)
            error = Internal("an internal error", hint="see the coordinator's log")
        self.event(self._cluster.ended(change, error, self.clock()))

    def _store_one(self, action: Drained | Formed | Unload) -> None:
        try:
            if isinstance(action, Unload):
                self._plans.unload(action)
                log.info("model_unloaded", deployment=action.deployment, why=action.why)
            elif isinstance(action, Formed):
                self._store.deployments.save_former(self._cluster.state.former)
            elif (known := self._store.members.find(action.member)) is not None and known.draining:
                known.draining = _LONG_AGO
                self._store.members.save(known)
        except SealringError as error:  # this run or the next tries it again
            log.warning("not_stored", what=action, reason=error.reason, why=error.message)

    # What is stored

    def _wanted(self, roster: StoredRoster) -> Wanted:
        made, standing = self._publisher.roster, self._publisher.standing
        trust = {one.id: one.trust for one in made.members} if made else {}
        return Wanted(
            roster,
            {ring.id for ring in made.rings} if made else (),
            {
                one.id: Known(
                    *(one.name, trust[one.id], standing.refusal(one), one.draining, standing.attested(one))
                )
                for one in self._store.members.all(Role.MEMBER)
                if one.id in trust
            },
            self._store.deployments.all(),
        )

    def _reported(self, member: str) -> dict[str, membership_pb2.ServingEpoch]:
        """The epochs that a node had up when it came whose numbers were given out, and whose rosters were
        signed, by this coordinator."""
        session = self._cluster.state.sessions.find(member)
        return {
            ring: one
            for ring, one in (session.serving.items() if session else ())
            if one.prepared.epoch <= self._store.deployments.last_epoch(ring) and self._signed(one.prepared)
        }

    def _signed(self, prepared: membership_pb2.PrepareEpoch) -> bool:
        signed = self._store.rosters.find(prepared.roster_version)  # None: so old that it was dropped
        newer = prepared.roster_version > self._publisher.current.version
        return not newer and (signed is None or signed.hash == prepared.roster_hash)
