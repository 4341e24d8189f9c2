"""Wycheproof: the same wrappers against vectors made to break them. See conftest for where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from mesh import dsse, identity
from mesh.errors import HandshakeError, SealringError
from mesh.labels import Label
from mesh.session import extract
from mesh.suites import Suite, _x25519

Vectors = Callable[[str], list[tuple[dict[str, Any], dict[str, Any]]]]
PRIME = (1 << 255) - 19


@pytest.fixture
def unlabelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wycheproof signs the bare message: take our label off for it."""
    for module in (identity, dsse):
        monkeypatch.setattr(module, "signing_input", lambda label, content: content)


def test_x25519(wycheproof: Vectors) -> None:
    for _, test in wycheproof("x25519"):
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(test["private"]))
        public = bytes.fromhex(test["public"])
        refused = (
            int.from_bytes(public, "little") >= PRIME
            or not any(bytes.fromhex(test["shared"]))
            or public == private.public_key().public_bytes_raw()
        )
        if refused:
            with pytest.raises(HandshakeError):
                _x25519(private, public)
        else:
            assert _x25519(private, public).hex() == test["shared"], test["tcId"]


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
    for _, test in wycheproof("hkdf_sha256"):
        prk = extract(bytes.fromhex(test["salt"]), bytes.fromhex(test["ikm"]))
        info = bytes.fromhex(test["info"])
        if test["result"] == "valid":
            okm = HKDFExpand(algorithm=SHA256(), length=test["size"], info=info).derive(prk)
            assert okm.hex() == test["okm"]
        else:
            with pytest.raises(ValueError):
                HKDFExpand(algorithm=SHA256(), length=test["size"], info=info).derive(prk)


@pytest.mark.usefixtures("unlabelled")
def test_ed25519(wycheproof: Vectors) -> None:
    for group, test in wycheproof("ed25519"):
        public = bytes.fromhex(group["publicKey"]["pk"])
        message, signature = bytes.fromhex(test["msg"]), bytes.fromhex(test["sig"])
        verified = dsse.verify_ed25519(public, Label.ROOT, message, signature)
        assert verified == (test["result"] == "valid"), test["tcId"]


@pytest.mark.usefixtures("unlabelled")
def test_ecdsa_p256(wycheproof: Vectors) -> None:
    for group, test in wycheproof("ecdsa_secp256r1_sha256"):
        public = bytes.fromhex(group["publicKey"]["uncompressed"])
        message, signature = bytes.fromhex(test["msg"]), bytes.fromhex(test["sig"])
        try:
            identity.verify(public, Label.JOIN, message, signature)
            verified = True
        except SealringError:
            verified = False
        assert verified == (test["result"] == "valid"), test["tcId"]


def test_mlkem_768(wycheproof: Vectors) -> None:
    for _, test in wycheproof("mlkem_768"):
        seed, ciphertext = bytes.fromhex(test["seed"]), bytes.fromhex(test["c"])
        try:
            secret = MLKEM768PrivateKey.from_seed_bytes(seed).decapsulate(ciphertext).hex()
        except ValueError:
            secret = "refused"
        assert (secret == test.get("K")) == (test["result"] == "valid"), test["tcId"]
