"""Fixtures of several folders: a clock to turn, root and roster keys, a small cluster and its roster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sealring.mesh.crypto import DEFAULT_SUITES, Ed25519Signer, Suite
from sealring.mesh.trust.levels import TrustLevel
from sealring.testing import ManualClock, PaperCluster
from sealring.testing.authority import Authority

NOW = 1_800_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


def signers(count: int) -> list[Ed25519Signer]:
    return [Ed25519Signer.generate() for _ in range(count)]


@pytest.fixture
def make_authority() -> Callable[..., Authority]:
    def make(cluster: str = "demo", *, roots: int = 1, rosters: int = 1, **thresholds: int) -> Authority:
        keys = {"root_signers": signers(roots), "roster_signers": signers(rosters)}
        return Authority.create(cluster, now=NOW, **keys, **thresholds)  # type: ignore[arg-type]

    return make


@pytest.fixture
def authority(make_authority: Callable[..., Authority]) -> Authority:
    return make_authority()


@pytest.fixture
def make_cluster(make_authority: Callable[..., Authority]) -> Callable[..., PaperCluster]:
    def make(size: int = 3, suites: Sequence[Suite] = DEFAULT_SUITES, **options: Any) -> PaperCluster:
        authority = make_authority(**options)
        given = {"authority": authority, "suites": tuple(suites)}
        return PaperCluster(size=size, rest=TrustLevel.SOFTWARE, clock=lambda: NOW, **given)

    return make


@pytest.fixture
def cluster(make_cluster: Callable[..., PaperCluster]) -> PaperCluster:
    return make_cluster()
