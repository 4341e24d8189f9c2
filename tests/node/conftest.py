"""A cluster of one test process: authority, identities, rosters, and Links services on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sealring.mesh.crypto.dsse import Ed25519Signer
from sealring.mesh.crypto.identity import SoftwareSigner, member_id, private_pem
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.crypto.suites import DEFAULT_SUITES
from sealring.mesh.member.state import IDENTITY_KEY, ROSTER, ROSTER_STATE, MachineState, save_machine_state
from sealring.mesh.pki.authority import ClusterCA
from sealring.mesh.pki.certificates import LeafKey, PeerIdentity, Role, TlsMaterial
from sealring.mesh.pki.root import RootMetadata, sign_root
from sealring.mesh.roster import (
    NO_PREVIOUS,
    Gateway,
    Revoked,
    Ring,
    RingMember,
    Roster,
    RosterMember,
    RosterStateFile,
    check_roster,
    complete_roster,
    sign_roster,
)
from sealring.mesh.rpc.tls import TlsStore
from sealring.mesh.system.files import write_atomic
from sealring.mesh.trust.levels import TrustLevel

CLUSTER = "testbed"
DIGEST = bytes(range(32))


@dataclass
class Party:
    """One identity of the cluster."""

    key: ec.EllipticCurvePrivateKey
    signer: SoftwareSigner
    material: TlsMaterial
    address: str = "127.0.0.1:1"

    @property
    def id(self) -> str:
        return member_id(self.signer.public_key)

    def store(self) -> TlsStore:
        return TlsStore(self.material)


@dataclass
class Cluster:
    """Keys and rosters of a cluster."""

    folder: Path
    ca: ClusterCA
    root_key: Ed25519Signer
    roster_key: Ed25519Signer
    root: RootMetadata
    version: int = 0
    previous: bytes = NO_PREVIOUS
    nodes: list[Party] = field(default_factory=list)

    def party(self, role: Role = Role.MEMBER) -> Party:
        key = ec.generate_private_key(ec.SECP256R1())
        signer = SoftwareSigner(key)
        return Party(key, signer, self.material(PeerIdentity(CLUSTER, role, member_id(signer.public_key))))

    def material(self, peer: PeerIdentity, *, age: float = 0) -> TlsMaterial:
        """A certificate for an hour, made `age` seconds ago."""
        leaf = LeafKey()
        issued = time.time() - age
        certificate = self.ca.issue(leaf.csr(), peer, lifetime=3600, now=issued, addresses=("127.0.0.1",))
        return TlsMaterial(leaf.private_pem(), certificate, (self.ca.certificate,))

    def roster(
        self,
        ring: Sequence[Party] = (),
        *,
        layers: int = 9,
        members: Sequence[Party] | None = None,
        gateways: Sequence[Party] = (),
        revoked: Sequence[Party] = (),
        model: str = "demo",
        digest: bytes = DIGEST,
        context: int = 512,
        deployments: Sequence[str] = ("demo",),
    ) -> tuple[bytes, Roster]:
        """The next version: one ring of each deployment, with the layers spread evenly."""
        now = int(time.time())
        self.version += 1
        edges = [layers * rank // len(ring) for rank in range(len(ring) + 1)] if ring else [0]
        places = tuple(
            RingMember(party.id, rank, (edges[rank], edges[rank + 1])) for rank, party in enumerate(ring)
        )
        rings = tuple(
            Ring(f"{one}-0", one, 0, model, digest, "pipeline", context, layers, bytes(32), 0, 0, places)
            for one in deployments
        )
        draft = Roster(
            cluster=CLUSTER,
            root_version=1,
            version=self.version,
            previous=self.previous,
            issued=now,
            expires=now + 600,
            suites=DEFAULT_SUITES,
            trust_floor=0,
            min_trust=0,
            members=tuple(map(_member, ring if members is None else members)),
            rings=rings if ring else (),
            gateways=tuple(Gateway(party.id, party.signer.public_key) for party in gateways),
            revoked=tuple(Revoked(party.id, party.signer.public_key, 1, now) for party in revoked),
        )
        envelope = sign_roster(complete_roster(draft), [self.roster_key])
        roster = check_roster(envelope, self.root, now=now)
        self.previous = roster.hash
        return envelope, roster

    def enrol(self, party: Party, folder: Path, coordinator: str, envelope: bytes) -> MachineState:
        """Writes what a join leaves behind."""
        peer = PeerIdentity(CLUSTER, Role.MEMBER, party.id)
        state = MachineState(peer, "node", coordinator, self.root.fingerprint, self.root, party.material)
        folder.mkdir(parents=True, exist_ok=True)
        RosterStateFile(folder / ROSTER_STATE).create(CLUSTER)
        write_atomic(folder / ROSTER, envelope)
        write_atomic(folder / IDENTITY_KEY, private_pem(party.key))
        save_machine_state(folder, state)
        return state


def _member(party: Party) -> RosterMember:
    return RosterMember(
        id=party.id,
        identity_key=party.signer.public_key,
        key_type=KeyType.SOFTWARE,
        sealing_key=bytes.fromhex(party.signer.public_key.hex()[2:66]),
        level=TrustLevel.SOFTWARE,
        trust=10,
        attestation_hash=bytes(32),
        enrolled=1,
        attested_at=0,
        challenged_at=0,
        manifest_hash=bytes(32),
        addresses=(party.address,),
    )


@pytest.fixture
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of models have the length PART of the test's module."""
    for module in ("manifest", "partial_model", "giving", "kept"):
        monkeypatch.setattr(f"sealring.node.models.{module}.PART", request.module.PART)


@pytest.fixture
def cluster(tmp_path: Path, create_cluster: Callable[[Path], Cluster]) -> Cluster:
    return create_cluster(tmp_path / "cluster")


@pytest.fixture(scope="session")
def create_cluster() -> Callable[[Path], Cluster]:
    return create


def create(folder: Path) -> Cluster:
    now = int(time.time())
    ca = ClusterCA.create(folder, CLUSTER, now=now)
    root_key, roster_key = Ed25519Signer.generate(), Ed25519Signer.generate()
    draft = RootMetadata(
        cluster=CLUSTER,
        version=1,
        root_keys=(root_key.public_key,),
        root_threshold=1,
        roster_keys=(roster_key.public_key,),
        roster_threshold=1,
        authorities=(ca.certificate,),
        issued=now,
        expires=now + 3600,
    )
    return Cluster(folder, ca, root_key, roster_key, sign_root(draft, [root_key]))
