"""Challenges: every node proves its identity and its software on connecting and every few minutes.

A node that lost a protection is evicted at once; one that fails three challenges in a row is evicted then. It
fails by silence, with invalid evidence, or when it does not know whether a protection is still on. Other
unknown facts lower its level at the third failure. An evicted node needs a new token, and joins new epochs
only. A node that was started again may run other software (decision 20). A node whose files changed while it
ran stays a member and is distrusted until it is started again. Evidence that grows old lowers the score
(`coordinator/auth/standing.py`).
"""

from __future__ import annotations

import asyncio
import math
import secrets
from copy import deepcopy

import structlog

from sealring.coordinator.members.expulsion import Expulsion
from sealring.coordinator.rings.driver import ClusterDriver
from sealring.coordinator.rings.views import RingViews
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredMember
from sealring.coordinator.streams.sessions import Sessions
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.crypto.identity import MAX_SIGNATURE_BYTES
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import AttestationError, InvalidInput, SealringError
from sealring.mesh.trust.apple import APPLE_ROOT, Device, verify_device
from sealring.mesh.trust.attestation import (
    MAX_STATEMENT_BYTES,
    NONCE_BYTES,
    Expected,
    Verdict,
    check_continuity,
    decode_statement,
    has_forgotten,
    verify_statement,
)
from sealring.mesh.trust.levels import TrustLevel
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage

MAX_FAILURES = 3
_LOOKS = 6
_MAX_TICK_SECONDS = 1.0
log = structlog.get_logger()


class Challenges:
    """A listener of the sessions."""

    def __init__(
        self,
        cluster: str,
        store: Store,
        publisher: RosterPublisher,
        sessions: Sessions,
        driver: ClusterDriver,
        views: RingViews,
        expulsion: Expulsion,
        settings: CoordinatorSettings,
        *,
        clock: Clock,
        awake: Clock = monotonic_clock,
        device_root: bytes = APPLE_ROOT,
    ) -> None:
        """`clock` is the wall clock, `awake` one that is never set. `device_root` is the root certificate of
        device chains."""
        self._awake = awake
        self._cluster = cluster
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._driver = driver
        self._views = views
        self._expulsion = expulsion
        self._standing = publisher.standing
        self._interval = settings.challenge_interval
        self._clock = clock
        self._device_root = device_root
        self._serials = settings.allowed_serials
        self._tick = min(settings.challenge_timeout / _LOOKS, _MAX_TICK_SECONDS)
        self._patience = math.ceil(settings.challenge_timeout / self._tick)
        self._open: dict[str, bytes] = {}
        """The nonces of the challenges that wait for an answer."""
        self._looks: dict[str, int] = {}
        """For each member, the looks at unanswered challenges since its last answer. Looks are counted, not
        seconds: a process that stood still fails nobody."""
        self._due: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    # Sessions

    def online(self, member: str) -> None:
        """Sends the first challenge of a stream."""
        self._send(member)

    def left(self, member: str, *, gone: bool = False) -> None:
        """Forgets the open challenge of a stream that broke, and keeps its looks: a member cannot connect
        again for more time. A machine that sleeps is looked at only until its stream has ended."""
        if self._open.pop(member, None) is not None:
            self._looks[member] += 1  # also a stream that ends between two looks
        self._due.pop(member, None)

    # Time

    async def run(self) -> None:
        """Looks at every tick. Runs until cancelled."""
        while True:
            await asyncio.sleep(self._tick)
            self.look()

    def look(self) -> None:
        """Fails the challenges that have been open for too many looks, and sends those that are due."""
        for member in self._open:
            self._looks[member] += 1
        for member, looks in list(self._looks.items()):
            if looks > self._patience:
                self._guarded(member, "SILENT")
        now = self._awake()
        for member, due in list(self._due.items()):
            if now >= due and member not in self._open:
                self._send(member)

    @property
    def open(self) -> list[str]:
        """The members whose answer is awaited, in the order of the questions."""
        return list(self._open)

    def failures(self, member: str) -> int:
        """The challenges in a row that a member has failed."""
        return self._failures.get(member, 0)

    def _guarded(self, member: str, why: str) -> None:
        self._settle(member)
        try:
            self._failed(member, why)
        except SealringError as error:  # the database cannot be written: the next challenge decides
            log.error("challenge_not_recorded", member=member, reason=error.reason)

    def _send(self, member: str) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._open[member] = nonce
        self._looks.setdefault(member, 0)
        self._due[member] = self._awake() + self._interval
        challenge = membership_pb2.Challenge(nonce=nonce)
        self._sessions.send(member, CoordinatorMessage(challenge=challenge))

    def _settle(self, member: str) -> None:
        """Ends the wait for an answer."""
        self._open.pop(member, None)
        self._looks.pop(member, None)

    # Answers

    def answered(self, identifier: str, answer: membership_pb2.ChallengeAnswer) -> None:
        """Judges an answer. One that is late changes nothing. Raises InvalidInput (BAD_MESSAGE)."""
        sizes = (len(answer.statement) <= MAX_STATEMENT_BYTES, len(answer.signature) <= MAX_SIGNATURE_BYTES)
        if not all(sizes):
            raise InvalidInput("an answer to a challenge is too large", reason="BAD_MESSAGE")
        expected = self._open.get(identifier)
        member = self._store.members.find(identifier)
        try:
            nonce = decode_statement(answer.statement).nonce
            if expected is None or member is None or nonce != expected:
                log.info("challenge_answered_late", member=identifier)
                return
            self._settle(identifier)
            verdict = self._judge(member, expected, answer)
        except AttestationError as error:
            self._settle(identifier)
            if member is not None and error.reason == "PROTECTION_LOST":
                self._throw_out(member, error.reason)
            elif member is not None and error.reason == "MANIFEST_CHANGED":
                self._distrust(member, answer.statement, error)
            else:
                self._failed(identifier, error.reason)
            return
        self._passed(member, verdict)

    def _judge(self, member: StoredMember, nonce: bytes, answer: membership_pb2.ChallengeAnswer) -> Verdict:
        expected = Expected(
            cluster=self._cluster,
            nonce=nonce,
            identity_key=member.identity_key,
            key_type=member.key_type,
            sealing_key=member.sealing_key,
        )
        verdict = verify_statement(
            answer.statement,
            answer.signature,
            expected,
            now=None,
            label=Label.CHALLENGE,
            device=self._device(member),
        )
        before = decode_statement(member.evidence)
        check_continuity(before, verdict.statement)
        lower = verdict.trust < member.trust and has_forgotten(before, verdict.statement)
        if lower and not self._is_last(member):
            raise AttestationError("the machine does not know all that it knew", reason="FACTS_UNKNOWN")
        if member.level == TrustLevel.NONE and before.sealing_key == member.sealing_key:
            raise AttestationError("not started again since its files changed", reason="MANIFEST_CHANGED")
        if self._views.model_changed(member.id, verdict.statement.models):
            raise AttestationError("the model's files have changed", reason="MANIFEST_CHANGED")
        return verdict

    def _is_last(self, member: StoredMember) -> bool:
        """Whether one more failure evicts the member."""
        return self.failures(member.id) + 1 >= MAX_FAILURES

    def _device(self, member: StoredMember) -> Device | None:
        """The device that the member's chain certifies, or None without a valid chain."""
        if not member.device_chain:
            return None
        try:
            return verify_device(
                member.device_chain,
                member.identity_key,
                now=self._clock(),
                root=self._device_root,
                serials=self._serials,
            )
        except AttestationError as error:
            log.warning("device_chain_refused", member=member.id, why=error.reason)
            return None

    def _passed(self, member: StoredMember, verdict: Verdict) -> None:
        self._failures.pop(member.id, None)
        changed = deepcopy(member)
        changed.level, changed.trust, changed.evidence = verdict.level, verdict.trust, verdict.data
        changed.challenged_at = int(self._clock())
        manifest = verdict.statement.manifest_hash
        updated = manifest != member.manifest_hash
        if updated:
            changed.manifest_hash, changed.attestation = manifest, verdict.data
            changed.attested_at = changed.challenged_at
        score = self._standing.trust(changed)
        details: dict[str, str | int] = {"level": changed.level, "trust": score}
        if updated:
            details |= {"manifest": manifest.hex(), "before": member.manifest_hash.hex()}
        listed = self._publisher.listed(member.id)
        same = listed is not None and (listed.level, listed.trust) == (changed.level, score)
        if same and not updated:
            self._store.members.save(changed)
        else:
            self._change(changed, "reattest_node" if updated else "trust_changed", details)
        if not self._standing.attested(member):  # its rings have waited for this
            self._driver.proved(member.id)

    def _distrust(self, member: StoredMember, statement: bytes, why: AttestationError) -> None:
        """Takes a member out of all rings. Its last evidence identifies the process that stays distrusted.

        Evidence of this process is kept if the new statement knows less: a protection that was on and is off
        later would else pass for one that was never on.
        """
        self._failures.pop(member.id, None)
        if member.level != TrustLevel.NONE:
            before, after = decode_statement(member.evidence), decode_statement(statement)
            if before.sealing_key == after.sealing_key and has_forgotten(before, after):
                statement = member.evidence
            member.level, member.trust, member.evidence = TrustLevel.NONE, 0, statement
            self._change(member, "distrust_node", {"why": why.message})

    def _change(self, changed: StoredMember, action: str, details: dict[str, str | int]) -> None:
        log.warning("member_changed", member=changed.id, name=changed.name, what=action, **details)
        with self._publisher.change():
            self._store.members.save(changed)
            self._store.audit.append(self._clock(), "coordinator", action, changed.id, details)

    def _failed(self, identifier: str, why: str) -> None:
        failures = self._failures[identifier] = self.failures(identifier) + 1
        log.warning("challenge_failed", member=identifier, why=why, failures=failures)
        member = self._store.members.find(identifier)
        if failures >= MAX_FAILURES and member is not None:
            self._throw_out(member, why)

    def _throw_out(self, member: StoredMember, why: str) -> None:
        log.error("member_failed_challenge", member=member.id, name=member.name, why=why)
        self._expulsion.evict(member, "coordinator", why=why)
        self._failures.pop(member.id, None)
