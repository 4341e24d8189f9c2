"""The cluster's authority: what a leaf holds, and what a request cannot get into it."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from sealring.mesh.errors import AlreadyExists, CertificateError, ConfigError, InvalidInput
from sealring.mesh.names import check_name
from sealring.mesh.pki.certificates import (
    MAX_CERTIFICATE_BYTES,
    ROOT_EXTENSION,
    ClusterCA,
    LeafKey,
    PeerIdentity,
    Role,
    certificate_peer,
    check_issued_by,
    expires_at,
    key_hash,
    load_certificate,
    renewal_due,
    to_pem,
)

NOW = 1_800_000_000
MEMBER = PeerIdentity("demo", Role.MEMBER, "node-a")


@pytest.fixture
def ca(tmp_path: Path) -> ClusterCA:
    return ClusterCA.create(tmp_path / "ca", "demo", now=NOW)


def issue(ca: ClusterCA, peer: PeerIdentity = MEMBER, **options: object) -> bytes:
    arguments = {"lifetime": 3600, "now": NOW, **options}
    return ca.issue(LeafKey().csr(), peer, **arguments)  # type: ignore[arg-type]


def names(der: bytes, kind: type[x509.GeneralName]) -> list[object]:
    extension = load_certificate(der).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return list(extension.value.get_values_for_type(kind))  # type: ignore[arg-type]


def test_the_authority_is_kept_and_never_overwritten(tmp_path: Path) -> None:
    ca = ClusterCA.create(tmp_path, "demo", now=NOW)
    assert oct((tmp_path / "ca.key").stat().st_mode)[-4:] == "0600"
    assert ClusterCA.load(tmp_path).certificate == ca.certificate
    with pytest.raises(AlreadyExists):
        ClusterCA.create(tmp_path, "demo", now=NOW)
    other = ClusterCA.create(tmp_path / "other", "demo", now=NOW)
    (tmp_path / "ca.pem").write_bytes(to_pem(other.certificate))
    with pytest.raises(ConfigError):
        ClusterCA.load(tmp_path)
    (tmp_path / "ca.pem").write_bytes(b"garbage")
    with pytest.raises(ConfigError):
        ClusterCA.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        ClusterCA.load(tmp_path / "absent")
    (tmp_path / "other" / "ca.key").chmod(0o644)
    with pytest.raises(ConfigError):
        ClusterCA.load(tmp_path / "other")


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


def test_nothing_that_a_request_asks_for_reaches_the_leaf(ca: ClusterCA) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    asking = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://demo/coordinator/main")]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )
    leaf = load_certificate(ca.issue(asking, MEMBER, lifetime=60, now=NOW))
    assert certificate_peer(leaf) == MEMBER
    assert not list(leaf.subject)
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_bad_requests(ca: ClusterCA) -> None:
    good = LeafKey().csr()
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    others = [
        builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()),
        builder.sign(ed25519.Ed25519PrivateKey.generate(), None),
    ]
    forged = good[:-1] + bytes([good[-1] ^ 1])
    for csr in (
        b"",
        good[:-1],
        good + b"\x00",
        bytes(5000),
        forged,
        *(request.public_bytes(serialization.Encoding.DER) for request in others),
    ):
        with pytest.raises(CertificateError) as error:
            ca.issue(csr, MEMBER, lifetime=60, now=NOW)
        assert error.value.reason == "BAD_CSR"


@pytest.mark.parametrize("lifetime", [0, -1, 31 * 86400])
def test_bad_lifetimes(ca: ClusterCA, lifetime: float) -> None:
    with pytest.raises(InvalidInput):
        issue(ca, lifetime=lifetime)


@pytest.mark.parametrize(
    "address", ["", "a b", "*.local", "coordinator.sealring.internal", "-a", "x" * 300, "a..b"]
)
def test_bad_addresses(ca: ClusterCA, address: str) -> None:
    with pytest.raises(InvalidInput):
        issue(ca, addresses=[address])


@pytest.mark.parametrize("name", ["", "A", "a.b", "-a", "a-", "a" * 64, "a/b", "a\n", "é"])
def test_bad_names(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_name(name, "cluster")
    with pytest.raises(InvalidInput):
        PeerIdentity("demo", Role.MEMBER, name)
    with pytest.raises(InvalidInput):
        PeerIdentity(name, Role.MEMBER, "a")


def test_rotation_is_due_at_half_life(ca: ClusterCA) -> None:
    leaf = issue(ca, lifetime=1000)
    assert renewal_due(leaf) == NOW + 500
    assert expires_at(leaf) == NOW + 1000


def test_issuer_and_times(ca: ClusterCA, tmp_path: Path) -> None:
    other = ClusterCA.create(tmp_path / "other", "demo", now=NOW)
    leaf = load_certificate(issue(ca, lifetime=1000))
    assert check_issued_by(leaf, [other.certificate, ca.certificate], now=NOW) == MEMBER
    for now in (NOW - 119, NOW + 1060):
        check_issued_by(leaf, [ca.certificate], now=now)
    for now in (NOW - 121, NOW + 1061):
        with pytest.raises(CertificateError) as error:
            check_issued_by(leaf, [ca.certificate], now=now)
        assert error.value.reason == "CERTIFICATE_EXPIRED"
    for authorities in ([], [other.certificate]):
        with pytest.raises(CertificateError) as error:
            check_issued_by(leaf, authorities, now=NOW)
        assert error.value.reason == "NOT_ISSUED_HERE"


def test_a_leaf_cannot_issue(ca: ClusterCA) -> None:
    """A member's own key signs another leaf: it is not one of the cluster's authorities."""
    key = LeafKey()
    leaf = load_certificate(ca.issue(key.csr(), MEMBER, lifetime=60, now=NOW))
    rogue = ClusterCA(key._key, leaf)
    child = load_certificate(rogue.issue(LeafKey().csr(), MEMBER, lifetime=60, now=NOW))
    with pytest.raises(CertificateError):
        check_issued_by(child, [ca.certificate], now=NOW)


def test_certificates_without_one_uri(ca: ClusterCA) -> None:
    for der in (ca.certificate,):
        with pytest.raises(CertificateError) as error:
            certificate_peer(load_certificate(der))
        assert error.value.reason == "BAD_PEER_URI"
    for garbage in (b"", b"x", bytes(1 << 18)):
        with pytest.raises(CertificateError) as error:
            load_certificate(garbage)
        assert error.value.reason == "BAD_CERTIFICATE"


def test_an_unknown_version_is_malformed(ca: ClusterCA) -> None:
    der = bytearray(ca.certificate)
    at = der.index(b"\xa0\x03\x02\x01\x02")
    der[at + 4] = 3
    with pytest.raises(CertificateError) as caught:
        load_certificate(bytes(der))
    assert caught.value.reason == "BAD_CERTIFICATE"


def test_a_request_of_unknown_version_is_refused(ca: ClusterCA) -> None:
    csr = bytearray(LeafKey().csr())
    csr[csr.index(b"\x02\x01\x00") + 2] = 7
    with pytest.raises(CertificateError) as caught:
        ca.issue(bytes(csr), PeerIdentity("demo", Role.MEMBER, "m"), lifetime=60, now=NOW)
    assert caught.value.reason == "BAD_CSR"


def test_the_profile_of_a_leaf(ca: ClusterCA) -> None:
    """What TLS libraries go by: no signing of certificates, both ends of TLS, and who issued it."""
    leaf = load_certificate(issue(ca))
    usage = leaf.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    wanted = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    assert usage.value == wanted
    extended = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(extended) == {
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    assert leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).critical
    authority = load_certificate(ca.certificate)
    issuer = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    assert issuer.key_identifier == own.digest
    assert {extension.oid for extension in leaf.extensions if extension.critical} == {
        x509.KeyUsage.oid,
        x509.BasicConstraints.oid,
        x509.SubjectAlternativeName.oid,
    }


def test_the_profile_of_an_authority(ca: ClusterCA) -> None:
    """It signs certificates and nothing else, none of which may be authorities, for ten years."""
    authority = load_certificate(ca.certificate)
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    usage = authority.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert usage.value == x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    assert expires_at(ca.certificate) == NOW + 10 * 365 * 86400
    assert authority.not_valid_before_utc.timestamp() == NOW - 60


def test_root_metadata_goes_where_it_is_asked_for_only(ca: ClusterCA) -> None:
    found = load_certificate(issue(ca, root_chain=b"chain")).extensions.get_extension_for_oid(ROOT_EXTENSION)
    assert (found.value.value, found.critical) == (b"chain", False)  # type: ignore[attr-defined]
    with pytest.raises(x509.ExtensionNotFound):
        load_certificate(issue(ca)).extensions.get_extension_for_oid(ROOT_EXTENSION)


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
    with pytest.raises(CertificateError) as caught:
        PeerIdentity.parse(uri)
    assert caught.value.reason == "BAD_PEER_URI"


def test_the_bounds_of_lives_names_and_sizes(ca: ClusterCA) -> None:
    for lifetime in (1, 30 * 86400):
        assert expires_at(issue(ca, lifetime=lifetime)) == NOW + lifetime
    for lifetime in (0.5, 30 * 86400 + 1):
        with pytest.raises(InvalidInput):
            issue(ca, lifetime=lifetime)
    longest = ".".join(["x" * 62] * 4) + ".x"
    assert len(longest) == 253
    assert longest in names(issue(ca, addresses=[longest]), x509.DNSName)
    with pytest.raises(InvalidInput):
        issue(ca, addresses=[longest + "y"])
    assert MAX_CERTIFICATE_BYTES == 1 << 17
    with pytest.raises(CertificateError):
        load_certificate(bytes(MAX_CERTIFICATE_BYTES + 1))


def test_an_authority_of_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    """Even where the certificate agrees with it."""
    ClusterCA.create(tmp_path, "demo", now=NOW)
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([])
    start = datetime.datetime.fromtimestamp(NOW, tz=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=1))
        .sign(key, None)
    )
    (tmp_path / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "ca.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    with pytest.raises(ConfigError) as caught:
        ClusterCA.load(tmp_path)
    assert caught.value.reason == "BAD_CA"


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


def test_size_is_checked_before_anything_is_parsed(ca: ClusterCA, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealring.mesh.pki.certificates.MAX_CERTIFICATE_BYTES", len(ca.certificate) - 1)
    with pytest.raises(CertificateError) as caught:
        load_certificate(ca.certificate)
    assert caught.value.reason == "BAD_CERTIFICATE"


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
    with pytest.raises(CertificateError) as caught:
        check_issued_by(leaf, [ca.certificate], now=later)
    assert caught.value.reason == "CERTIFICATE_EXPIRED"


def test_an_authority_has_a_proper_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        ClusterCA.create(tmp_path, "Not A Name", now=NOW)
    assert not any(tmp_path.iterdir())
