"""Fixtures of several folders: a clock to turn, root and roster keys, a small cluster and its roster."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.crypto.dsse import Ed25519Signer
from sealring.mesh.crypto.identity import SoftwareSigner, member_id
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.crypto.suites import DEFAULT_SUITES, Suite
from sealring.mesh.pki.authority import ClusterCA
from sealring.mesh.pki.root import RootMetadata, sign_root
from sealring.mesh.roster import (
    NO_PREVIOUS,
    Gateway,
    Ring,
    RingMember,
    Roster,
    RosterMember,
    check_roster,
    complete_roster,
    sign_roster,
)
from sealring.mesh.trust.levels import TrustLevel

NOW = 1_800_000_000


@dataclass
class FakeClock:
    """A clock that stands still until it is set."""

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
            issued=NOW - 3600,
            expires=NOW + 365 * 86400,
        )
        return Authority(ca, root_signers, roster_signers, sign_root(draft, root_signers))

    return make


@pytest.fixture
def authority(make_authority: Callable[..., Authority]) -> Authority:
    return make_authority()


def make_member(signer: SoftwareSigner | None = None, **changes: object) -> RosterMember:
    key = (signer or SoftwareSigner.generate()).public_key
    member = RosterMember(
        id=member_id(key),
        identity_key=key,
        key_type=KeyType.SOFTWARE,
        sealing_key=secrets.token_bytes(32),
        level=TrustLevel.SOFTWARE,
        trust=10,
        attestation_hash=b"\x11" * 32,
        enrolled=1,
        attested_at=NOW - 10,
        challenged_at=NOW - 5,
        manifest_hash=b"\x22" * 32,
        addresses=("127.0.0.1:7001",),
    )
    return dataclasses.replace(member, **changes)  # type: ignore[arg-type]


def make_ring(members: Sequence[RosterMember], name: str = "ring-0", **changes: object) -> Ring:
    count = len(members)
    ring = Ring(
        id=name,
        deployment="demo",
        replica=0,
        model="demo-chat",
        model_digest=b"\x33" * 32,
        strategy="pipeline",
        context=2048,
        total_layers=3 * count,
        plan_hash=b"\x44" * 32,
        trust_floor=10,
        min_trust=0,
        members=tuple(
            RingMember(member.id, rank, (3 * rank, 3 * rank + 3)) for rank, member in enumerate(members)
        ),
    )
    return dataclasses.replace(ring, **changes)  # type: ignore[arg-type]


@dataclass
class Cluster:
    """A signed roster of a few members in one ring, and their keys in the order of their ranks."""

    authority: Authority
    signers: list[SoftwareSigner]
    gateway: SoftwareSigner
    draft: Roster

    def sign(self, **changes: object) -> bytes:
        """The envelope of the draft with some fields changed."""
        draft = complete_roster(dataclasses.replace(self.draft, **changes))  # type: ignore[arg-type]
        return sign_roster(draft, self.authority.roster_signers)

    def verified(self, **changes: object) -> Roster:
        """The verified roster."""
        return check_roster(self.sign(**changes), self.authority.root, now=NOW)


@pytest.fixture
def make_cluster(make_authority: Callable[..., Authority]) -> Callable[..., Cluster]:
    def make(size: int = 3, suites: Sequence[Suite] = DEFAULT_SUITES, **options: Any) -> Cluster:
        authority = make_authority(**options)
        signers = [SoftwareSigner.generate() for _ in range(size)]
        gateway = SoftwareSigner.generate()
        members = [make_member(signer) for signer in signers]
        draft = Roster(
            cluster=authority.root.cluster,
            root_version=1,
            version=1,
            previous=NO_PREVIOUS,
            issued=NOW,
            expires=NOW + 600,
            suites=tuple(suites),
            trust_floor=10,
            min_trust=0,
            members=tuple(members),
            rings=(make_ring(members),),
            gateways=(Gateway(member_id(gateway.public_key), gateway.public_key),),
        )
        return Cluster(authority, signers, gateway, draft)

    return make


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster()
