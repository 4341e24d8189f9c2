"""Everything that signs for one cluster, and the members, rings and rosters that it signs."""

from __future__ import annotations

import dataclasses
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sealring.mesh.crypto.dsse import Ed25519Signer
from sealring.mesh.crypto.identity import Signer, SoftwareSigner, member_id
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.crypto.suites import DEFAULT_SUITES
from sealring.mesh.member.state import MachineState, save_machine_state
from sealring.mesh.pki.authority import ClusterCA
from sealring.mesh.pki.certificates import LeafKey, PeerIdentity, TlsMaterial
from sealring.mesh.pki.root import RootMetadata, sign_root
from sealring.mesh.roster.codec import complete_roster, sign_roster
from sealring.mesh.roster.model import NO_PREVIOUS, Ring, RingMember, Roster, RosterMember
from sealring.mesh.trust.levels import SCORES, TrustLevel

DAY = 86400


@dataclass
class Authority:
    """The certificate authority, root keys and roster keys of one cluster."""

    ca: ClusterCA
    root_signers: list[Ed25519Signer]
    roster_signers: list[Ed25519Signer]
    root: RootMetadata

    @classmethod
    def create(
        cls,
        cluster: str,
        *,
        now: float,
        root_signers: Sequence[Ed25519Signer] = (),
        root_threshold: int = 1,
        roster_signers: Sequence[Ed25519Signer] = (),
        roster_threshold: int = 1,
    ) -> Self:
        """A new certificate authority, and new keys where none are given; `now` is in seconds since 1970.

        The root metadata is good from two hours before `now` for a year.
        Raises InvalidInput (BAD_NAME) for a name that no cluster can have.
        """
        with tempfile.TemporaryDirectory() as folder:
            ca = ClusterCA.create(Path(folder) / "ca", cluster, now=now)
        root_signers = list(root_signers) or [Ed25519Signer.generate()]
        roster_signers = list(roster_signers) or [Ed25519Signer.generate()]
        draft = RootMetadata(
            cluster=cluster,
            version=1,
            root_keys=tuple(signer.public_key for signer in root_signers),
            root_threshold=root_threshold,
            roster_keys=tuple(signer.public_key for signer in roster_signers),
            roster_threshold=roster_threshold,
            authorities=(ca.certificate,),
            issued=int(now) - 7200,
            expires=int(now) + 365 * DAY,
        )
        return cls(ca, root_signers, roster_signers, sign_root(draft, root_signers))

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return self.root.cluster

    def material(
        self,
        peer: PeerIdentity,
        *,
        now: float,
        lifetime: int = 3600,
        addresses: Sequence[str] = ("127.0.0.1",),
    ) -> TlsMaterial:
        """A new TLS key and its certificate, good for `lifetime` seconds from `now`."""
        leaf = LeafKey()
        certificate = self.ca.issue(leaf.csr(), peer, lifetime=lifetime, now=now, addresses=addresses)
        return TlsMaterial(leaf.private_pem(), certificate, self.root.authorities)

    def enrol(
        self, folder: Path, peer: PeerIdentity, material: TlsMaterial, *, name: str, coordinator: str
    ) -> MachineState:
        """Writes what a machine keeps in `folder` once it has joined; `coordinator` is `host:port`."""
        state = MachineState(peer, name, coordinator, self.root.fingerprint, self.root, material)
        save_machine_state(folder, state)
        return state

    def sign(self, draft: Roster) -> bytes:
        """The signed envelope of a roster. Raises RosterError for a draft that contradicts itself."""
        return sign_roster(complete_roster(draft), self.roster_signers)


def make_member(signer: Signer | None = None, **changes: Any) -> RosterMember:
    """A member with the key of `signer`, or a new one, and a sealing key (32 bytes) that nobody has."""
    key = (signer or SoftwareSigner.generate()).public_key
    level = changes.get("level", TrustLevel.SOFTWARE)
    member = RosterMember(
        id=member_id(key),
        identity_key=key,
        key_type=KeyType.SOFTWARE if level is TrustLevel.SOFTWARE else KeyType.SECURE_ENCLAVE,
        sealing_key=secrets.token_bytes(32),
        level=level,
        trust=SCORES[level],
        attestation_hash=b"\x11" * 32,
        enrolled=1,
        attested_at=0,
        challenged_at=0,
        manifest_hash=b"\x22" * 32,
        addresses=("127.0.0.1:7001",),
    )
    return dataclasses.replace(member, **changes)


def make_ring(members: Sequence[RosterMember], /, name: str = "demo-0", **changes: Any) -> Ring:
    """A pipeline of these members, by rank; each has three layers. `name` is `DEPLOYMENT-REPLICA`."""
    deployment, _, replica = name.rpartition("-")
    ring = Ring(
        id=name,
        deployment=deployment,
        replica=int(replica),
        model="model",
        model_digest=b"\x33" * 32,
        strategy="pipeline",
        context=2048,
        total_layers=3 * len(members),
        plan_hash=b"\x44" * 32,
        trust_floor=10,
        min_trust=0,
        members=tuple(
            RingMember(member.id, rank, (3 * rank, 3 * rank + 3)) for rank, member in enumerate(members)
        ),
    )
    return dataclasses.replace(ring, **changes)


def make_roster(
    cluster: str, members: Sequence[RosterMember], rings: Sequence[Ring], /, *, now: float, **changes: Any
) -> Roster:
    """The draft of a cluster's first roster, good for ten minutes from `now`."""
    draft = Roster(
        cluster=cluster,
        root_version=1,
        version=1,
        previous=NO_PREVIOUS,
        issued=int(now),
        expires=int(now) + 600,
        suites=tuple(DEFAULT_SUITES),
        trust_floor=10,
        min_trust=0,
        members=tuple(members),
        rings=tuple(rings),
    )
    return dataclasses.replace(draft, **changes)
