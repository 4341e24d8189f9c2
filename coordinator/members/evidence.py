"""Evidence of nodes, in joins and in answers to challenges: whether it is valid, and what is noted of it."""

from __future__ import annotations

from copy import deepcopy

import structlog

from sealring.coordinator.rings.driver import ClusterDriver
from sealring.coordinator.rings.views import RingViews
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredMember
from sealring.mesh.clock import Clock
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import AttestationError
from sealring.mesh.trust.apple import APPLE_ROOT, Device, verify_device
from sealring.mesh.trust.attestation import (
    Expected,
    Verdict,
    check_continuity,
    decode_statement,
    has_forgotten,
    verify_statement,
)
from sealring.mesh.trust.levels import SCORES, TrustLevel, level_of
from sealring.v1.membership_pb2 import ChallengeAnswer, EnrolRequest

log = structlog.get_logger()


class Verifier:
    """Judges evidence. `clock` is the wall clock; `device_root` is the root certificate of device chains."""

    def __init__(
        self,
        cluster: str,
        views: RingViews,
        settings: CoordinatorSettings,
        *,
        clock: Clock,
        device_root: bytes = APPLE_ROOT,
    ) -> None:
        self._cluster = cluster
        self._views = views
        self._settings = settings
        self._clock = clock
        self._device_root = device_root

    def judge_join(self, request: EnrolRequest, now: int) -> Verdict:
        """The verdict on a newcomer's evidence, by this coordinator's settings. Raises AttestationError."""
        verdict = verify_statement(
            request.attestation,
            request.attestation_signature,
            self._expected(request, request.nonce),
            now=now,
            device=self._device(request, now),
        )
        if verdict.level == TrustLevel.SOFTWARE and not self._settings.software_identity_allowed:
            raise AttestationError(
                "the evidence is of level software, which this coordinator does not take",
                hint="its operator allows them: coordinator run --software-identity-allowed, or "
                "software_identity_allowed under [coordinator]",
                reason="SOFTWARE_NOT_ALLOWED",
            )
        manifest, allowed = verdict.statement.manifest_hash.hex(), self._settings.allowed_manifests
        if allowed and manifest not in allowed:
            raise AttestationError(
                f"the machine's software is none that this coordinator allows: {manifest}",
                hint="install an allowed release, or set the coordinator's allowed_manifests",
                reason="MANIFEST_NOT_ALLOWED",
            )
        if verdict.trust < SCORES[self._settings.trust_floor]:
            raise AttestationError(
                f"the evidence is of trust level {level_of(verdict.trust)}, below the trust_floor",
                reason="BELOW_FLOOR",
            )
        return verdict

    def judge_answer(
        self, member: StoredMember, nonce: bytes, answer: ChallengeAnswer, *, last: bool
    ) -> Verdict:
        """The verdict on a member's evidence, by what is known of the member.

        At the `last` challenge before an eviction, unknown facts lower the level. Raises AttestationError.
        """
        device = None
        try:
            device = self._device(member, self._clock())
        except AttestationError as error:
            log.warning("device_chain_refused", member=member.id, why=error.reason)
        verdict = verify_statement(
            answer.statement,
            answer.signature,
            self._expected(member, nonce),
            now=None,
            label=Label.CHALLENGE,
            device=device,
        )
        before = decode_statement(member.evidence)
        check_continuity(before, verdict.statement)
        lower = verdict.trust < member.trust and has_forgotten(before, verdict.statement)
        if lower and not last:
            raise AttestationError("the machine does not know all that it knew", reason="FACTS_UNKNOWN")
        if member.level == TrustLevel.NONE and before.sealing_key == member.sealing_key:
            raise AttestationError("not started again since its files changed", reason="MANIFEST_CHANGED")
        if self._views.model_changed(member.id, verdict.statement.models):
            raise AttestationError("the model's files have changed", reason="MANIFEST_CHANGED")
        return verdict

    def _expected(self, node: StoredMember | EnrolRequest, nonce: bytes) -> Expected:
        return Expected(
            cluster=self._cluster,
            nonce=nonce,
            identity_key=node.identity_key,
            key_type=node.key_type,
            sealing_key=node.sealing_key,
        )

    def _device(self, node: StoredMember | EnrolRequest, now: float) -> Device | None:
        """The device that a node's chain certifies; None without a chain. Raises AttestationError."""
        if not node.device_chain:
            return None
        root, serials = self._device_root, self._settings.allowed_serials
        return verify_device(node.device_chain, node.identity_key, now=now, root=root, serials=serials)


class Outcomes:
    """Notes what evidence says: in the store, the audit log and, where it changes a member's trust, a
    roster."""

    def __init__(
        self, store: Store, publisher: RosterPublisher, driver: ClusterDriver, *, clock: Clock
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._standing = publisher.standing
        self._driver = driver
        self._clock = clock

    def passed(self, member: StoredMember, verdict: Verdict) -> None:
        """Notes valid evidence, and has rings go on that have waited for it."""
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

    def distrust(self, member: StoredMember, statement: bytes, why: AttestationError) -> None:
        """Takes a member out of all rings. Its last evidence identifies the process that stays distrusted.

        Evidence of this process is kept if the new statement knows less: a protection that was on and is off
        later would else pass for one that was never on.
        """
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
