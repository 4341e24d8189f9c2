"""A member's trust level now: that of its evidence, lowered by age and by this coordinator's settings."""

from __future__ import annotations

from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredMember
from sealring.mesh.clock import Clock
from sealring.mesh.trust.attestation import decode_statement
from sealring.mesh.trust.levels import SCORES, TrustLevel

_MISSED = 2
_LOWER = dict(zip(list(TrustLevel)[1:], TrustLevel, strict=False))


class Standing:
    """`clock` is the wall clock."""

    def __init__(self, settings: CoordinatorSettings, *, clock: Clock) -> None:
        self._software_allowed = settings.software_identity_allowed
        self._manifests = frozenset(map(bytes.fromhex, settings.allowed_manifests))
        self._stale_after = _MISSED * settings.challenge_interval + settings.challenge_timeout
        self._clock = clock

    def trust(self, member: StoredMember) -> int:
        """The score that the next roster states for a member.

        Evidence that has missed two challenges counts as the level below.
        """
        if self.refusal(member):
            return 0
        if self._clock() - member.challenged_at > self._stale_after:
            return min(member.trust, SCORES[_LOWER.get(member.level, TrustLevel.NONE)])
        return member.trust

    def refusal(self, member: StoredMember) -> str:
        """Why a node counts for nothing whatever its evidence proves; empty if it does count."""
        if member.level is TrustLevel.NONE:
            return (
                "its software or model files changed while it ran: start it again if that was an update, "
                "else evict it"
            )
        if member.level is TrustLevel.SOFTWARE and not self._software_allowed:
            return "its identity key is in a file, and software_identity_allowed is not set"
        if self._manifests and member.manifest_hash not in self._manifests:
            return f"its software is not in allowed_manifests: {member.manifest_hash.hex()}"
        return ""

    def attested(self, member: StoredMember) -> bool:
        """Whether the process that is there now may serve: where software is pinned, not before it has proved
        what it runs."""
        return not self._manifests or decode_statement(member.evidence).sealing_key == member.sealing_key
