"""What a certificate says of its holder, and who believes it."""

from __future__ import annotations

import hashlib
import ipaddress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from leaftest import MEMBER, NOW, issue, names
from refusals import refused

from sealring.mesh.errors import CertificateError, InvalidInput
from sealring.mesh.names import check_name
from sealring.mesh.pki import (
    MAX_CERTIFICATE_BYTES,
    ClusterCA,
    LeafKey,
    PeerIdentity,
    Role,
    certificate_peer,
    check_issued_by,
    expires_at,
    is_due,
    key_hash,
    load_certificate,
    renewal_due,
    to_pem,
    valid_at,
)


def test_a_leaf_names_its_holder(ca: ClusterCA) -> None:
    leaf = issue(ca, addresses=["127.0.0.1", "::1", "Mac.local", "127.0.0.1"])
    assert names(leaf, x509.UniformResourceIdentifier) == ["spiffe://demo/member/node-a"]
    assert names(leaf, x509.DNSName) == ["node-a.member.sealring.internal", "mac.local"]
    assert names(leaf, x509.IPAddress) == [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    assert certificate_peer(load_certificate(leaf)) == MEMBER
    for role in (Role.COORDINATOR, Role.GATEWAY):
        leaf = issue(ca, PeerIdentity("demo", role, "main"))
        assert f"{role}.sealring.internal" in names(leaf, x509.DNSName)
    constraints = load_certificate(leaf).extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca


@pytest.mark.parametrize("name", ["", "A", "a.b", "-a", "a-", "a" * 64, "a/b", "a\n", "é"])
def test_bad_names(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_name(name, "cluster")
    with pytest.raises(InvalidInput):
        PeerIdentity("demo", Role.MEMBER, name)
    with pytest.raises(InvalidInput):
        PeerIdentity(name, Role.MEMBER, "a")


def test_rotation_is_due_at_half_life_and_while_it_is_not_valid_yet(ca: ClusterCA) -> None:
    leaf = issue(ca, lifetime=1000)
    assert renewal_due(leaf) == NOW + 500
    assert [is_due(leaf, NOW + at) for at in (-61, -60, 499, 500)] == [True, False, False, True]
    assert [valid_at(leaf, NOW + at) for at in (-61, -60, 999, 1000)] == [False, True, True, False]
    assert expires_at(leaf) == NOW + 1000


def test_issuer_and_times(ca: ClusterCA, tmp_path: Path) -> None:
    other = ClusterCA.create(tmp_path / "other", "demo", now=NOW)
    leaf = load_certificate(issue(ca, lifetime=1000))
    assert check_issued_by(leaf, [other.certificate, ca.certificate], now=NOW) == MEMBER
    for now in (NOW - 120, NOW + 1060):
        check_issued_by(leaf, [ca.certificate], now=now)
    for now in (NOW - 121, NOW + 1061):
        with refused("CERTIFICATE_EXPIRED", CertificateError):
            check_issued_by(leaf, [ca.certificate], now=now)
    for authorities in ([], [other.certificate]):
        with refused("NOT_ISSUED_HERE", CertificateError):
            check_issued_by(leaf, authorities, now=NOW)


def test_a_leaf_cannot_issue(ca: ClusterCA) -> None:
    """A member's own key signs another leaf: it is not one of the cluster's authorities."""
    key = LeafKey()
    leaf = load_certificate(ca.issue(key.csr(), MEMBER, lifetime=60, now=NOW))
    private: Any = serialization.load_pem_private_key(key.private_pem(), password=None)
    rogue = ClusterCA(private, leaf)
    child = load_certificate(rogue.issue(LeafKey().csr(), MEMBER, lifetime=60, now=NOW))
    with pytest.raises(CertificateError):
        check_issued_by(child, [ca.certificate], now=NOW)


def test_what_is_no_leaf_of_ours(ca: ClusterCA) -> None:
    with refused("BAD_PEER_URI", CertificateError):
        certificate_peer(load_certificate(ca.certificate))
    odd = bytearray(ca.certificate)
    odd[odd.index(b"\xa0\x03\x02\x01\x02") + 4] = 3  # a version that is unknown
    for garbage in (b"", b"x", bytes(1 << 16), bytes(odd)):
        with refused("BAD_CERTIFICATE", CertificateError):
            load_certificate(garbage)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://demo/member",
        "spiffe://demo/member/",
        "spiffe://demo/root/node-a",
        "spiffe://demo/member/node-a/x",
        "spiffe://demo/member/node-a\n",
        "spiffe://-demo/member/node-a",
        "spiffe://demo/member/-a",
        "https://demo/member/node-a",
        "spiffe://demo/Member/node-a",
    ],
)
def test_names_that_are_no_peers(uri: str) -> None:
    with refused("BAD_PEER_URI", CertificateError):
        PeerIdentity.parse(uri)


def test_key_hashes_tell_keys_apart(ca: ClusterCA) -> None:
    leaf = LeafKey()
    first, second = (ca.issue(leaf.csr(), MEMBER, lifetime=60 + n, now=NOW) for n in range(2))
    spki = (
        load_certificate(first)
        .public_key()
        .public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    assert key_hash(first) == key_hash(second) == hashlib.sha256(spki).digest()
    assert key_hash(issue(ca)) != key_hash(first)


@pytest.mark.parametrize(
    ("padding", "sound"), [(MAX_CERTIFICATE_BYTES - 2000, True), (MAX_CERTIFICATE_BYTES, False)]
)
def test_a_certificate_that_is_too_large_is_not_parsed(ca: ClusterCA, padding: int, sound: bool) -> None:
    leaf = issue(ca, root_chain=bytes(padding))
    if sound:
        assert certificate_peer(load_certificate(leaf)) == MEMBER
        return
    with refused("BAD_CERTIFICATE", CertificateError):
        load_certificate(leaf)


def test_a_bundle_is_nothing_but_its_certificates(ca: ClusterCA) -> None:
    leaf = issue(ca)
    bundle = to_pem(leaf, ca.certificate)
    assert bundle == to_pem(leaf) + to_pem(ca.certificate)
    assert to_pem() == b""
    found = x509.load_pem_x509_certificates(bundle)
    assert [one.public_bytes(serialization.Encoding.DER) for one in found] == [leaf, ca.certificate]


def test_an_authority_that_has_ended_vouches_for_nobody(ca: ClusterCA) -> None:
    later = expires_at(ca.certificate) + 3600
    leaf = load_certificate(issue(ca, now=later))
    with refused("CERTIFICATE_EXPIRED", CertificateError):
        check_issued_by(leaf, [ca.certificate], now=later)
