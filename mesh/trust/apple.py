"""Apple's managed device attestation: a certificate chain that names the Mac of a member's identity key.

Apple issues it through the owner's device management (DeviceInformation with DeviceAttestationNonce, "Managed
Device Attestation" in Apple's Platform Deployment guide). The owner requests it with the nonce
`device_nonce(identity key)`, and Apple puts this into the leaf. A chain is therefore good for one identity
key only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.errors import AttestationError

MAX_CHAIN = 4
MAX_CERTIFICATE_BYTES = 4096

APPLE_ROOT = base64.b64decode(
    "MIICJDCCAamgAwIBAgIUQsDCuyxyfFxeq/bxpm8frF15hzcwCgYIKoZIzj0EAwMwUTEtMCsGA1UEAwwkQXBwbGUgRW50ZXJwcmlz"
    "ZSBBdHRlc3RhdGlvbiBSb290IENBMRMwEQYDVQQKDApBcHBsZSBJbmMuMQswCQYDVQQGEwJVUzAeFw0yMjAyMTYxOTAxMjRaFw00"
    "NzAyMjAwMDAwMDBaMFExLTArBgNVBAMMJEFwcGxlIEVudGVycHJpc2UgQXR0ZXN0YXRpb24gUm9vdCBDQTETMBEGA1UECgwKQXBw"
    "bGUgSW5jLjELMAkGA1UEBhMCVVMwdjAQBgcqhkjOPQIBBgUrgQQAIgNiAAT6Jigq+Ps9Q4CoT8t8q+UnOe2poT9nRaUfGhBTbgvq"
    "SGXPjVkbYlIWYO+1zPk2Sz9hQ5ozzmLrPmTBgEWRcHjA2/y77GEicps9wn2tj+G89l3INNDKETdxSPPIZpPj8VmjQjBAMA8GA1Ud"
    "EwEB/wQFMAMBAf8wHQYDVR0OBBYEFPNqTQGd8muBpV5du+UIbVbi+d66MA4GA1UdDwEB/wQEAwIBBjAKBggqhkjOPQQDAwNpADBm"
    "AjEA1xpWmTLSpr1VH4f8Ypk8f3jMUKYz4QPG8mL58m9sX/b2+eXpTv2pH4RZgJjucnbcAjEA4ZSB6S45FlPuS/u4pTnzoz632rA+"
    "xW/TZwFEh9bhKjJ+5VQ9/Do1os0u3LEkgN/r"
)
"""Apple Enterprise Attestation Root CA (DER), which apple.com/certificateauthority publishes."""

_ARC = "1.2.840.113635.100.8"
SERIAL = f"{_ARC}.9.1"
FRESHNESS = f"{_ARC}.11.1"
SIP_STATUS, SECURE_BOOT_STATUS, KERNEL_EXTENSIONS = f"{_ARC}.13.1", f"{_ARC}.13.2", f"{_ARC}.13.3"
_UTF8_STRING, _OCTET_STRING, _ZERO = 0x0C, 0x04, b"\x02\x01\x00"
FULL_SECURITY = "Full Security"
_MAX_TEXT = 64


@dataclass(frozen=True)
class Device:
    """The Mac that a verified chain names."""

    serial: str


def device_nonce(identity_key: bytes) -> bytes:
    """The DeviceAttestationNonce to ask for, which comes back in the leaf: 32 bytes for one identity key."""
    return hashlib.sha256(b"sealring/v1 device\x00" + identity_key).digest()


def verify_device(
    chain: Sequence[bytes],
    identity_key: bytes,
    *,
    now: float,
    root: bytes = APPLE_ROOT,
    serials: Collection[str] = (),
) -> Device:
    """The device behind a chain (DER, leaf first, without the root) that was made for this identity key.

    `serials` are those of the Macs that count, where not all of them do. Raises AttestationError
    (DEVICE_CHAIN, DEVICE_FRESHNESS, DEVICE_POSTURE, DEVICE_NOT_ALLOWED).
    """
    certificates = load_chain(chain)
    check_chain([*certificates, load_certificate(root)], now)
    leaf = certificates[0]
    freshness = extension_value(leaf, FRESHNESS)
    if freshness is None or not hmac.compare_digest(
        unwrap(freshness, _OCTET_STRING), device_nonce(identity_key)
    ):
        raise AttestationError(
            "device attestation was not made for this identity key",
            hint="ask for one with the nonce of this identity",
            reason="DEVICE_FRESHNESS",
        )
    if not _is_protected(leaf):
        raise AttestationError(
            "device attestation does not say that the machine is protected",
            hint="it takes macOS 14.2, System Integrity Protection, Full Security at startup and no kernel "
            "extensions of others; Apple may answer with what it attested up to 7 days ago",
            reason="DEVICE_POSTURE",
        )
    serial = _text(leaf, SERIAL)
    if serial is None:
        raise _bad_chain("it names no serial number")
    if serials and serial not in serials:
        raise AttestationError(
            "device attestation is of a Mac that this cluster does not allow",
            hint="add its serial number to the coordinator's allowed_serials",
            reason="DEVICE_NOT_ALLOWED",
        )
    return Device(serial)


def _is_protected(leaf: x509.Certificate) -> bool:
    """Whether Apple measured that System Integrity Protection is on (0), startup is of full security, and
    kernel extensions of others are not allowed (0). What is not there was not measured.

    "DevicePropertiesAttestation" in Apple's Device Management reference; since macOS 14.2.
    """
    integers = all(extension_value(leaf, oid) == _ZERO for oid in (SIP_STATUS, KERNEL_EXTENSIONS))
    return integers and _text(leaf, SECURE_BOOT_STATUS) == FULL_SECURITY


def load_chain(chain: Sequence[bytes]) -> list[x509.Certificate]:
    """The certificates (DER, leaf first). Raises AttestationError (DEVICE_CHAIN)."""
    if not 1 <= len(chain) <= MAX_CHAIN or any(len(der) > MAX_CERTIFICATE_BYTES for der in chain):
        raise _bad_chain("it is empty or too long")
    return [load_certificate(der) for der in chain]


def load_certificate(der: bytes) -> x509.Certificate:
    """A certificate. Raises AttestationError (DEVICE_CHAIN)."""
    try:
        return x509.load_der_x509_certificate(der)
    except (ValueError, x509.InvalidVersion):
        raise _bad_chain("a certificate is malformed") from None


def check_chain(certificates: list[x509.Certificate], now: float) -> None:
    """Each is signed by the next, every issuer is an authority and the leaf is none; all are valid now.

    Raises AttestationError (DEVICE_CHAIN).
    """
    try:
        for depth, certificate in enumerate(certificates):
            start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            if not start.timestamp() - SKEW_SECONDS <= now <= end.timestamp():
                raise _bad_chain("a certificate is not valid now")
            if depth + 1 < len(certificates):
                certificate.verify_directly_issued_by(certificates[depth + 1])
            if _is_authority(certificate, below=max(0, depth - 1)) != (depth > 0):
                raise _bad_chain("an issuer is no authority, or the leaf is one")
    except (InvalidSignature, UnsupportedAlgorithm, x509.DuplicateExtension, ValueError, TypeError):
        raise _bad_chain("it does not lead to the pinned root") from None


def _is_authority(certificate: x509.Certificate, *, below: int) -> bool:
    """Whether it says so. Raises AttestationError if it does and may not have `below` authorities below it.

    RFC 5280 sections 4.2.1.3 and 4.2.1.9.
    """
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        return False
    if not constraints.ca:
        return False
    try:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        raise _bad_chain("an authority may not sign certificates") from None
    if not usage.key_cert_sign or (constraints.path_length is not None and below > constraints.path_length):
        raise _bad_chain("an authority signed what it may not")
    return True


def extension_value(leaf: x509.Certificate, oid: str) -> bytes | None:
    """The content of an extension that is not X.509's own; None without it."""
    for extension in _unrecognized(leaf.extensions):
        if extension.oid.dotted_string == oid:
            return extension.value
    return None


def _unrecognized(extensions: x509.Extensions) -> Iterable[x509.UnrecognizedExtension]:
    return (one.value for one in extensions if isinstance(one.value, x509.UnrecognizedExtension))


def _text(leaf: x509.Certificate, oid: str) -> str | None:
    """An extension's text: printable ASCII, bare or as a UTF8String; Apple has used both."""
    value = extension_value(leaf, oid)
    if value is None:
        return None
    raw = unwrap(value, _UTF8_STRING)
    if not 0 < len(raw) <= _MAX_TEXT or not raw.isascii() or not raw.decode("ascii").isprintable():
        raise _bad_chain("a device property is malformed")
    return raw.decode("ascii")


def unwrap(value: bytes, tag: int) -> bytes:
    """The content of a short DER value with this tag; any other value unchanged."""
    if len(value) >= 2 and value[0] == tag and value[1] < 0x80 and value[1] == len(value) - 2:
        return value[2:]
    return value


def _bad_chain(why: str) -> AttestationError:
    return AttestationError(f"device attestation is refused: {why}", reason="DEVICE_CHAIN")
