"""App Attest by a test root: an application that vouches for one identity key, and everything else."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from appletest import DeviceAuthority
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.crypto import encode_public_key
from sealring.mesh.errors import AttestationError
from sealring.mesh.trust import app_attest
from sealring.mesh.trust.app_attest import DEVELOPMENT, NONCE, PRODUCTION, client_data_hash, verify_app

NOW = 1_800_000_000
APP, KEY, CHALLENGE = "TEAM123456.org.sealring.enclave", b"\x04" + bytes(64), bytes(range(32))
AUTHORITY = DeviceAuthority(NOW)


def cbor(value: Any) -> bytes:
    """CBOR of bytes, texts, lists and maps (RFC 8949), as Apple's objects have them."""

    def head(kind: int, length: int) -> bytes:
        if length < 24:
            return bytes([kind << 5 | length])
        size = 1 if length < 256 else 2
        return bytes([kind << 5 | 23 + size]) + length.to_bytes(size, "big")

    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value)) + value.encode()
    if isinstance(value, list):
        return head(4, len(value)) + b"".join(map(cbor, value))
    return head(5, len(value)) + b"".join(cbor(name) + cbor(item) for name, item in value.items())


def attested(
    *,
    app: str = APP,
    key: bytes = KEY,
    nonce: bytes = CHALLENGE,
    counter: int = 0,
    environment: bytes = PRODUCTION,
    named: bytes | None = None,
    authority: DeviceAuthority = AUTHORITY,
    **changes: Any,
) -> bytes:
    """An attestation object in the shape that Apple documents, with the format's fields changed."""
    made = ec.generate_private_key(ec.SECP256R1())
    identifier = named or hashlib.sha256(encode_public_key(made.public_key())).digest()
    data = hashlib.sha256(app.encode()).digest() + b"\x40" + counter.to_bytes(4, "big") + environment
    data += len(identifier).to_bytes(2, "big") + identifier + b"\xa5"  # a key in COSE's form follows
    bound = hashlib.sha256(data + client_data_hash(key, nonce)).digest()
    extension = {NONCE: b"\x30\x24\xa1\x22\x04\x20" + bound}
    leaf = authority.certificate("app", "sub", made, authority.key, ca=False, extensions=extension)
    chain = [leaf.public_bytes(Encoding.DER), authority.intermediate.public_bytes(Encoding.DER)]
    whole = {"fmt": "apple-appattest", "attStmt": {"x5c": chain, "receipt": b"r" * 300}, "authData": data}
    return cbor(whole | changes)


def check(attestation: bytes) -> Any:
    return verify_app(
        attestation, identity_key=KEY, nonce=CHALLENGE, app_id=APP, root=AUTHORITY.root, now=NOW
    )


def test_an_application_vouches_for_one_identity_key() -> None:
    assert len(check(attested()).key) == 65


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("APP_FRESHNESS", {"key": b"\x04" + bytes([1] * 64)}),
        ("APP_FRESHNESS", {"nonce": bytes(32)}),
        ("APP_OTHER", {"app": "TEAM123456.org.other"}),
        ("APP_ENVIRONMENT", {"environment": DEVELOPMENT}),
        ("APP_ENVIRONMENT", {"environment": bytes(16)}),
        ("APP_KEY", {"counter": 1}),
        ("APP_KEY", {"named": bytes(32)}),
        ("APP_KEY", {"named": bytes(16)}),
        ("DEVICE_CHAIN", {"authority": DeviceAuthority(NOW)}),
        ("DEVICE_CHAIN", {"attStmt": {"x5c": []}}),
        ("APP_MALFORMED", {"attStmt": {"x5c": "x"}}),
        ("DEVICE_CHAIN", {"attStmt": {"x5c": [b"x"] * 5}}),
        ("APP_MALFORMED", {"attStmt": {}}),
        ("APP_MALFORMED", {"fmt": "packed"}),
        ("APP_MALFORMED", {"authData": b"short"}),
    ],
)
def test_any_other_attestation_is_refused(reason: str, changes: dict[str, Any]) -> None:
    with refused(reason, AttestationError):
        check(attested(**changes))


WHOLE = attested()


@given(st.integers(0, len(WHOLE) - 1))
def test_a_cut_attestation_is_malformed(length: int) -> None:
    with refused("APP_MALFORMED", AttestationError):
        check(WHOLE[:length])


def test_bytes_behind_it_and_long_ones_are_malformed() -> None:
    for wrong in (WHOLE + b"\0", b"\x5a" + b"\xff" * 4, bytes(app_attest.MAX_ATTESTATION_BYTES + 1)):
        with refused("APP_MALFORMED", AttestationError):
            check(wrong)


@given(st.integers(0, 8 * len(WHOLE) - 1))
def test_a_flipped_bit_is_refused_or_changes_only_what_apple_keeps_beside_it(bit: int) -> None:
    """Not covered are the receipt, which only Apple reads, and names of fields that nobody reads."""
    flipped = bytearray(WHOLE)
    flipped[bit // 8] ^= 1 << bit % 8
    receipt = WHOLE.index(b"receipt")
    if not receipt <= bit // 8 < receipt + 7 + 3 + 300:
        with pytest.raises(AttestationError):
            check(bytes(flipped))


@given(st.binary(max_size=200))
def test_garbage_is_malformed(data: bytes) -> None:
    with refused("APP_MALFORMED", AttestationError):
        check(data)
