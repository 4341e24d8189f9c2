"""Trust levels and their scores, apart from `attestation.py`: a command that names a level loads no
cryptography."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.errors import AttestationError


class TrustLevel(enum.StrEnum):
    """How well a member is attested, weakest first."""

    NONE = "none"
    SOFTWARE = "software"
    """Signed by a key."""

    SELF_SIGNED = "self_signed"
    """Signed by a key. The member claims, without proof, a key in a Secure Enclave and a protected Mac."""

    HARDWARE = "hardware"
    """The manager of a protected Mac vouches for the key, with Apple's attestation of that Mac."""


SCORES: Mapping[TrustLevel, int] = MappingProxyType(
    {
        TrustLevel.NONE: 0,
        TrustLevel.SOFTWARE: 10,
        TrustLevel.SELF_SIGNED: 20,
        TrustLevel.HARDWARE: 30,
    }
)
MAX_SCORE = max(SCORES.values())
WORDS: Mapping[TrustLevel, str] = MappingProxyType(
    {
        TrustLevel.NONE: "no trust",
        TrustLevel.SOFTWARE: "a key in a file",
        TrustLevel.SELF_SIGNED: "it claims an enclave, which nobody has checked",
        TrustLevel.HARDWARE: "the manager of a Mac vouches for the key",
    }
)
"""What each level says of a member."""

CLAIMS = frozenset({TrustLevel.SELF_SIGNED})
"""Levels by the member's own word."""


def parse_level(name: str) -> TrustLevel:
    """The level called `name`; an unknown level is refused, never read as the lowest.

    Raises AttestationError (UNKNOWN_TRUST_LEVEL).
    """
    try:
        return TrustLevel(name)
    except ValueError:
        raise AttestationError(
            "trust level is unknown", reason="UNKNOWN_TRUST_LEVEL", hint="run the same release everywhere"
        ) from None


def level_of(score: int) -> str:
    """The name of the level with that score; an unknown score as a number."""
    return next((str(level) for level, value in SCORES.items() if value == score), str(score))


def described(level: str | int) -> str:
    """A level, or the level of a score, as people read it: by its name, and that a claim is one."""
    name = level if isinstance(level, str) else level_of(level)
    return f"{name} (a claim)" if name in CLAIMS else name


def ceiling(level: TrustLevel, key_type: KeyType) -> int:
    """The highest score that evidence of `level` by a key of `key_type` may reach."""
    if key_type is KeyType.SOFTWARE:
        return min(SCORES[level], SCORES[TrustLevel.SOFTWARE])
    return SCORES[level]


NAMED = ", ".join(map(described, list(TrustLevel)[1:]))
"""The levels that can be asked for, in help."""
