"""Publishes rosters: signs the contents of the store, and stores each roster before it is sent.

Versions rise by one and are never reused: a roster is on disk, durably, before it is published. The next one
follows it even after a crash.
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import structlog

from sealring.coordinator.auth.standing import Standing
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredMember, StoredRoster
from sealring.mesh.clock import SKEW_SECONDS, Clock, monotonic_clock
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.crypto.suites import DEFAULT_SUITES
from sealring.mesh.errors import FailedPrecondition, InvalidInput, SealringError
from sealring.mesh.pki.certificates import Role
from sealring.mesh.roster.codec import (
    complete_roster,
    encode_roster,
    fits,
    roster_hash,
    sign_roster,
)
from sealring.mesh.roster.model import (
    NO_PREVIOUS,
    PIPELINE,
    Gateway,
    Revoked,
    Ring,
    RingMember,
    Roster,
    RosterMember,
)
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.trust.levels import SCORES, TrustLevel
from sealring.v1 import admin_pb2

_MAX_REVOKED = 100
_LOOK_SECONDS = 5.0
_RETRY_SECONDS = 0.5
log = structlog.get_logger()


class RosterPublisher:
    """Signs rosters. `listeners` are called with every new one after it is stored."""

    def __init__(
        self, store: Store, keys: ClusterKeys, settings: CoordinatorSettings, *, clock: Clock
    ) -> None:
        self.standing = Standing(settings, clock=clock)
        self.listeners: list[Callable[[StoredRoster], None]] = []
        self._store = store
        self._keys = keys
        self._settings = settings
        self._standby = settings.standby or ""
        self._clock = clock
        self._current: StoredRoster | None = None
        self._roster: Roster | None = None
        self._signed_at = monotonic_clock()
        self.addresses = settings.addresses()
        """The addresses at which members find the coordinator, from the next roster on."""

    @property
    def current(self) -> StoredRoster:
        """The newest signed roster. Raises FailedPrecondition (NO_ROSTER) before the first `publish`."""
        if self._current is None:
            raise FailedPrecondition("no roster was signed yet", reason="NO_ROSTER")
        return self._current

    @property
    def roster(self) -> Roster | None:
        """The content of the newest roster. It omits rings with a member that is gone or below the floor, and
        those for which it has no room."""
        return self._roster

    def listed(self, identifier: str) -> RosterMember | None:
        """A member as the newest roster states it."""
        members = self._roster.members if self._roster is not None else ()
        return next((member for member in members if member.id == identifier), None)

    def addresses_of(self, identifier: str) -> tuple[str, ...]:
        """The addresses of a member of the newest roster; none of another's."""
        found = self.listed(identifier)
        return found.addresses if found is not None else ()

    @contextmanager
    def change(self, *, grows: bool = False, stored: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Change the store and sign the roster that follows from it: both are stored, or neither.

        A change that `grows` the roster is refused where it would be larger than readers take. Any other is
        not, least of all an eviction, which lowers that limit: instead the newest deployments' rings are left
        out.

        When it is done `stored` is called, for what must neither happen without the change nor come after
        the new roster. Then the listeners are called; their errors are logged, not raised. Raises
        RosterError if no valid roster follows, Unavailable (STATE_UNWRITABLE).
        """
        with self._store.transaction():
            yield
            draft, signed = self._sign(grows)
        # After the commit: a roster that is not stored must not be sent.
        self._current, self._roster, self._signed_at = signed, draft, monotonic_clock()
        stored()
        log.info(
            "roster_published",
            version=signed.version,
            members=len(draft.members),
            rings=len(draft.rings),
            min_trust=draft.min_trust,
        )
        for listener in self.listeners:
            try:
                listener(signed)
            except Exception:  # the change is stored: the caller must not get an error
                log.exception("roster_listener_failed", version=signed.version)

    def publish(self) -> None:
        """Sign the next version of the roster as it stands."""
        with self.change():
            pass

    def stands_by(self, address: str) -> None:
        """A standby follows, to be the coordinator at this address (host:port). Raises InvalidInput
        (BAD_ADDRESS)."""
        if not parse_address(address)[1]:
            raise InvalidInput("the standby's address has no port", reason="BAD_ADDRESS")
        if address != self._standby:
            self._standby = address
            self.publish()

    async def renew_forever(self) -> None:
        """Publish the next version at half of the newest one's life; what fails is tried again."""
        half = self._settings.roster_lifetime / 2
        while True:
            elapsed = monotonic_clock() - self._signed_at
            if self._roster is not None:  # whichever clock is ahead: one stops in sleep, one may be set back
                elapsed = max(elapsed, aged := self._clock() - self._roster.issued)
                if aged < -SKEW_SECONDS:  # by a clock that was ahead: machines with the right time refuse it
                    elapsed = half
            if elapsed >= half:
                try:
                    self.publish()
                    continue
                except SealringError as error:
                    log.error("roster_not_renewed", reason=error.reason, why=error.message)
            await asyncio.sleep(min(max(half - elapsed, _RETRY_SECONDS), _LOOK_SECONDS))

    def _sign(self, grows: bool) -> tuple[Roster, StoredRoster]:
        whole = self._draft(self._store.rosters.latest())

        def oldest(count: int) -> Roster:
            return complete_roster(replace(whole, rings=whole.rings[:count]))

        draft = oldest(len(whole.rings))
        if not grows and not fits(draft):
            counts = range(1, len(whole.rings) + 1)
            kept = bisect_left(counts, True, key=lambda count: not fits(oldest(count)))
            for ring in whole.rings[kept:]:
                log.error("ring_left_out", ring=ring.id, why="the roster would be too large")
            draft = oldest(kept)
        envelope = sign_roster(draft, self._keys.rosters)
        stored = StoredRoster(
            version=draft.version, hash=roster_hash(encode_roster(draft)), envelope=envelope
        )
        self._store.rosters.add(stored)
        return draft, stored

    def _draft(self, latest: StoredRoster | None) -> Roster:
        now = int(self._clock())
        members = [self._member(member, now) for member in self._store.members.all(Role.MEMBER)]
        gateways = self._store.members.all(Role.GATEWAY)
        since = now - self._settings.certificate_lifetime - SKEW_SECONDS
        revocations = self._store.members.revocations(since=since, limit=_MAX_REVOKED)
        return Roster(
            cluster=self._keys.root.cluster,
            root_version=self._keys.root.version,
            version=self._store.rosters.next_version(),
            previous=latest.hash if latest else NO_PREVIOUS,
            issued=now,
            expires=now + self._settings.roster_lifetime,
            suites=DEFAULT_SUITES,
            trust_floor=SCORES[self._settings.trust_floor],
            min_trust=0,
            members=tuple(members),
            rings=tuple(self._rings({member.id: member.trust for member in members})),
            gateways=tuple(Gateway(gateway.id, gateway.identity_key) for gateway in gateways),
            coordinators=(*self.addresses, *filter(None, [self._standby])),
            revoked=tuple(
                Revoked(entry.id, entry.identity_key, entry.enrolled_at, entry.at) for entry in revocations
            ),
        )

    def _rings(self, trust: dict[str, int]) -> Iterator[Ring]:
        """The planned rings whose members are all enrolled and good enough, the oldest deployments first."""
        for deployment in sorted(self._store.deployments.all(), key=lambda one: one.created):
            floor = max(deployment.plan.spec.trust_floor, SCORES[self._settings.trust_floor])
            for ring in deployment.plan.rings:
                if min(trust.get(stage.member, 0) for stage in ring.stages) >= floor:
                    yield _ring(deployment.plan, ring)
                else:
                    log.warning("ring_left_out", ring=ring.ring, why="a member is gone or below the floor")

    def _member(self, member: StoredMember, now: int) -> RosterMember:
        """A roster's entry of a member. Its times are no later than the roster's, even if this clock was
        ahead at the proof: machines would refuse such a roster."""
        return RosterMember(
            id=member.id,
            identity_key=member.identity_key,
            key_type=KeyType(member.key_type),
            sealing_key=member.sealing_key,
            level=TrustLevel(member.level),
            trust=self.standing.trust(member),
            attestation_hash=hashlib.sha256(member.attestation).digest(),
            attested_at=min(member.attested_at, now),
            challenged_at=min(member.challenged_at, now),
            manifest_hash=member.manifest_hash,
            addresses=tuple(member.addresses),
            enrolled=member.enrolled_at,
        )


def _ring(plan: admin_pb2.DeploymentPlan, ring: admin_pb2.RingPlan) -> Ring:
    return Ring(
        id=ring.ring,
        deployment=plan.spec.name,
        replica=int(ring.ring.rpartition("-")[2]),
        model=plan.spec.model,
        model_digest=bytes.fromhex(plan.profile.digest),
        strategy=PIPELINE if ring.pipeline else plan.spec.strategy,
        context=plan.spec.context,
        total_layers=plan.profile.layers,
        plan_hash=bytes.fromhex(plan.plan_hash),
        trust_floor=plan.spec.trust_floor,
        min_trust=0,
        members=tuple(
            RingMember(
                stage.member,
                stage.rank,
                (stage.first_layer, stage.end_layer),
                (stage.prompt_first_layer, stage.prompt_end_layer) if stage.prompt_end_layer else None,
            )
            for stage in ring.stages
        ),
    )
