"""Fields that a gateway or a head left out."""

from __future__ import annotations

import pytest

from sealring.client.types import Delta, Member, Model, TokenLogprob, Trust, Usage
from sealring.mesh.errors import AttestationError
from sealring.mesh.trust.levels import SCORES


def test_what_is_not_told_is_none() -> None:
    assert Delta("x", 1) == Delta("x", 1, (), 0)
    assert not TokenLogprob(1, b"x", -1.0, ()).prompt
    assert Usage(1, 2) == Usage(1, 2, 0)
    plain = Model("demo", 512, 10, 1)
    assert (plain.model_type, plain.rows) == ("", 0)


def test_trust_is_compared_as_a_score_and_shown_by_name() -> None:
    trust = Trust("software")
    assert (trust, Trust(10), f"{trust}", f"{trust:>10}") == (10, trust, "software", "  software")
    assert trust < Trust("hardware") == max(SCORES.values())
    assert repr([Trust(one) for one in (*SCORES.values(), 17)]) == f"[{', '.join([*SCORES, '17'])}]"
    assert Member("a", 0, (0, 1), trust, "software").trust is trust
    with pytest.raises(AttestationError):
        Trust("best")
