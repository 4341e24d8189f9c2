"""A cluster's authority, as operators meet it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sealring.mesh.crypto.dsse import Ed25519Signer
from sealring.mesh.member.state import MachineState, save_machine_state
from sealring.mesh.pki.authority import ClusterCA
from sealring.mesh.pki.certificates import LeafKey, PeerIdentity, Role, TlsMaterial, to_pem
from sealring.mesh.pki.root import RootMetadata, encode_chain, sign_root


class SigningCluster:
    """A coordinator that signs what operators ask for, and the bundle of its first operator."""

    address = "coordinator:1"

    def __init__(self, folder: Path) -> None:
        now = int(time.time())
        self.ca = ClusterCA.create(folder / "ca", "demo", now=now)
        signer = Ed25519Signer.generate()
        roots, rosters = ((one.public_key,) for one in (signer, Ed25519Signer.generate()))
        authorities = (self.ca.certificate,)
        times = {"issued": now - 60, "expires": now + 86400}
        self.root = sign_root(RootMetadata("demo", 1, roots, 1, rosters, 1, authorities, **times), [signer])
        self.bundle = folder / "bundle"
        self.save(self.bundle, Role.OPERATOR)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def save(self, folder: Path, role: Role) -> None:
        """An enrolment of that role, with a certificate for an hour."""
        leaf, peer = LeafKey(), PeerIdentity("demo", role, "operator")
        material = TlsMaterial(leaf.private_pem(), self.issue(leaf.csr(), peer), self.root.authorities)
        state = MachineState(peer, "operator", self.address, self.root.fingerprint, self.root, material)
        save_machine_state(folder, state)

    def issue(self, csr: bytes, peer: PeerIdentity) -> bytes:
        return self.ca.issue(csr, peer, lifetime=3600, now=time.time())

    async def call(self, method: str, *, csr: bytes, **fields: Any) -> Any:
        self.asked.append((method, fields))
        chain = to_pem(self.issue(csr, PeerIdentity("demo", Role.OPERATOR, fields["name"])))
        return SimpleNamespace(certificate_chain=chain, root_metadata=encode_chain(self.root.chain))
