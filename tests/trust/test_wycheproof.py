"""Wycheproof: our own wrappers against vectors made to break them. See conftest for where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from sealring.mesh.crypto import (
    Group,
    InitiatorShare,
    Suite,
    agree_x25519,
    respond_to_share,
    verify_ecdsa,
    verify_ed25519,
)
from sealring.mesh.errors import HandshakeError, InvalidInput, Unauthenticated
from sealring.mesh.prompt.sealed import RequestInfo, seal_request
from sealring.node.link import keys as session

Vectors = Callable[[str], list[tuple[dict[str, Any], dict[str, Any]]]]
PRIME = (1 << 255) - 19


def test_x25519(wycheproof: Vectors) -> None:
    for _, test in wycheproof("x25519"):
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(test["private"]))
        public = bytes.fromhex(test["public"])
        refused = (  # more than RFC 7748 asks for: it would take the first of the three
            int.from_bytes(public, "little") >= PRIME
            or not any(bytes.fromhex(test["shared"]))
            or public == private.public_key().public_bytes_raw()
        )
        if refused:
            with pytest.raises(HandshakeError):
                agree_x25519(private, public)
        else:
            assert agree_x25519(private, public).hex() == test["shared"], test["tcId"]


@pytest.mark.parametrize(
    ("name", "suite"),
    [
        ("chacha20_poly1305", Suite.X25519_CHACHA20POLY1305),
        ("aes_gcm", Suite.X25519_AES256GCM),
    ],
)
def test_aead(wycheproof: Vectors, name: str, suite: Suite) -> None:
    count = 0
    for group, test in wycheproof(name):
        if (group["keySize"], group["ivSize"], group["tagSize"]) != (256, 96, 128):
            continue
        count += 1
        aead = suite.aead(bytes.fromhex(test["key"]))
        nonce, aad = bytes.fromhex(test["iv"]), bytes.fromhex(test["aad"])
        plain, sealed = bytes.fromhex(test["msg"]), bytes.fromhex(test["ct"] + test["tag"])
        out = bytearray(len(sealed) - 16)
        if test["result"] == "valid":
            aead.decrypt_into(nonce, sealed, aad, out)
            assert out == plain
            again = bytearray(len(sealed))
            aead.encrypt_into(nonce, plain, aad, again)
            assert again == sealed
        else:
            with pytest.raises(InvalidTag):
                aead.decrypt_into(nonce, sealed, aad, out)
    assert count > 60


def test_hkdf(wycheproof: Vectors) -> None:
    results = set()
    for _, test in wycheproof("hkdf_sha256"):
        prk = session.extract(bytes.fromhex(test["salt"]), bytes.fromhex(test["ikm"]))
        info, size = bytes.fromhex(test["info"]), test["size"]
        results.add(test["result"])
        if test["result"] == "valid":
            found = HKDFExpand(algorithm=SHA256(), length=size, info=info).derive(prk)
            assert found.hex() == test["okm"], test["tcId"]
        else:
            with pytest.raises(ValueError):
                session.expand(prk, b"", info, size)
    assert results == {"valid", "invalid"}


def test_ed25519(wycheproof: Vectors) -> None:
    """Keys of small order are refused: anybody could sign for them. One with torsion in it has an owner."""
    results = set()
    for group, test in wycheproof("ed25519"):
        public = bytes.fromhex(group["publicKey"]["pk"])
        message, signature = bytes.fromhex(test["msg"]), bytes.fromhex(test["sig"])
        verified = verify_ed25519(public, message, signature)
        owned = test["result"] == "acceptable" and "MixedOrderPublicKey" in test["flags"]
        assert verified == (test["result"] == "valid" or owned), test["tcId"]
        results.add((test["result"], verified))
    assert {("valid", True), ("invalid", False), ("acceptable", False)} <= results


def verifies(public: str, message: str, signature: bytes) -> bool:
    try:
        verify_ecdsa(bytes.fromhex(public), bytes.fromhex(message), signature)
    except Unauthenticated:
        return False
    return True


def test_ecdsa_p256(wycheproof: Vectors) -> None:
    for group, test in wycheproof("ecdsa_secp256r1_sha256"):
        public = group["publicKey"]["uncompressed"]
        verified = verifies(public, test["msg"], bytes.fromhex(test["sig"]))
        assert verified == (test["result"] == "valid"), test["tcId"]


def test_ecdsa_p256_p1363(wycheproof: Vectors) -> None:
    """The fixed-length form is none of ours; the same numbers in DER verify if they should."""
    for group, test in wycheproof("ecdsa_secp256r1_sha256_p1363"):
        public, raw = group["publicKey"]["uncompressed"], bytes.fromhex(test["sig"])
        assert not verifies(public, test["msg"], raw), test["tcId"]
        if len(raw) == 64:
            numbers = int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big")
            verified = verifies(public, test["msg"], encode_dss_signature(*numbers))
            assert verified == (test["result"] == "valid"), test["tcId"]


def test_mlkem_768_keys_and_decapsulation(wycheproof: Vectors) -> None:
    """What the initiator of a hybrid handshake makes of the responder's share."""
    other = X25519PrivateKey.generate().public_key().public_bytes_raw()
    agreed = 0
    for _, test in wycheproof("mlkem_768"):
        seed, ciphertext = bytes.fromhex(test["seed"]), bytes.fromhex(test["c"])
        if len(seed) != 64:
            assert test["result"] == "invalid"
            with pytest.raises(ValueError):
                MLKEM768PrivateKey.from_seed_bytes(seed)
            continue
        share = InitiatorShare(X25519PrivateKey.generate(), MLKEM768PrivateKey.from_seed_bytes(seed))
        assert share.public[32:].hex() == test["ek"], test["tcId"]
        try:
            secret = share.agree(other + ciphertext)[:32].hex()
        except HandshakeError:
            secret = "refused"
        assert (secret == test.get("K")) == (test["result"] == "valid"), test["tcId"]
        agreed += secret != "refused"
    assert agreed > 100


def test_mlkem_768_keygen(wycheproof: Vectors) -> None:
    for _, test in wycheproof("mlkem_768_keygen_seed"):
        key = MLKEM768PrivateKey.from_seed_bytes(bytes.fromhex(test["seed"]))
        assert key.public_key().public_bytes_raw().hex() == test["ek"], test["tcId"]


def test_mlkem_768_encapsulation_keys(wycheproof: Vectors) -> None:
    """What the responder of a hybrid handshake, and a client that seals, make of a public key."""
    other = X25519PrivateKey.generate().public_key().public_bytes_raw()
    info = RequestInfo("demo", bytes(16), 1, bytes(32))
    results = set()
    for _, test in wycheproof("mlkem_768_encaps"):
        key = bytes.fromhex(test["ek"])
        results.add(test["result"])
        if test["result"] == "valid":
            share, secret = respond_to_share(Group.X25519_MLKEM768, other + key)
            assert (len(share), len(secret)) == (32 + 1088, 64)
            seal_request(key + other, info, b"")
        else:
            with pytest.raises(HandshakeError):
                respond_to_share(Group.X25519_MLKEM768, other + key)
            with pytest.raises(InvalidInput):
                seal_request(key + other, info, b"")
    assert results == {"valid", "invalid"}
