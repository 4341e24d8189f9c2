"""The cluster's certificates: short-lived P-256 leaves that name a role and an id.

A leaf names its holder by one SPIFFE-style URI, `spiffe://<cluster>/<role>/<id>`, and by a fixed DNS name,
`<id>.<role>.sealring.internal`. Clients demand this name instead of the address, so addresses may change and
no member can pose as another. `authority.py` issues them.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.crypto.identity import private_pem
from sealring.mesh.errors import CertificateError, InvalidInput
from sealring.mesh.names import check_name
from sealring.v1 import membership_pb2

ROOT_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.59999.7283.1")
"""Private OID: the chain of root metadata envelopes in the coordinator's leaf (see
`mesh/member/bootstrap.py`)."""

MAX_CERTIFICATE_BYTES = 1 << 17
_URI = re.compile(r"spiffe://([a-z0-9-]{1,63})/([a-z]{1,16})/([a-z0-9-]{1,63})\Z")


class Role(enum.StrEnum):
    """The role of a certificate's holder in its cluster."""

    COORDINATOR = "coordinator"
    MEMBER = "member"
    GATEWAY = "gateway"
    OPERATOR = "operator"
    CLIENT = "client"
    """A member's programs: they ask gateways, and look at the cluster. It has the member's id."""


PROTO_ROLES = {Role.MEMBER: membership_pb2.ROLE_NODE, Role.GATEWAY: membership_pb2.ROLE_GATEWAY}
"""The protocol's numbers of the roles with which machines join."""

ROLES: dict[int, Role] = {number: role for role, number in PROTO_ROLES.items()}


@dataclass(frozen=True)
class PeerIdentity:
    """The holder of a certificate: cluster, role and id."""

    cluster: str
    role: Role
    id: str

    def __post_init__(self) -> None:
        check_name(self.cluster, "cluster")
        check_name(self.id, "id")

    @property
    def uri(self) -> str:
        """The URI SAN that names this peer."""
        return f"spiffe://{self.cluster}/{self.role}/{self.id}"

    @property
    def server_name(self) -> str:
        """The DNS SAN that a client demands of exactly this peer."""
        return f"{self.id}.{self.role}.sealring.internal"

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Read a URI SAN. Raises CertificateError (BAD_PEER_URI)."""
        match = _URI.match(uri)
        if match is None or match[2] not in set(Role):
            raise CertificateError("certificate names no peer of a cluster", reason="BAD_PEER_URI")
        try:
            return cls(match[1], Role(match[2]), match[3])
        except InvalidInput:
            raise CertificateError("certificate names no peer of a cluster", reason="BAD_PEER_URI") from None


def role_server_name(role: Role) -> str:
    """The DNS SAN of every coordinator or every gateway of the cluster; members have none."""
    return f"{role}.sealring.internal"


@dataclass(frozen=True)
class TlsMaterial:
    """A leaf key (PEM), its certificate (DER) and the authorities to trust (DER)."""

    private_key: bytes
    certificate: bytes
    authorities: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"TlsMaterial(expires={expires_at(self.certificate):.0f})"


class LeafKey:
    """A fresh P-256 key for one certificate, and the signing request for it."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    def csr(self) -> bytes:
        """A DER signing request that asks for nothing and proves possession of the key (RFC 2986)."""
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        return request.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)

    def private_pem(self) -> bytes:
        """The key as PKCS#8 PEM, for a TLS library."""
        return private_pem(self._key)

    def is_in(self, certificate: x509.Certificate) -> bool:
        """Whether the certificate is for this key."""
        return certificate.public_key() == self._key.public_key()


def load_certificate(der: bytes) -> x509.Certificate:
    """Parse one DER certificate of bounded size. Raises CertificateError (BAD_CERTIFICATE)."""
    try:
        if len(der) > MAX_CERTIFICATE_BYTES:
            raise ValueError("too large")
        return x509.load_der_x509_certificate(der)
    except (ValueError, x509.InvalidVersion):
        raise CertificateError("certificate is malformed", reason="BAD_CERTIFICATE") from None


def certificate_peer(certificate: x509.Certificate) -> PeerIdentity:
    """The peer named by the one URI SAN of a leaf. Raises CertificateError (BAD_PEER_URI)."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        raise CertificateError("certificate has not one peer URI", reason="BAD_PEER_URI") from None
    return PeerIdentity.parse(uri)


def check_issued_by(leaf: x509.Certificate, authorities: Iterable[bytes], *, now: float) -> PeerIdentity:
    """Check that one of the `authorities` (DER) issued `leaf`, and that both are valid now.

    Returns the peer that the leaf names. Raises CertificateError (NOT_ISSUED_HERE, CERTIFICATE_EXPIRED,
    BAD_PEER_URI, BAD_CERTIFICATE).
    """
    for der in authorities:
        authority = load_certificate(der)
        try:
            leaf.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
            continue
        if not (_valid_at(leaf, now) and _valid_at(authority, now)):
            raise CertificateError(
                "certificate is not valid now",
                reason="CERTIFICATE_EXPIRED",
                hint="compare the clocks of both machines",
            )
        return certificate_peer(leaf)
    raise CertificateError("certificate was not issued by this cluster", reason="NOT_ISSUED_HERE")


def renewal_due(certificate: bytes) -> float:
    """Half of a DER certificate's life, in seconds since 1970 (it begins without the skew allowance)."""
    parsed = load_certificate(certificate)
    end = parsed.not_valid_after_utc.timestamp()
    start = parsed.not_valid_before_utc.timestamp() + SKEW_SECONDS
    return start + (end - start) / 2


def valid_at(certificate: bytes, now: float) -> bool:
    """Whether a DER certificate is valid at `now`, in seconds since 1970. One that was issued while clocks
    were ahead is not yet."""
    return load_certificate(certificate).not_valid_before_utc.timestamp() <= now < expires_at(certificate)


def is_due(certificate: bytes, now: float) -> bool:
    """Whether another one should take a DER certificate's place: past half of its life, or not yet valid."""
    return now >= renewal_due(certificate) or not valid_at(certificate, now)


def expires_at(certificate: bytes) -> float:
    """When a DER certificate ends, in seconds since 1970."""
    return load_certificate(certificate).not_valid_after_utc.timestamp()


def key_hash(certificate: bytes) -> bytes:
    """SHA-256 of the SubjectPublicKeyInfo of a DER certificate's key (RFC 5280 section 4.1), 32 bytes."""
    key = load_certificate(certificate).public_key()
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).digest()


def to_pem(*certificates: bytes) -> bytes:
    """DER certificates as one PEM bundle."""
    return b"".join(load_certificate(der).public_bytes(serialization.Encoding.PEM) for der in certificates)


def _valid_at(certificate: x509.Certificate, now: float) -> bool:
    start = certificate.not_valid_before_utc.timestamp() - SKEW_SECONDS
    return start <= now <= certificate.not_valid_after_utc.timestamp() + SKEW_SECONDS
