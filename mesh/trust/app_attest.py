"""App Attest: Apple's word that a signed application on a genuine device made a key ("Validating apps that
connect to your server" in Apple's DeviceCheck documentation).

An enclave helper could be such an application. Its attestation, with the identity key in the hash that Apple
signs, would show that the key lies in the enclave of that Mac. **Nothing uses this yet.** There is no such
helper. macOS has App Attest from version 27 on. No level of trust follows from it (decision 71), and it was
never run against an attestation of Apple's.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

from cryptography.hazmat.primitives.asymmetric import ec

from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.crypto.identity import encode_public_key
from sealring.mesh.errors import AttestationError
from sealring.mesh.trust.apple import check_chain, extension_value, load_certificate, load_chain

MAX_ATTESTATION_BYTES = 16 << 10
NONCE = "1.2.840.113635.100.8.2"
"""Object identifier of the extension of the leaf that holds the nonce."""

PRODUCTION, DEVELOPMENT = b"appattest" + bytes(7), b"appattestdevelop"
"""Identifiers of the authenticator (aaguid) of App Attest's two environments."""

_CLIENT = b"sealring/v1 app attest"
_FORMAT = "apple-appattest"
_HASH_BYTES = 32
_WRAPPING = b"\x30\x24\xa1\x22\x04\x20"
"""SEQUENCE { [1] { OCTET STRING of 32 bytes } } in DER, before the bytes."""

_AUTHENTICATOR = struct.Struct(">32sBI16sH")
"""Web Authentication section 6.1: hash of the application's id, flags, counter, aaguid, length of the
credential's id, which follows."""

_MAX_DEPTH = 4
_MAX_ITEMS = 16


@dataclass(frozen=True)
class AttestedApp:
    """A verified attestation: the key that the application made, 65 bytes."""

    key: bytes


def client_data_hash(identity_key: bytes, nonce: bytes) -> bytes:
    """The hash that the application attests: of the identity key and the coordinator's nonce, 32 bytes."""
    return hashlib.sha256(pack_fields(_CLIENT, identity_key, nonce)).digest()


def verify_app(
    attestation: bytes, *, identity_key: bytes, nonce: bytes, app_id: str, root: bytes, now: float
) -> AttestedApp:
    """Checks the attestation object of an application (CBOR) for one identity key and one nonce.

    `app_id` is the team's identifier, a dot and the bundle's. `root` is Apple's App Attestation root, DER: it
    is no part of sealring. Raises AttestationError (APP_MALFORMED, DEVICE_CHAIN, APP_FRESHNESS, APP_KEY,
    APP_OTHER, APP_ENVIRONMENT).
    """
    statement, data = _parts(attestation)
    chain = statement.get("x5c")
    if not isinstance(chain, list) or not all(isinstance(one, bytes) for one in chain):
        _refuse("it has no certificates")
    certificates = load_chain(chain)
    check_chain([*certificates, load_certificate(root)], now)
    leaf = certificates[0]
    expected = hashlib.sha256(data + client_data_hash(identity_key, nonce)).digest()
    found = extension_value(leaf, NONCE)
    if found is None or not hmac.compare_digest(found, _WRAPPING + expected):
        raise AttestationError("it was not made for this key and nonce", reason="APP_FRESHNESS")
    public = leaf.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise AttestationError("it is of a key of another kind", reason="APP_KEY")
    key = encode_public_key(public)
    named = hashlib.sha256(key).digest()
    application, _, counter, environment, length = _AUTHENTICATOR.unpack_from(data)
    identifier = data[_AUTHENTICATOR.size :][:length]
    if length != _HASH_BYTES or not hmac.compare_digest(identifier, named):
        raise AttestationError("it names another key than its certificate", reason="APP_KEY")
    if not hmac.compare_digest(application, hashlib.sha256(app_id.encode()).digest()):
        raise AttestationError("it is of another application", reason="APP_OTHER")
    if environment != PRODUCTION:
        raise AttestationError("it is not of App Attest's production environment", reason="APP_ENVIRONMENT")
    if counter:
        raise AttestationError("the key was used before it was attested", reason="APP_KEY")
    return AttestedApp(key)


def _parts(attestation: bytes) -> tuple[dict[str, Any], bytes]:
    """The statement and the authenticator's data of an attestation object."""
    if len(attestation) > MAX_ATTESTATION_BYTES:
        _refuse("it is too long")
    value, end = _item(attestation, 0, 0)
    if end != len(attestation) or not isinstance(value, dict):
        _refuse("bytes follow it, or it is no map")
    statement, data = value.get("attStmt"), value.get("authData")
    if value.get("fmt") != _FORMAT or not isinstance(statement, dict) or not isinstance(data, bytes):
        _refuse("it is of another form")
    if len(data) < _AUTHENTICATOR.size:
        _refuse("the authenticator's data is too short")
    return statement, data


def _item(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """One item of CBOR (RFC 8949) and the place behind it.

    It may be bytes, a text, a list or a map, of definite length and with its head in the shortest form.
    """
    kind, length, at = _head(data, at)
    if kind in (2, 3):
        content = data[at : at + length]
        if len(content) != length:
            _refuse("it is cut short")
        try:
            return (content if kind == 2 else content.decode()), at + length
        except UnicodeDecodeError:
            _refuse("a text is malformed")
    if kind not in (4, 5) or depth >= _MAX_DEPTH or length > _MAX_ITEMS:
        _refuse("it has an item of another kind")
    items = []
    for _ in range(length * (kind - 3)):
        item, at = _item(data, at, depth + 1)
        items.append(item)
    if kind == 4:
        return items, at
    names = items[::2]
    if not all(isinstance(name, str) for name in names) or len(set(names)) != length:
        _refuse("a map has a name twice")
    return dict(zip(names, items[1::2], strict=True)), at


def _head(data: bytes, at: int) -> tuple[int, int, int]:
    """Kind and length of an item, and the place of its content."""
    if at >= len(data):
        _refuse("it is cut short")
    kind, short = data[at] >> 5, data[at] & 31
    if short < 24:
        return kind, short, at + 1
    size = {24: 1, 25: 2, 26: 4}.get(short, 0)
    raw = data[at + 1 : at + 1 + size]
    length = int.from_bytes(raw, "big")
    least = {1: 24, 2: 1 << 8, 4: 1 << 16}.get(size, 1 << 32)
    if len(raw) != size or length < least:
        _refuse("a length is malformed")
    return kind, length, at + 1 + size


def _refuse(why: str) -> NoReturn:
    raise AttestationError(f"the application's attestation is malformed: {why}", reason="APP_MALFORMED")
