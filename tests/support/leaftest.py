"""Certificates that an authority issues in the tests of the cluster's certificates."""

from __future__ import annotations

from cryptography import x509

from sealring.mesh.clock import wall_clock
from sealring.mesh.pki import ClusterCA, LeafKey, PeerIdentity, Role, TlsMaterial, load_certificate

NOW = 1_800_000_000
MEMBER = PeerIdentity("demo", Role.MEMBER, "node-a")


def issue(ca: ClusterCA, peer: PeerIdentity = MEMBER, **options: object) -> bytes:
    arguments = {"lifetime": 3600, "now": NOW, **options}
    return ca.issue(LeafKey().csr(), peer, **arguments)  # type: ignore[arg-type]


def material(ca: ClusterCA, peer: PeerIdentity = MEMBER, **options: object) -> TlsMaterial:
    """A new key with a certificate by this authority, by default valid for an hour from now."""
    leaf = LeafKey()
    arguments = {"lifetime": 3600, "now": wall_clock(), **options}
    return TlsMaterial(leaf.private_pem(), ca.issue(leaf.csr(), peer, **arguments), (ca.certificate,))  # type: ignore[arg-type]


def names(der: bytes, kind: type[x509.GeneralName]) -> list[object]:
    extension = load_certificate(der).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return list(extension.value.get_values_for_type(kind))  # type: ignore[arg-type]
