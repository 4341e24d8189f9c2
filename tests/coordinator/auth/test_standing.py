"""How long ago a member proved itself is no question to a wall clock that somebody sets."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from sealring.coordinator.auth.standing import Standing
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredMember
from sealring.mesh.crypto.key_type import KeyType
from sealring.mesh.pki.certificates import Role
from sealring.mesh.trust.levels import SCORES, TrustLevel

NOW = 1_800_000_000
SCORE = SCORES[TrustLevel.SOFTWARE]


class Machine:
    """The coordinator's: two clocks."""

    def __init__(self) -> None:
        self.wall, self.boot = float(NOW), 50.0
        settings = CoordinatorSettings(state_dir=Path("c"), software_identity_allowed=True)
        self.standing = Standing(settings, clock=lambda: self.wall, boot=lambda: self.boot)
        self.stale_after = 2 * settings.challenge_interval + settings.challenge_timeout

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.boot += seconds


def member(challenged_at: int) -> StoredMember:
    return StoredMember(
        id="m",
        role=Role.MEMBER,
        name="alpha",
        identity_key=b"",
        key_type=KeyType.SOFTWARE,
        enrolled_at=NOW,
        sealing_key=secrets.token_bytes(32),
        level=TrustLevel.SOFTWARE,
        trust=SCORE,
        challenged_at=challenged_at,
    )


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_that_is_set_makes_no_proof_older_or_younger(step: float) -> None:
    machine, one = Machine(), member(NOW)
    assert machine.standing.trust(one) == SCORE
    machine.wall += step
    assert machine.standing.trust(one) == SCORE
    machine.passes(machine.stale_after)
    assert machine.standing.trust(one) == SCORE
    machine.passes(1)
    assert machine.standing.trust(one) == 0
    assert machine.standing.trust(member(int(machine.wall))) == SCORE


def test_a_coordinator_that_was_away_counts_that_time() -> None:
    machine = Machine()
    assert machine.standing.trust(member(NOW - int(machine.stale_after) - 1)) == 0
