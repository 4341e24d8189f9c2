"""A cluster of one test process: authority, identities, rosters, and Links services on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sealring.mesh.crypto import SoftwareSigner, member_id, private_pem
from sealring.mesh.member import IDENTITY_KEY, ROSTER, ROSTER_STATE, MachineState
from sealring.mesh.pki import PeerIdentity, Role, TlsMaterial
from sealring.mesh.roster import (
    NO_PREVIOUS,
    Gateway,
    Revoked,
    RingMember,
    Roster,
    RosterMember,
    RosterStateFile,
    check_roster,
)
from sealring.mesh.rpc import TlsStore
from sealring.mesh.system.files import write_atomic
from sealring.testing.authority import Authority, make_member, make_ring, make_roster

CLUSTER = "testbed"
DIGEST = bytes(range(32))


@dataclass
class Party:
    """One identity of the cluster."""

    peer: PeerIdentity
    key: ec.EllipticCurvePrivateKey
    signer: SoftwareSigner
    material: TlsMaterial
    address: str = "127.0.0.1:1"

    @property
    def id(self) -> str:
        return self.peer.id

    def store(self) -> TlsStore:
        return TlsStore(self.material)


@dataclass
class Cluster:
    """Keys and rosters of a cluster."""

    authority: Authority
    version: int = 0
    previous: bytes = NO_PREVIOUS
    nodes: list[Party] = field(default_factory=list)

    @property
    def coordinator(self) -> TlsMaterial:
        """What a coordinator has."""
        return self.material(PeerIdentity(CLUSTER, Role.COORDINATOR, "coordinator"))

    def party(self, role: Role = Role.MEMBER) -> Party:
        key = ec.generate_private_key(ec.SECP256R1())
        signer = SoftwareSigner(key)
        peer = PeerIdentity(CLUSTER, role, member_id(signer.public_key))
        return Party(peer, key, signer, self.material(peer))

    def material(self, peer: PeerIdentity, *, age: float = 0) -> TlsMaterial:
        """A certificate for an hour, made `age` seconds ago."""
        return self.authority.material(peer, now=time.time() - age)

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
        plan = {"total_layers": layers, "trust_floor": 0, "members": places}
        draft = make_roster(
            CLUSTER,
            [_member(party) for party in (ring if members is None else members)],
            [
                make_ring((), f"{one}-0", model=model, model_digest=digest, context=context, **plan)
                for one in (deployments if ring else ())
            ],
            now=now,
            version=self.version,
            previous=self.previous,
            trust_floor=0,
            gateways=tuple(Gateway(party.id, party.signer.public_key) for party in gateways),
            revoked=tuple(Revoked(party.id, party.signer.public_key, 1, now) for party in revoked),
        )
        envelope = self.authority.sign(draft)
        roster = check_roster(envelope, self.authority.root, now=now)
        self.previous = roster.hash
        return envelope, roster

    def enrol(self, party: Party, folder: Path, coordinator: str, envelope: bytes) -> MachineState:
        """Writes what a join leaves behind."""
        folder.mkdir(parents=True, exist_ok=True)
        RosterStateFile(folder / ROSTER_STATE).create(CLUSTER)
        write_atomic(folder / ROSTER, envelope)
        write_atomic(folder / IDENTITY_KEY, private_pem(party.key))
        return self.authority.enrol(folder, party.peer, party.material, name="node", coordinator=coordinator)


def _member(party: Party) -> RosterMember:
    sealing = party.signer.public_key[1:33]
    return make_member(party.signer, sealing_key=sealing, addresses=(party.address,))


@pytest.fixture
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of models have the length PART of the test's module."""
    for module in ("manifest", "partial_model", "giving", "kept"):
        monkeypatch.setattr(f"sealring.node.models.{module}.PART", request.module.PART)


@pytest.fixture
def cluster(create_cluster: Callable[[], Cluster]) -> Cluster:
    return create_cluster()


@pytest.fixture(scope="session")
def create_cluster() -> Callable[[], Cluster]:
    return lambda: Cluster(Authority.create(CLUSTER, now=time.time()))
