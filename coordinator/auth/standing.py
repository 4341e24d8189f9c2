"""A member's present trust level: that of its evidence, lowered by age and by the settings."""

from __future__ import annotations

from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredMember
from sealring.mesh.clock import Clock, boot_clock
from sealring.mesh.trust.attestation import decode_statement
from sealring.mesh.trust.levels import SCORES, TrustLevel

_MISSED = 2
_LOWER = dict(zip(list(TrustLevel)[1:], TrustLevel, strict=False))


class Standing:
    """`clock` is the wall clock."""

    def __init__(self, settings: CoordinatorSettings, *, clock: Clock, boot: Clock = boot_clock) -> None:
        self._software_allowed = settings.software_identity_allowed
        self._manifests = frozenset(map(bytes.fromhex, settings.allowed_manifests))
        self._serials = frozenset(settings.allowed_serials)
        self._stale_after = _MISSED * settings.challenge_interval + settings.challenge_timeout
        self._clock = clock
        self._boot = boot
        self._proved: dict[str, tuple[int, float]] = {}

    def trust(self, member: StoredMember) -> int:
        """The score that the next roster states for a member.

        Evidence that has missed two challenges counts as the level below, and so does that of a Mac that
        `allowed_serials` does not name any more.
        """
        if self.refusal(member):
            return 0
        if self._age(member) > self._stale_after or not self._allows(member):
            return min(member.trust, SCORES[_LOWER.get(TrustLevel(member.level), TrustLevel.NONE)])
        return member.trust

    def _allows(self, member: StoredMember) -> bool:
        if member.level != TrustLevel.HARDWARE or not self._serials:
            return True
        return decode_statement(member.evidence).posture.serial in self._serials

    def _age(self, member: StoredMember) -> float:
        """Seconds since the member's last proof. The wall clock is read once for each proof, so that setting
        it later makes no proof older."""
        at, seen = self._proved.get(member.id, (-1, 0.0))
        if at != member.challenged_at:
            seen = self._boot() - max(self._clock() - member.challenged_at, 0)
            self._proved[member.id] = member.challenged_at, seen
        return self._boot() - seen

    def refusal(self, member: StoredMember) -> str:
        """The reason for distrusting a node despite its evidence, or ""."""
        if member.level == TrustLevel.NONE:
            return (
                "its software or model files changed while it ran: start it again if that was an update, "
                "else evict it"
            )
        if member.level == TrustLevel.SOFTWARE and not self._software_allowed:
            return "its identity key is in a file, and software_identity_allowed is not set"
        if self._manifests and member.manifest_hash not in self._manifests:
            return f"its software is not in allowed_manifests: {member.manifest_hash.hex()}"
        return ""

    def attested(self, member: StoredMember) -> bool:
        """Whether the process that is online may serve. If software is pinned, it has to prove its own
        first."""
        return not self._manifests or decode_statement(member.evidence).sealing_key == member.sealing_key
