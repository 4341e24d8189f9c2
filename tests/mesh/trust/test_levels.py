"""Levels, scores and minima."""

from __future__ import annotations

import pytest

from sealring.mesh.errors import AttestationError
from sealring.mesh.trust.levels import (
    MAX_SCORE,
    SCORES,
    KeyType,
    TrustLevel,
    ceiling,
    min_trust,
    parse_level,
    score,
)


def test_scores() -> None:
    assert {level.value: SCORES[level] for level in TrustLevel} == {
        "none": 0,
        "software": 10,
        "self_signed": 20,
        "hardware": 30,
    }
    assert MAX_SCORE == 30


def test_minimum_over_members() -> None:
    assert min_trust(["hardware", "software", "self_signed"]) == 10
    assert min_trust(["hardware"]) == 30
    assert min_trust([]) == 0


@pytest.mark.parametrize("level", ["", "Hardware", "golden", "hardware ", "30"])
def test_an_unknown_level_is_refused(level: str) -> None:
    for action in (parse_level, score, lambda name: min_trust(["hardware", name])):
        with pytest.raises(AttestationError) as error:
            action(level)
        assert error.value.reason == "UNKNOWN_TRUST_LEVEL"


def test_a_software_key_never_passes_ten() -> None:
    for level in TrustLevel:
        assert ceiling(level, KeyType.SOFTWARE) == min(SCORES[level], 10)
        assert ceiling(level, KeyType.SECURE_ENCLAVE) == SCORES[level]
