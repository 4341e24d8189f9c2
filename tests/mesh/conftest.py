"""Fixtures: a clock that tests turn, root and roster keys, a small cluster and its roster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mesh.certificates import ClusterCA
from mesh.dsse import Ed25519Signer
from mesh.rootmeta import RootMetadata, sign_root

NOW = 1_800_000_000


@dataclass
class FakeClock:
    """A clock that stands still until it is told otherwise."""

    now: float = float(NOW)

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Authority:
    """Everything that signs for one cluster."""

    ca: ClusterCA
    root_signers: list[Ed25519Signer]
    roster_signers: list[Ed25519Signer]
    root: RootMetadata
    extra: dict[str, object] = field(default_factory=dict)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_authority(tmp_path: Path) -> Callable[..., Authority]:
    count = 0

    def make(
        cluster: str = "demo",
        *,
        roots: int = 1,
        root_threshold: int = 1,
        rosters: int = 1,
        roster_threshold: int = 1,
    ) -> Authority:
        nonlocal count
        count += 1
        ca = ClusterCA.create(tmp_path / f"ca-{count}", cluster, now=NOW)
        root_signers = [Ed25519Signer.generate() for _ in range(roots)]
        roster_signers = [Ed25519Signer.generate() for _ in range(rosters)]
        draft = RootMetadata(
            cluster=cluster,
            version=1,
            root_keys=tuple(signer.public_key for signer in root_signers),
            root_threshold=root_threshold,
            roster_keys=tuple(signer.public_key for signer in roster_signers),
            roster_threshold=roster_threshold,
            authorities=(ca.certificate,),
            issued=NOW,
            expires=NOW + 365 * 86400,
        )
        return Authority(ca, root_signers, roster_signers, sign_root(draft, root_signers))

    return make


@pytest.fixture
def authority(make_authority: Callable[..., Authority]) -> Authority:
    return make_authority()
