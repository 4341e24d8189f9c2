"""A cluster's authority, as operators meet it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sealring.mesh.pki import PeerIdentity, Role, encode_chain, to_pem
from sealring.testing.authority import Authority


class SigningCluster:
    """A coordinator that signs what operators ask for, and the bundle of its first operator."""

    address = "coordinator:1"
    ahead = 0.0
    """Seconds by which its clock is ahead when it issues certificates."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.create("demo", now=time.time())
        self.bundle = folder / "bundle"
        self.save(self.bundle, Role.OPERATOR)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def save(self, folder: Path, role: Role) -> None:
        """An enrolment of that role, with a certificate for an hour."""
        peer = PeerIdentity("demo", role, "operator")
        material = self.authority.material(peer, now=time.time() + self.ahead)
        self.authority.enrol(folder, peer, material, name="operator", coordinator=self.address)

    async def call(self, method: str, *, csr: bytes, **fields: Any) -> Any:
        self.asked.append((method, fields))
        peer = PeerIdentity("demo", Role.OPERATOR, fields["name"])
        chain = to_pem(self.authority.ca.issue(csr, peer, lifetime=3600, now=time.time()))
        root = encode_chain(self.authority.root.chain)
        return SimpleNamespace(certificate_chain=chain, root_metadata=root)
