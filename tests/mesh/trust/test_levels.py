"""Levels and scores."""

from __future__ import annotations

import pytest
from refusals import refused

from sealring.mesh.crypto import KeyType
from sealring.mesh.errors import AttestationError
from sealring.mesh.trust.levels import SCORES, TrustLevel, ceiling, described, parse_level


@pytest.mark.parametrize("level", ["", "Hardware", "golden", "hardware ", "30"])
def test_an_unknown_level_is_refused(level: str) -> None:
    with refused("UNKNOWN_TRUST_LEVEL", AttestationError):
        parse_level(level)


def test_a_software_key_never_passes_ten() -> None:
    for level in TrustLevel:
        assert ceiling(level, KeyType.SOFTWARE) == min(SCORES[level], 10)
        assert ceiling(level, KeyType.SECURE_ENCLAVE) == SCORES[level]


def test_a_claim_is_called_one() -> None:
    shown = {level: described(level) for level in TrustLevel}
    assert {level for level, said in shown.items() if said != level} == {TrustLevel.SELF_SIGNED}
