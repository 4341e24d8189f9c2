"""A member's trust level now: that of its evidence, lowered by age and by this coordinator's settings."""

from __future__ import annotations

from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredMember
from sealring.mesh.clock import Clock
from sealring.mesh.trust.levels import SCORES, TrustLevel

_MISSED = 2
_LOWER = dict(zip(list(TrustLevel)[1:], TrustLevel, strict=False))


class Standing:
    """`clock` is the wall clock."""

    def __init__(self, settings: CoordinatorSettings, *, clock: Clock) -> None:
        self._software_allowed = settings.software_identity_allowed
        self._stale_after = _MISSED * settings.challenge_interval + settings.challenge_timeout
        self._clock = clock

    def trust(self, member: StoredMember) -> int:
        """The score that the next roster states for a member.

        Evidence that has missed two challenges counts as the level below; a member of level software counts
        for nothing where software identities are not allowed.
        """
        if member.level is TrustLevel.SOFTWARE and not self._software_allowed:
            return 0
        if self._clock() - member.challenged_at > self._stale_after:
            return min(member.trust, SCORES[_LOWER.get(member.level, TrustLevel.NONE)])
        return member.trust
