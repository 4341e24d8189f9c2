"""Signed envelopes (DSSE v1): verify the raw payload bytes against a threshold of keys, then parse.

The signature covers PAE(type, payload) and nothing else, so that any tool for DSSE verifies these files.
Signatures for one use cannot be shown for another: each use has a type, the PAE begins with it, and whoever
opens an envelope names the type that it takes. Keys are Ed25519; a key's id is the hex SHA-256 of it. Nothing
is ever encoded again in order to verify it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from sealring.mesh.crypto.encoding import (
    Fields,
    FormatError,
    canonical_json,
    parse_json_object,
)
from sealring.mesh.errors import ConfigError, RosterError
from sealring.mesh.system.files import create_exclusive, read_secret

KEY_BYTES = 32
SIGNATURE_BYTES = 64
_MAX_SIGNATURES = 32
_OVERHEAD_BYTES = 8192


class Ed25519Signer:
    """An Ed25519 key in a 0600 file (its 32-byte seed), or in memory only."""

    def __init__(self, seed: bytes) -> None:
        self._key = SigningKey(seed)

    @classmethod
    def generate(cls) -> Self:
        """A fresh key that lives in this process only."""
        return cls(bytes(SigningKey.generate()))

    @classmethod
    def create(cls, path: Path) -> Self:
        """A fresh key, stored in `path`. Raises ConfigError (KEY_EXISTS): a key is never overwritten."""
        seed = bytes(SigningKey.generate())
        if not create_exclusive(path, seed):
            raise ConfigError(f"key {path} exists already", reason="KEY_EXISTS", hint="name another file")
        return cls(seed)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The key in `path`. Raises FileNotFoundError, ConfigError (SECRET_FILE_UNSAFE, BAD_KEY)."""
        seed = read_secret(path, max_bytes=4096)
        if len(seed) != KEY_BYTES:
            raise ConfigError(f"key {path} is not a 32-byte seed", reason="BAD_KEY")
        return cls(seed)

    @property
    def public_key(self) -> bytes:
        """The 32-byte public key."""
        return bytes(self._key.verify_key)

    def sign(self, pae: bytes) -> bytes:
        """The 64-byte signature over an envelope's pre-authentication encoding (RFC 8032)."""
        return self._key.sign(pae).signature

    def __repr__(self) -> str:
        return f"Ed25519Signer({key_id(self.public_key)[:16]})"


@dataclass(frozen=True)
class SignedEnvelope:
    """An envelope that was taken apart and not yet verified."""

    payload_type: str
    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]

    @property
    def pae(self) -> bytes:
        """The pre-authentication encoding that is signed (DSSE protocol.md)."""
        return _pae(self.payload_type, self.payload)


def key_id(public_key: bytes) -> str:
    """The id of a signing key: hex SHA-256 of it."""
    return hashlib.sha256(public_key).hexdigest()


def verify_ed25519(public_key: bytes, content: bytes, signature: bytes) -> bool:
    """Whether `public_key` signed `content` (libsodium refuses weak, non-canonical points)."""
    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        VerifyKey(public_key).verify(content, signature)
    except BadSignatureError:
        return False
    return True


def sign_envelope(payload_type: str, payload: bytes, signers: Iterable[Ed25519Signer]) -> bytes:
    """Sign `payload` with every signer and wrap it. One signature per key, sorted by key id."""
    pae = _pae(payload_type, payload)
    signatures = {key_id(signer.public_key): signer.sign(pae) for signer in signers}
    return encode_envelope(SignedEnvelope(payload_type, payload, tuple(sorted(signatures.items()))))


def encode_envelope(envelope: SignedEnvelope) -> bytes:
    """An envelope as JSON."""
    return canonical_json(
        {
            "payload": envelope.payload,
            "payloadType": envelope.payload_type,
            "signatures": [{"keyid": name, "sig": sig} for name, sig in envelope.signatures],
        }
    )


def parse_envelope(
    data: bytes, *, payload_type: str, max_payload: int, min_signatures: int = 1
) -> SignedEnvelope:
    """Take an envelope apart without trusting anything in it.

    Raises RosterError (ENVELOPE_TOO_LARGE, ENVELOPE_MALFORMED, ENVELOPE_TYPE).
    """
    max_bytes = (max_payload + 2) // 3 * 4 + _OVERHEAD_BYTES
    if len(data) > max_bytes:
        raise RosterError("signed envelope is too large", reason="ENVELOPE_TOO_LARGE", limit=max_bytes)
    try:
        fields = Fields(
            parse_json_object(data, max_bytes=max_bytes), ("payload", "payloadType", "signatures")
        )
        stated = fields.text("payloadType")
        payload = fields.blob("payload", max_bytes=max_payload)
        signatures = tuple(
            _signature(Fields(item, ("keyid", "sig")))
            for item in fields.items("signatures", min_items=min_signatures, max_items=_MAX_SIGNATURES)
        )
    except FormatError as error:
        raise RosterError(f"signed envelope is malformed: {error}", reason="ENVELOPE_MALFORMED") from None
    if stated != payload_type:
        raise RosterError("signed envelope holds something else", reason="ENVELOPE_TYPE")
    return SignedEnvelope(stated, payload, signatures)


def check_threshold(envelope: SignedEnvelope, keys: Sequence[bytes], threshold: int) -> None:
    """Require valid signatures by at least `threshold` different keys of `keys` over the raw payload bytes.

    A signature under an unknown key id counts for nothing; a wrong one under a known id, or one key id twice,
    refuses the whole envelope. Raises RosterError (DUPLICATE_KEY_ID, BAD_SIGNATURE, THRESHOLD_NOT_MET).
    """
    names = [name for name, _ in envelope.signatures]
    if len(set(names)) != len(names):
        raise RosterError("a key signed more than once", reason="DUPLICATE_KEY_ID")
    known = {key_id(key): key for key in keys}
    valid = 0
    for name, signature in envelope.signatures:
        key = known.get(name)
        if key is None:
            continue
        if not verify_ed25519(key, envelope.pae, signature):
            raise RosterError("a signature does not verify", reason="BAD_SIGNATURE")
        valid += 1
    if threshold < 1 or valid < threshold:
        raise RosterError(
            "too few valid signatures",
            reason="THRESHOLD_NOT_MET",
            hint="it has to be signed by the keys that the root metadata names",
            valid=valid,
            threshold=threshold,
        )


def _signature(fields: Fields) -> tuple[str, bytes]:
    return fields.text("keyid", max_length=64), fields.binary("sig", sizes=(SIGNATURE_BYTES,))


def _pae(payload_type: str, payload: bytes) -> bytes:
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
