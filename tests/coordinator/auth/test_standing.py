"""How long ago a member proved itself is no question to a wall clock that somebody sets."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import storekit

from sealring.coordinator.auth.standing import Standing
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredMember
from sealring.mesh.crypto import KeyType, SoftwareSigner
from sealring.mesh.pki import Role
from sealring.mesh.trust.attestation import Posture, Statement, sign_statement
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


def member(challenged_at: int, **changes: Any) -> StoredMember:
    made = StoredMember(
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
    return storekit.changed(made, **changes)


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


FILES = (
    "its software or model files changed while it ran: start it again if that was an update, else evict it"
)
KEY = "its identity key is in a file, and software_identity_allowed is not set"
SOFTWARE, ALLOWED = {"software_identity_allowed": True}, {"allowed_manifests": ["ab" * 32]}


@pytest.mark.parametrize(
    ("settings", "changes", "why"),
    [
        (SOFTWARE, {}, ""),
        ({}, {}, KEY),
        ({}, {"level": TrustLevel.SELF_SIGNED}, ""),
        (SOFTWARE, {"level": TrustLevel.NONE}, FILES),
        (SOFTWARE | ALLOWED, {"manifest_hash": b"\xab" * 32}, ""),
        (
            SOFTWARE | ALLOWED,
            {"manifest_hash": b"\xcd" * 32},
            "its software is not in allowed_manifests: " + "cd" * 32,
        ),
    ],
)
def test_who_counts_for_nothing_and_why(settings: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    made = Standing(CoordinatorSettings(**settings), clock=lambda: NOW, boot=lambda: 0.0)
    one = member(NOW, trust=20, **changes)
    assert (made.refusal(one), made.trust(one)) == (why, 0 if why else 20)


@pytest.mark.parametrize(
    ("level", "trust", "later"),
    [(TrustLevel.SELF_SIGNED, 20, 10), (TrustLevel.SELF_SIGNED, 5, 5), (TrustLevel.SOFTWARE, 10, 0)],
)
def test_evidence_that_is_old_counts_as_the_level_below(level: TrustLevel, trust: int, later: int) -> None:
    machine, one = Machine(), member(NOW, level=level, trust=trust)
    assert machine.standing.trust(one) == trust
    machine.passes(machine.stale_after + 1)
    assert machine.standing.trust(one) == later


@pytest.mark.parametrize(("allowed", "trust"), [([], 30), (["C02TESTA", "C02TESTB"], 30), (["C02TESTB"], 20)])
def test_a_mac_that_is_taken_off_the_list_counts_less_before_it_is_challenged(
    allowed: list[str], trust: int
) -> None:
    """A machine that does not answer would keep the level of the day before."""
    signer, key = SoftwareSigner.generate(), secrets.token_bytes(32)
    posture = Posture(serial="C02TESTA")
    said = Statement("c", bytes(32), NOW, signer.public_key, KeyType.SECURE_ENCLAVE, key, bytes(32), posture)
    evidence, _ = sign_statement(signer, said)
    one = member(NOW, level=TrustLevel.HARDWARE, trust=30, evidence=evidence)
    made = Standing(CoordinatorSettings(allowed_serials=allowed), clock=lambda: NOW, boot=lambda: 0.0)
    assert made.trust(one) == trust


@pytest.mark.parametrize(("pinned", "own", "may"), [(False, 0, True), (True, 0, False), (True, 1, True)])
def test_where_software_is_pinned_a_process_proves_it_first(pinned: bool, own: int, may: bool) -> None:
    signer, keys = SoftwareSigner.generate(), (bytes(32), b"k" * 32)
    said = Statement("c", bytes(32), NOW, signer.public_key, KeyType.SOFTWARE, keys[own], bytes(32))
    evidence, _ = sign_statement(signer, said)
    made = Standing(CoordinatorSettings(**(ALLOWED if pinned else {})), clock=lambda: NOW)
    assert made.attested(member(NOW, sealing_key=keys[1], evidence=evidence)) is may
