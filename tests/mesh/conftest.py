"""Fixtures: a clock that tests turn, root and roster keys, a small cluster and its roster."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mesh.certificates import ClusterCA
from mesh.dsse import Ed25519Signer
from mesh.identity import SoftwareSigner, member_id
from mesh.records import Link
from mesh.rootmeta import RootMetadata, sign_root
from mesh.roster import NO_PREVIOUS, Gateway, Ring, RingMember, Roster, RosterMember
from mesh.roster_codec import complete_roster, sign_roster
from mesh.roster_reader import check_roster
from mesh.session import LinkParams, SessionKeys
from mesh.sigma import EphemeralLedger, Initiator, Responder
from mesh.suites import DEFAULT_SUITES, Suite
from mesh.trust import KeyType, TrustLevel

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


@dataclass
class Pair:
    """Two members that are about to shake hands over link 0 -> 1 of one ring."""

    signers: tuple[SoftwareSigner, SoftwareSigner]
    params: tuple[LinkParams, LinkParams]
    clock: FakeClock
    ledger: EphemeralLedger = field(default_factory=EphemeralLedger)

    def initiator(self, **changes: Any) -> Initiator:
        return Initiator(dataclasses.replace(self.params[0], **changes), self.signers[0], clock=self.clock)

    def responder(self, **changes: Any) -> Responder:
        params = dataclasses.replace(self.params[1], **changes)
        return Responder(params, self.signers[1], self.ledger, clock=self.clock)

    def handshake(self, *, initiator: Initiator | None = None, responder: Responder | None = None) -> Keys:
        """A whole honest handshake: the initiator's keys, then the responder's."""
        initiator, responder = initiator or self.initiator(), responder or self.responder()
        reply = responder.on_message(initiator.start()).message
        assert reply is not None
        proof = initiator.on_message(reply).message
        assert proof is not None
        last = responder.on_message(proof)
        assert last.message is not None
        first = initiator.on_message(last.message)
        assert first.message is None
        assert first.session is not None
        assert last.session is not None
        return first.session, last.session

    def link(self) -> tuple[Link, Link]:
        """Both ends of a confirmed link."""
        first, second = self.handshake()
        sender, receiver = Link(first, clock=self.clock), Link(second, clock=self.clock)
        receiver.opener.open_confirmation(sender.sealer.seal_confirmation())
        return sender, receiver


Keys = tuple[SessionKeys, SessionKeys]


@pytest.fixture
def make_pair(clock: FakeClock) -> Callable[..., Pair]:
    def make(
        suites: Sequence[Suite] = (Suite.X25519_CHACHA20POLY1305,),
        signers: tuple[SoftwareSigner, SoftwareSigner] | None = None,
        **changes: Any,
    ) -> Pair:
        signers = signers or (SoftwareSigner.generate(), SoftwareSigner.generate())
        ids = [member_id(signer.public_key) for signer in signers]

        def params(own: int) -> LinkParams:
            base = LinkParams(
                cluster="demo",
                ring="ring-0",
                epoch=7,
                from_rank=0,
                to_rank=1,
                own_rank=own,
                roster_version=3,
                roster_hash=b"\x55" * 32,
                own_id=ids[own],
                peer_id=ids[1 - own],
                peer_key=signers[1 - own].public_key,
                suites=tuple(suites),
            )
            return dataclasses.replace(base, **changes)

        return Pair(signers, (params(0), params(1)), clock)

    return make


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()
