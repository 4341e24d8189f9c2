"""Identity keys: P-256 everywhere, because that is what a Secure Enclave holds.

A public key is its uncompressed point (SEC 1 section 2.3.3, 65 bytes, first byte 4). A member's id is the
base32 of the SHA-256 of that, so an id cannot be paired with another key. ECDSA signatures are malleable:
nothing is ever keyed on signature bytes.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sealring.mesh.crypto.encoding import FormatError, decode_base32, encode_base32
from sealring.mesh.crypto.keys import KeyType, Label, signing_input
from sealring.mesh.errors import ConfigError, InvalidInput, Unauthenticated
from sealring.mesh.system.files import create_exclusive, read_secret

PUBLIC_KEY_BYTES = 65
SEALING_KEY_SIZES = (32, 1216)
"""Bytes of a public key that prompts are sealed to: X25519, or X-Wing."""
MAX_SIGNATURE_BYTES = 72
DERIVED = b"sealring/v1 derived secret"
"""What tells secrets that an identity key makes from everything else that it does."""

_ECDSA = ec.ECDSA(hashes.SHA256())


@runtime_checkable
class Signer(Protocol):
    """Something that holds an identity key and signs under a label; it never exports the key.

    `sign` may block for milliseconds (an enclave behind a helper process) and raises a SealringError when
    the key is unavailable.
    """

    @property
    def public_key(self) -> bytes:
        """The uncompressed point, 65 bytes."""

    @property
    def key_type(self) -> str:
        """A `KeyType`: where the key is kept."""

    def sign(self, label: Label, content: bytes) -> bytes:
        """A DER ECDSA signature (SHA-256) over `signing_input(label, content)`."""


class SoftwareSigner:
    """An identity key in a file with mode 0600, or in memory only. Says `software`, and means it."""

    key_type: str = KeyType.SOFTWARE

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        if not isinstance(key.curve, ec.SECP256R1):
            raise ConfigError("identity key is not on P-256", reason="BAD_IDENTITY_KEY")
        self._key = key
        self._public_key = encode_public_key(key.public_key())

    @classmethod
    def generate(cls) -> Self:
        """A fresh key that lives in this process only."""
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """The key in `path` (PKCS#8 PEM, 0600), created there first if there is none.

        Raises ConfigError (SECRET_FILE_UNSAFE, BAD_IDENTITY_KEY).
        """
        try:
            return cls.load(path)
        except FileNotFoundError:
            create_exclusive(path, private_pem(ec.generate_private_key(ec.SECP256R1())))
            return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The key in `path`. Raises FileNotFoundError and ConfigError."""
        try:
            key = serialization.load_pem_private_key(read_secret(path), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"identity key {path} is corrupt", reason="BAD_IDENTITY_KEY") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"identity key {path} is not on P-256", reason="BAD_IDENTITY_KEY")
        return cls(key)

    @property
    def public_key(self) -> bytes:
        """The uncompressed point, 65 bytes."""
        return self._public_key

    def sign(self, label: Label, content: bytes) -> bytes:
        """A DER ECDSA signature over `signing_input(label, content)`."""
        return self._key.sign(signing_input(label, content), _ECDSA)

    def derive(self, seed: bytes) -> bytes:
        """A secret of 32 bytes that only this key makes of `seed`: HKDF-SHA256 (RFC 5869) of the key."""
        scalar = self._key.private_numbers().private_value.to_bytes(32, "big")
        return HKDF(hashes.SHA256(), 32, salt=seed, info=DERIVED).derive(scalar)

    def __repr__(self) -> str:
        return f"SoftwareSigner({member_id(self._public_key)})"


def encode_public_key(key: ec.EllipticCurvePublicKey) -> bytes:
    """The uncompressed point of a P-256 key."""
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)


def load_public_key(public_key: bytes) -> ec.EllipticCurvePublicKey:
    """Decode an uncompressed P-256 point that is on the curve.

    Raises InvalidInput (BAD_PUBLIC_KEY) for any other length, form or point.
    """
    try:
        if len(public_key) != PUBLIC_KEY_BYTES or public_key[0] != 4:
            raise ValueError("not an uncompressed point")
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), public_key)
    except ValueError:
        raise InvalidInput("identity key is not a P-256 point", reason="BAD_PUBLIC_KEY") from None


@functools.lru_cache(maxsize=2048)
def member_id(public_key: bytes) -> str:
    """Lowercase base32 without padding of SHA-256 of the identity key, 52 characters.

    Remembered for as many keys as a roster may name, nearly all of which are in the next one too.

    Raises InvalidInput (BAD_PUBLIC_KEY) if it is not an identity key.
    """
    load_public_key(public_key)
    return encode_base32(hashlib.sha256(public_key).digest())


def check_member_id(identifier: str) -> str:
    """`identifier` if it has the form of a member id. Raises InvalidInput (BAD_MEMBER_ID)."""
    try:
        decode_base32(identifier, size=32)
    except FormatError:
        raise InvalidInput("member id is malformed", reason="BAD_MEMBER_ID") from None
    return identifier


def verify(public_key: bytes, label: Label, content: bytes, signature: bytes) -> None:
    """Check a strict-DER ECDSA signature by an identity key under `label`.

    Raises Unauthenticated (BAD_SIGNATURE), InvalidInput (BAD_PUBLIC_KEY).
    """
    verify_ecdsa(public_key, signing_input(label, content), signature)


def verify_ecdsa(public_key: bytes, message: bytes, signature: bytes) -> None:
    """The primitive of `verify`, over a message without a label: identity keys sign no such message.

    Raises Unauthenticated (BAD_SIGNATURE), InvalidInput (BAD_PUBLIC_KEY).
    """
    key = load_public_key(public_key)
    try:
        if len(signature) > MAX_SIGNATURE_BYTES or not _is_strict_der(signature):
            raise ValueError("not strict DER")
        key.verify(signature, message, _ECDSA)
    except (InvalidSignature, ValueError):
        raise Unauthenticated("signature does not verify", reason="BAD_SIGNATURE") from None


def _is_strict_der(signature: bytes) -> bool:
    return encode_dss_signature(*decode_dss_signature(signature)) == signature


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key as PKCS#8 PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
