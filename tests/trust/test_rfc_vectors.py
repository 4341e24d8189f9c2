"""The primitives that we lean on, through our own wrappers, against RFC and NIST vectors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import MLKEM768X25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from sealring.mesh.crypto import Ed25519Signer, Suite, agree_x25519, verify_ecdsa, verify_ed25519
from sealring.mesh.errors import HandshakeError, Unauthenticated
from sealring.mesh.prompt import sealed as envelope
from sealring.node.link.keys import extract

Blocks = Callable[[str], list[dict[str, str]]]


def test_x25519_rfc7748(blocks: Blocks) -> None:
    for block in blocks("asymmetric/X25519/rfc7748.txt"):
        if "output_u" not in block:
            continue
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(block["input_scalar"]))
        point = bytearray.fromhex(block["input_u"])
        if point[31] & 0x80:
            with pytest.raises(HandshakeError):
                agree_x25519(private, bytes(point))
            point[31] &= 0x7F
        if private.public_key().public_bytes_raw() != bytes(point):
            assert agree_x25519(private, bytes(point)).hex() == block["output_u"]


def test_hkdf_rfc5869(blocks: Blocks) -> None:
    count = 0
    for block in blocks("KDF/rfc-5869-HKDF-SHA256.txt"):
        prk = extract(bytes.fromhex(block["salt"]), bytes.fromhex(block["ikm"]))
        assert prk.hex() == block["prk"]
        info = bytes.fromhex(block["info"])
        okm = HKDFExpand(algorithm=SHA256(), length=int(block["l"]), info=info).derive(prk)
        assert okm.hex() == block["okm"]
        count += 1
    assert count == 3


def open_vector(suite: Suite, block: dict[str, str], ciphertext: str, nonce: str, aad: str) -> bytes | None:
    aead = suite.aead(bytes.fromhex(block["key"]))
    sealed = bytes.fromhex(ciphertext + block["tag"])
    out = bytearray(len(sealed) - 16)
    try:
        aead.decrypt_into(bytes.fromhex(nonce), sealed, bytes.fromhex(aad), out)
    except InvalidTag:
        return None
    return bytes(out)


def test_chacha20_poly1305(blocks: Blocks) -> None:
    count = 0
    for block in blocks("ciphers/ChaCha20Poly1305/openssl.txt"):
        if len(block.get("iv", "")) != 24 or len(block["tag"]) != 32:
            continue
        opened = open_vector(
            Suite.X25519_CHACHA20POLY1305, block, block["ciphertext"], block["iv"], block["aad"]
        )
        expected = None if "result" in block else bytes.fromhex(block["plaintext"])
        assert opened == expected
        count += 1
    assert count >= 5


def test_aes_256_gcm_nist(blocks: Blocks) -> None:
    count = 0
    for block in blocks("ciphers/AES/GCM/gcmDecrypt256.rsp"):
        if len(block.get("iv", "")) != 24 or len(block["tag"]) != 32:
            continue
        opened = open_vector(Suite.X25519_AES256GCM, block, block["ct"], block["iv"], block["aad"])
        assert opened == (None if "fail" in block else bytes.fromhex(block["pt"]))
        count += 1
    assert count > 100


def test_ed25519_donna(vectors: Path) -> None:
    for line in (vectors / "asymmetric/Ed25519/sign.input").read_text().splitlines()[:256]:
        secret, public, message, signed, *_ = line.split(":")
        key, content, signature = (bytes.fromhex(part) for part in (public, message, signed[:128]))
        assert Ed25519Signer(bytes.fromhex(secret[:64])).sign(content) == signature
        assert verify_ed25519(key, content, signature)
        assert not verify_ed25519(key, content + b"x", signature)


def test_ecdsa_p256_nist(blocks: Blocks) -> None:
    results = []
    for block in blocks("asymmetric/ECDSA/FIPS_186-3/SigVer.rsp"):
        if block["section"] != "[P-256,SHA-256]" or "msg" not in block:
            continue
        public = bytes.fromhex("04" + block["qx"].zfill(64) + block["qy"].zfill(64))
        signature = encode_dss_signature(int(block["r"], 16), int(block["s"], 16))
        try:
            verify_ecdsa(public, bytes.fromhex(block["msg"]), signature)
            results.append(True)
        except Unauthenticated:
            results.append(False)
        assert results[-1] == block["result"].startswith("P")
    assert len(results) == 15
    assert {True, False} == set(results)


def hpke_vectors(vectors: Path, name: str, kem: int) -> list[dict[str, Any]]:
    document = json.loads((vectors / "HPKE" / name).read_text())
    found = [
        vector
        for vector in document
        if (vector["mode"], vector["kem_id"], vector["kdf_id"], vector["aead_id"]) == (0, kem, 1, 3)
    ]
    assert found
    return found


def test_hpke_rfc9180(vectors: Path) -> None:
    for vector in hpke_vectors(vectors, "test-vectors.json", 0x20):
        key = X25519PrivateKey.from_private_bytes(bytes.fromhex(vector["skRm"]))
        check_hpke(envelope.CLASSIC, key, vector)


def test_hpke_hybrid(vectors: Path) -> None:
    for vector in hpke_vectors(vectors, "hpke-pq-test-vectors.json", 0x647A):
        seed = bytes.fromhex(vector["skRm"])
        expanded = hashlib.shake_256(seed).digest(96)
        key = MLKEM768X25519PrivateKey(
            MLKEM768PrivateKey.from_seed_bytes(expanded[:64]),
            X25519PrivateKey.from_private_bytes(expanded[64:]),
        )
        check_hpke(envelope.HYBRID, key, vector)


def check_hpke(suite: Any, key: Any, vector: dict[str, Any]) -> None:
    """The vectors' messages have associated data, which ours never have: theirs is sealed anew without, under
    the key and nonce that the vector's encapsulation has to lead to."""
    first = vector["encryptions"][0]
    aead, nonce = ChaCha20Poly1305(bytes.fromhex(vector["key"])), bytes.fromhex(vector["base_nonce"])
    plain, aad = bytes.fromhex(first["pt"]), bytes.fromhex(first["aad"])
    assert aead.encrypt(nonce, plain, aad).hex() == first["ct"]
    sealed = bytes.fromhex(vector["enc"]) + aead.encrypt(nonce, plain, b"")
    assert suite.decrypt(sealed, key, bytes.fromhex(vector["info"])) == plain
