"""The cluster as it is wanted, by the store and the newest roster, and as streams and epochs show it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sealring.coordinator.rings.running import RunningRing
from sealring.coordinator.store import StoredDeployment, StoredRoster
from sealring.coordinator.streams.sessions import Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.errors import FailedPrecondition
from sealring.mesh.rpc.protocol import PROTOCOL_VERSION, agree, speaks
from sealring.mesh.trust.levels import level_of
from sealring.v1 import admin_pb2
from sealring.v1.membership_pb2 import FormerRing, ModelState

_MAX_GRACE_SECONDS = 300
_RELOAD_SECONDS = 30


@dataclass(frozen=True)
class Known:
    """An enrolled node. `trust` is its score in the newest roster, `refusal` the reason for distrusting it,
    `draining` as in StoredMember, and `attested` whether its process may serve."""

    name: str
    trust: int
    refusal: str = ""
    draining: int = 0
    attested: bool = True

    def obstacle(self, floor: int) -> str:
        """The reason for which it is in no ring with this trust floor, or ""."""
        if self.draining:
            return "is draining"
        if self.refusal:
            return f"is not trusted: {self.refusal}"
        if self.trust < floor:
            return f"has trust level {level_of(self.trust)}, below the floor {level_of(floor)}"
        return ""


@dataclass(frozen=True)
class Wanted:
    """What is stored, and the newest roster: its `rings`, and the `members` by their ids."""

    roster: StoredRoster = field(default_factory=StoredRoster)
    rings: Collection[str] = ()
    members: Mapping[str, Known] = field(default_factory=dict)
    deployments: Sequence[StoredDeployment] = ()

    @cached_property
    def planned(self) -> Sequence[tuple[StoredDeployment, admin_pb2.RingPlan]]:
        """The rings of all deployments, in service or not."""
        return [(one, ring) for one in self.deployments for ring in one.plan.rings]

    def rings_of(self, name: str) -> list[str]:
        """The rings that a deployment has."""
        return [ring.ring for one, ring in self.planned if one.name == name]


class State:
    """What the machine decides by. Only `Cluster` changes it; reading it changes nothing.

    `running` are the planned rings that are in service, by name. `not_moved` says, by ring, why no other
    nodes could take it over. `shown` are the models as gateways know them.
    """

    def __init__(self, sessions: Sessions, watchers: Watchers, replace_after: float) -> None:
        self.sessions = sessions
        self.watchers = watchers
        self.wanted = Wanted()
        self.running: dict[str, RunningRing] = {}
        self.not_moved: dict[str, str] = {}
        self.shown: dict[str, ModelState] = {}
        self.former: dict[str, list[FormerRing]] = {}
        self.patience = int(min(replace_after, _MAX_GRACE_SECONDS)) + _RELOAD_SECONDS
        """Seconds for which a ring that is down takes new requests: until its silent member is replaced (five
        minutes at most), and until the new member has loaded."""

    def of(self, member: str) -> list[RunningRing]:
        """The rings in service that a node is a member of."""
        return [running for running in self.running.values() if member in running.machine.members]

    def find(self, member: str, ring: str) -> RunningRing | None:
        """The ring of that name, if it is in service and the node is a member: others cannot report on it."""
        running = self.running.get(ring)
        return running if running is not None and member in running.machine.members else None

    def is_here(self, member: str) -> bool:
        """Whether a member is online and has proved which software it runs."""
        known = self.wanted.members.get(member)
        return known is not None and known.attested and self.sessions.find(member) is not None

    def awaited(self, ring: str) -> list[str]:
        """The members that a ring in service waits for (see `RingEpochs.awaited`)."""
        running = self.running.get(ring)
        return running.machine.awaited if running else []

    def obstacles(self, deployment: StoredDeployment, ring: admin_pb2.RingPlan) -> dict[str, str]:
        """The members that keep a planned ring out of service, each with the reason."""
        if ring.ring in self.running:
            return {}
        floor, known = deployment.plan.spec.trust_floor, self.wanted.members
        found = {
            stage.member: known[stage.member].obstacle(floor) if stage.member in known else "was evicted"
            for stage in ring.stages
        }
        return {member: obstacle for member, obstacle in found.items() if obstacle}

    def is_idle(self, member: str, ring: str) -> bool:
        """Whether a member says that no step of a ring was executed lately."""
        session = self.sessions.find(member)
        return session is not None and ring in session.idle

    def behind(self) -> str:
        """An enrolled machine that spoke an older protocol than this when it was here last, as far as this
        process saw; "" where there is none."""
        nodes = {f"node {member[:8]}": one for member, one in self.sessions.releases.items()}
        known = nodes | self.watchers.latest
        return next((name for name, one in known.items() if not speaks(PROTOCOL_VERSION, one)), "")

    def protocol(self, running: RunningRing) -> int:
        """The protocol that all members and, if possible, all gateways speak; this release's, of members
        alone, for what the previous one does not know of. Raises FailedPrecondition."""
        releases = {
            f"node {stage.member_name}": session.release
            for stage in running.plan.stages
            if (session := self.sessions.find(stage.member)) is not None
        }
        two_cuts = any(stage.prompt_end_layer for stage in running.plan.stages)
        if two_cuts or running.deployment.profile.draft.taps:
            if old := next((name for name, one in releases.items() if not speaks(PROTOCOL_VERSION, one)), ""):
                raise FailedPrecondition(
                    f"two cuts, and drafters that read hidden states, need this release on {old} too",
                    hint=f"update {old}",
                    reason="INCOMPATIBLE_VERSION",
                )
            return PROTOCOL_VERSION
        try:
            return agree(releases | self.watchers.releases)
        except FailedPrecondition:
            return agree(releases)
