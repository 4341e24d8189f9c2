"""Keeps the rings in service in step with the roster and with the nodes that are online."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sealring.coordinator.rings.driver import RingDriver
from sealring.coordinator.rings.epochs import End, RingEpochs, Timeouts
from sealring.coordinator.rings.running import RingTable, RunningRing, draft_plan, reported_links
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.coordinator.streams.sessions import Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import RingGone, WatchResponse


class Rings:
    """Starts and ends rings. A listener of the sessions."""

    def __init__(
        self,
        table: RingTable,
        driver: RingDriver,
        store: Store,
        publisher: RosterPublisher,
        sessions: Sessions,
        watchers: Watchers,
        settings: CoordinatorSettings,
    ) -> None:
        self._table = table
        self._driver = driver
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._watchers = watchers
        self._timeouts = Timeouts(
            settings.prepare_timeout, settings.commit_timeout, settings.heartbeat_timeout
        )
        self._still_serving: set[str] = set()
        self._returning = True

    def sync(self) -> None:
        """Starts, replaces and ends rings, so that those of the newest roster are in service."""
        table = self._table
        table.planned = [(one, ring) for one in self._store.deployments.all() for ring in one.plan.rings]
        planned = {ring.ring for _, ring in table.planned}
        wanted = {ring.ring: (ring, plan) for ring, plan in self._wanted()}
        table.not_moved = {name: why for name, why in table.not_moved.items() if name in planned}
        for name in list(table.running):
            if name not in wanted:
                self._end(name, gone=name not in planned)
            elif wanted[name][0] != table.running[name].plan:
                staying = {stage.member for stage in wanted[name][0].stages}
                self._end(name, gone=False, staying=staying)
        for name, (ring, plan) in wanted.items():
            if name not in table.running:
                self._start(ring, plan)
        self._returning = False
        self._driver.changed()

    def keep_serving(self, member: str, keep: bool) -> None:
        """Keeps the rings of a draining member in service, or no longer."""
        (self._still_serving.add if keep else self._still_serving.discard)(member)

    def not_moved(self, ring: str, why: str) -> None:
        """Notes why no nodes could take over a ring that lost a member; shown while it is out of service."""
        self._table.not_moved[ring] = why

    def online(self, member: str) -> None:
        """A node's stream is there, or the node has proved which software it runs."""
        if not self._is_here(member):
            return
        for name, running in self._table.of(member):
            reported = self._reported(member, name)
            serving = self._serving_epoch(member, reported.prepared, running)
            links = reported_links(reported.links, running)
            if serving and running.machine.undecided:
                running.protocol = reported.prepared.protocol
            now = self._driver.clock()
            self._driver.apply(name, running.machine.online(member, now, serving=serving, links=links))

    def lost(self, member: str) -> None:
        """A node's stream broke."""
        for name, running in self._table.of(member):
            self._driver.apply(name, running.machine.lost(member, self._driver.clock()))

    def offline(self, member: str) -> None:
        """A node is gone."""
        for name, running in self._table.of(member):
            self._driver.apply(name, running.machine.offline(member, self._driver.clock()))

    def _wanted(self) -> Iterator[tuple[admin_pb2.RingPlan, admin_pb2.DeploymentPlan]]:
        parked = self._store.members.draining() - self._still_serving
        for deployment, ring in self._table.planned:
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
        self._table.not_moved.pop(ring.ring, None)
        running = self._table.running[ring.ring] = RunningRing(
            *(ring, plan.spec, plan.profile.digest, plan.profile.model_type, machine, self._table.patience),
            commit=plan.profile.commit,
            hub_files=plan.profile.hub_files,
            draft=draft_plan(plan),
        )
        self._watchers.tell(WatchResponse(ring=running.state()))
        for stage in ring.stages:
            if self._is_here(stage.member):
                self._driver.apply(ring.ring, machine.online(stage.member, self._driver.clock()))

    def _end(self, name: str, *, gone: bool, staying: Collection[str] = ()) -> None:
        running = self._table.running[name]
        kept = gone and any(one.name == running.spec.name for one in self._store.deployments.all())
        reason = "its members are changing"
        if gone:
            reason = "the model was unloaded" if kept else "the deployment was deleted"
        for action in running.machine.close(reason):
            if isinstance(action, End):
                self._driver.end(running, action, unload=True, staying=staying)
        del self._table.running[name]
        if gone:
            self._watchers.tell(WatchResponse(gone=RingGone(ring=name)))
        else:
            self._watchers.tell(WatchResponse(ring=running.down(reason)))

    def _is_here(self, member: str) -> bool:
        """Whether a member is online and has proved which software it runs."""
        known = self._store.members.find(member) if self._sessions.find(member) is not None else None
        return known is not None and self._publisher.standing.attested(known)

    def _reported(self, member: str, ring: str) -> membership_pb2.ServingEpoch:
        """The epoch of a ring that a node reported when it connected; an empty one if it reported none."""
        session = self._sessions.find(member)
        reported = session.serving.get(ring) if session is not None else None
        return reported or membership_pb2.ServingEpoch()

    def _serving_epoch(self, member: str, reported: membership_pb2.PrepareEpoch, running: RunningRing) -> int:
        """The number of the epoch that a node reported when it connected, if it may go on; else 0.

        It may if this coordinator gave out its number and signed its roster, and would prepare it alike now.
        The node itself checks against each new roster that its ring has the same members and layers.
        """
        last = self._store.deployments.last_epoch(reported.ring)
        if reported.ring != running.plan.ring or reported.epoch > last:
            return 0
        signed = self._store.rosters.find(reported.roster_version)  # None: so old that it was dropped
        if reported.roster_version > self._publisher.current.version or (
            signed and signed.hash != reported.roster_hash
        ):
            return 0
        stage = running.stage_of(member)
        protocol = reported.protocol if running.machine.undecided else running.protocol
        as_now = running.prepare(
            stage, reported.epoch, reported.roster_version, reported.roster_hash, protocol
        )
        return reported.epoch if reported == as_now else 0
