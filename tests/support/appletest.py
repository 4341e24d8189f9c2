"""A Mac with all its protections, and a certificate authority that attests devices as Apple's does."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from sealring.mesh.trust import apple as device
from sealring.mesh.trust.attestation import Posture

SERIAL = "C02TEST12345"

GOOD = Posture(
    hardware_model="Mac16,8",
    chip="Apple M4 Pro",
    os_version="26.1",
    boot_session="ABC",
    sip=True,
    secure_boot=True,
    authenticated_root=True,
    filevault=True,
)
"""Properties of a Mac that has all its protections on; the serial number only if it is asked for."""


class DeviceAuthority:
    """A root, an intermediate below it, and leaves with Apple's object identifiers."""

    def __init__(self, now: float, *, days: int = 365) -> None:
        self.now = datetime.datetime.fromtimestamp(int(now), tz=datetime.UTC)
        self.days = days
        self.root_key = ec.generate_private_key(ec.SECP384R1())
        self.key = ec.generate_private_key(ec.SECP384R1())
        root = self.certificate("root", "root", self.root_key, self.root_key, ca=True)
        self.root = root.public_bytes(Encoding.DER)
        self.intermediate = self.certificate("sub", "root", self.key, self.root_key, ca=True, path_length=0)

    def chain(
        self, identity_key: bytes, extensions: Mapping[str, bytes | None] | None = None
    ) -> tuple[bytes, ...]:
        """Leaf and intermediate for one identity key; `extensions` replace (or with None leave out) some.

        Integers are in DER, as Apple's are, and texts bare.
        """
        values: dict[str, bytes | None] = {
            device.SERIAL: SERIAL.encode(),
            device.FRESHNESS: device.device_nonce(identity_key),
            device.SIP_STATUS: b"\x02\x01\x00",
            device.SECURE_BOOT_STATUS: b"Full Security",
            device.KERNEL_EXTENSIONS: b"\x02\x01\x00",
            **(extensions or {}),
        }
        leaf_key = ec.generate_private_key(ec.SECP256R1())
        known = {oid: value for oid, value in values.items() if value is not None}
        leaf = self.certificate("device", "sub", leaf_key, self.key, ca=False, extensions=known)
        return (leaf.public_bytes(Encoding.DER), self.intermediate.public_bytes(Encoding.DER))

    def certificate(
        self,
        subject: str,
        issuer: str,
        key: ec.EllipticCurvePrivateKey,
        signer: ec.EllipticCurvePrivateKey,
        *,
        ca: bool,
        path_length: int | None = None,
        extensions: Mapping[str, bytes] | None = None,
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - datetime.timedelta(days=1))
            .not_valid_after(self.now + datetime.timedelta(days=self.days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=path_length), critical=True)
        )
        if ca:
            builder = builder.add_extension(_SIGNS, critical=True)
        for oid, value in (extensions or {}).items():
            unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value)
            builder = builder.add_extension(unknown, critical=False)
        return builder.sign(signer, hashes.SHA384())


_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Test Attestation {text}")])
