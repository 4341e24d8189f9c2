"""Identity keys: their file, their ids, and signatures that hold under one label only."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.crypto import (
    Label,
    Signer,
    SoftwareSigner,
    check_member_id,
    load_public_key,
    member_id,
    signing_input,
    verify,
)
from sealring.mesh.errors import ConfigError, InvalidInput, Unauthenticated

SIGNER = SoftwareSigner.generate()
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def refused(signature: bytes, *, label: Label = Label.JOIN, content: bytes = b"x") -> None:
    with pytest.raises(Unauthenticated) as error:
        verify(SIGNER.public_key, label, content, signature)
    assert error.value.reason == "BAD_SIGNATURE"


def test_the_key_file_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "node" / "identity.pem"
    signer = SoftwareSigner.load_or_create(path)
    assert oct(path.stat().st_mode)[-4:] == "0600"
    assert SoftwareSigner.load_or_create(path).public_key == signer.public_key
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.pem"]
    assert isinstance(signer, Signer)
    assert signer.key_type == "software"


def test_concurrent_creation_ends_with_one_key(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: SoftwareSigner.load_or_create(path).public_key, range(16)))
    assert len(keys) == 1


def test_a_key_file_that_is_open_to_others_or_a_link_is_refused(tmp_path: Path) -> None:
    path, link = tmp_path / "identity.pem", tmp_path / "link.pem"
    SoftwareSigner.load_or_create(path)
    link.symlink_to(path)
    with pytest.raises(ConfigError):
        SoftwareSigner.load_or_create(link)
    path.chmod(0o640)
    with pytest.raises(ConfigError) as error:
        SoftwareSigner.load_or_create(path)
    assert error.value.reason == "SECRET_FILE_UNSAFE"


def test_corrupt_and_foreign_key_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    foreign = [
        b"",
        b"garbage",
        bytes(1 << 17),
        *(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            for key in (ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate())
        ),
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"x"),
        ),
    ]
    for data in foreign:
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(ConfigError):
            SoftwareSigner.load_or_create(path)
        assert path.read_bytes() == data


def test_member_ids() -> None:
    identifier = member_id(SIGNER.public_key)
    assert len(identifier) == 52
    assert check_member_id(identifier) == identifier
    assert identifier in repr(SIGNER)
    for bad in (
        "",
        identifier[:-1],
        identifier + "a",
        identifier.upper(),
        "1" * 52,
        "é" * 52,
        "a" * 51 + "b",
    ):
        with pytest.raises(InvalidInput):
            check_member_id(bad)


def test_public_keys_are_uncompressed_points_on_the_curve() -> None:
    point = SIGNER.public_key
    compressed = load_public_key(point).public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    )
    hybrid = bytes([6 + (point[-1] & 1)]) + point[1:]
    off_curve = point[:-1] + bytes([point[-1] ^ 1])
    prime = 0xFFFFFFFF00000001000000000000000000000000FFFFFFFFFFFFFFFFFFFFFFFF
    not_reduced = b"\x04" + (prime + 5).to_bytes(32, "big") + point[33:]
    for bad in (b"", b"\x00", compressed, hybrid, off_curve, not_reduced, point + b"\x00", point[:-1]):
        with pytest.raises(InvalidInput) as error:
            load_public_key(bad)
        assert error.value.reason == "BAD_PUBLIC_KEY"
        with pytest.raises(InvalidInput):
            member_id(bad)


def test_a_signature_holds_for_its_label_and_content_only() -> None:
    for label in Label:
        signature = SIGNER.sign(label, b"x")
        verify(SIGNER.public_key, label, b"x", signature)
        refused(signature, label=label, content=b"y")
        for other in Label:
            if other is not label:
                refused(signature, label=other)


def test_a_derived_secret_is_the_keys_and_the_seeds() -> None:
    one, other = SoftwareSigner.generate(), SoftwareSigner.generate()
    seed = other.public_key
    assert len(one.derive(seed)) == 32
    assert one.derive(seed) == one.derive(seed)
    assert len({one.derive(seed), other.derive(seed), one.derive(one.public_key)}) == 3


def test_labels_are_distinct_and_prefix_free() -> None:
    values = [label.value + b"\x00" for label in Label]
    assert len(set(values)) == len(values)
    assert not any(a != b and b.startswith(a) for a in values for b in values)
    assert signing_input(Label.JOIN, b"")[:64] == b" " * 64


def test_signature_of_another_key_is_refused() -> None:
    refused(SoftwareSigner.generate().sign(Label.JOIN, b"x"))


def test_der_is_strict() -> None:
    signature = SIGNER.sign(Label.JOIN, b"x")
    r, s = decode_dss_signature(signature)
    long_form = b"\x30\x81" + signature[1:]
    padded = (
        b"\x30" + bytes([signature[1] + 1]) + b"\x02" + bytes([signature[3] + 1]) + b"\x00" + signature[4:]
    )
    indefinite = b"\x30\x80" + signature[2:] + b"\x00\x00"
    for bad in (
        b"",
        signature + b"\x00",
        signature[:-1],
        long_form,
        padded,
        indefinite,
        encode_dss_signature(0, s),
        encode_dss_signature(r, 0),
        encode_dss_signature(r + ORDER, s),
        encode_dss_signature(r, s + ORDER),
        bytes(73),
        r.to_bytes(32, "big") + s.to_bytes(32, "big"),
    ):
        refused(bad)


def test_malleability_is_known_and_harmless() -> None:
    """The other s verifies as well: which is why nothing is ever keyed on signature bytes."""
    r, s = decode_dss_signature(SIGNER.sign(Label.JOIN, b"x"))
    verify(SIGNER.public_key, Label.JOIN, b"x", encode_dss_signature(r, ORDER - s))


@given(st.binary(max_size=80))
def test_garbage_signatures_are_refused_cleanly(signature: bytes) -> None:
    refused(signature)


def test_the_longest_signature_verifies() -> None:
    """72 bytes: both numbers have their highest bit set, as one signature in four."""
    signer = SoftwareSigner.generate()
    lengths = set()
    for number in range(200):
        signature = signer.sign(Label.JOIN, b"%d" % number)
        verify(signer.public_key, Label.JOIN, b"%d" % number, signature)
        lengths.add(len(signature))
    assert max(lengths) == 72
