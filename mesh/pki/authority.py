"""The cluster's certificate authority: it issues leaves to machines that the coordinator has admitted.

The coordinator alone uses this. Only the key of a signing request reaches the certificate.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.crypto.identity import private_pem
from sealring.mesh.errors import AlreadyExists, CertificateError, ConfigError, InvalidInput
from sealring.mesh.names import check_name, is_label
from sealring.mesh.pki.certificates import (
    ROOT_EXTENSION,
    PeerIdentity,
    Role,
    role_server_name,
    to_pem,
)
from sealring.mesh.system.files import create_exclusive, read_bounded, read_secret, write_atomic

MAX_CSR_BYTES = 4096
_MAX_LIFETIME_SECONDS = 30 * 24 * 3600
_CA_LIFETIME_SECONDS = 10 * 365 * 24 * 3600
_OTHER_USES = (
    *("content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "encipher_only", "decipher_only"),
)


class ClusterCA:
    """The certificate authority of one cluster."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def create(cls, folder: Path, cluster: str, *, now: float) -> Self:
        """Make a new authority in `folder` (`ca.key` with mode 0600, `ca.pem`).

        Raises AlreadyExists (CA_EXISTS), InvalidInput (BAD_NAME).
        """
        check_name(cluster, "cluster")
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _self_signed(key, _name(key, cluster), _time(now - SKEW_SECONDS), now)
        if not create_exclusive(folder / "ca.key", private_pem(key)):
            raise AlreadyExists("certificate authority exists already", reason="CA_EXISTS")
        write_atomic(
            folder / "ca.pem", to_pem(certificate.public_bytes(serialization.Encoding.DER)), mode=0o644
        )
        return cls(key, certificate)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the authority from `folder`. Raises FileNotFoundError, ConfigError (BAD_CA)."""
        try:
            key = serialization.load_pem_private_key(read_secret(folder / "ca.key"), password=None)
            certificate = x509.load_pem_x509_certificate(read_bounded(folder / "ca.pem"))
        except ValueError as error:
            raise ConfigError(f"certificate authority in {folder} is corrupt", reason="BAD_CA") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"certificate authority in {folder} has another key", reason="BAD_CA")
        return cls(key, certificate)

    def extended(self, authorities: Iterable[bytes], *, now: float) -> tuple[bytes, ...]:
        """The certificates (DER), with this authority's own replaced by one that ends ten years from now.

        It has the same key and name, so each of the two verifies certificates issued under the other. It
        begins when the old one did, so one made under a wrong clock is good once the clock is right.
        """
        old = self._certificate
        new = _self_signed(self._key, old.subject, old.not_valid_before_utc, now)
        der = new.public_bytes(serialization.Encoding.DER)
        return tuple(der if one == self.certificate else one for one in authorities)

    def named_in(self, authorities: Iterable[bytes]) -> Self | None:
        """This authority with the certificate (DER) out of these that has its key; None without one."""
        found = map(x509.load_der_x509_certificate, authorities)
        own = self._key.public_key()
        return next((type(self)(self._key, one) for one in found if one.public_key() == own), None)

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate, DER."""
        return self._certificate.public_bytes(serialization.Encoding.DER)

    def issue(
        self,
        csr: bytes,
        peer: PeerIdentity,
        *,
        lifetime: float,
        now: float,
        addresses: Iterable[str] = (),
        root_chain: bytes | None = None,
    ) -> bytes:
        """A DER leaf for the key in `csr`, valid for `lifetime` seconds (at most 30 days).

        `addresses` are further DNS names or IP addresses; `root_chain` goes into `ROOT_EXTENSION`.
        Raises CertificateError (BAD_CSR), InvalidInput (BAD_LIFETIME, BAD_NAME).
        """
        if not 1 <= lifetime <= _MAX_LIFETIME_SECONDS:
            raise InvalidInput("certificate lifetime is out of bounds", reason="BAD_LIFETIME")
        own = self._certificate
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        lasts = _time(now - SKEW_SECONDS), _time(now + lifetime)
        builder = (
            unsigned(x509.Name([]), _csr_key(csr), own.subject, own.public_key(), lasts)
            .add_extension(x509.SubjectAlternativeName(_alternative_names(peer, addresses)), critical=True)
            .add_extension(usage, critical=False)
        )
        if root_chain is not None:
            builder = builder.add_extension(
                x509.UnrecognizedExtension(ROOT_EXTENSION, root_chain), critical=False
            )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def _csr_key(csr: bytes) -> ec.EllipticCurvePublicKey:
    try:
        if len(csr) > MAX_CSR_BYTES:
            raise ValueError("too large")
        request = x509.load_der_x509_csr(csr)
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("not P-256")
        if not request.is_signature_valid:
            raise ValueError("not signed by its key")
    except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm):
        raise CertificateError("signing request is malformed", reason="BAD_CSR") from None
    return key


def _alternative_names(peer: PeerIdentity, addresses: Iterable[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(peer.uri),
        x509.DNSName(peer.server_name),
    ]
    if peer.role in (Role.COORDINATOR, Role.GATEWAY):
        names.append(x509.DNSName(role_server_name(peer.role)))
    for address in dict.fromkeys(addresses):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            names.append(x509.DNSName(_outside_name(address.lower())))
    return names


def _outside_name(name: str) -> str:
    labels = name.split(".")
    if (
        len(name) > 253
        or not all(is_label(label) for label in labels)
        or labels[-2:] == ["sealring", "internal"]
    ):
        raise InvalidInput(
            "address is neither an IP address nor a DNS name", reason="BAD_NAME", param="addresses"
        )
    return name


def unsigned(
    subject: x509.Name,
    key: Any,
    issuer: x509.Name,
    issuer_key: Any,
    lasts: tuple[datetime.datetime, datetime.datetime],
    signs: int | None = None,
) -> x509.CertificateBuilder:
    """A certificate of a public key, to be signed by the issuer's. `signs` is how many certificates deep it
    signs others; None: none."""
    signing = signs is not None
    usage = dict.fromkeys(_OTHER_USES, False) | dict.fromkeys(("key_cert_sign", "crl_sign"), signing)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(lasts[0])
        .not_valid_after(lasts[1])
        .add_extension(x509.BasicConstraints(ca=signing, path_length=signs), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=not signing, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _name(key: ec.EllipticCurvePrivateKey, cluster: str) -> x509.Name:
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, f"sealring {cluster}"),
            x509.NameAttribute(NameOID.COMMON_NAME, identifier.digest.hex()[:16]),
        ]
    )


def _self_signed(
    key: ec.EllipticCurvePrivateKey, name: x509.Name, start: datetime.datetime, now: float
) -> x509.Certificate:
    public, lasts = key.public_key(), (start, _time(now + _CA_LIFETIME_SECONDS))
    return unsigned(name, public, name, public, lasts, 0).sign(key, hashes.SHA256())


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), tz=datetime.UTC)
