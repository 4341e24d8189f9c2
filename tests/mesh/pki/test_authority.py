"""The cluster's authority: what a leaf holds, and what a request cannot get into it."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID
from leaftest import MEMBER, NOW, issue, names
from refusals import refused

from sealring.mesh.errors import AlreadyExists, CertificateError, ConfigError, InvalidInput
from sealring.mesh.pki import (
    MAX_CSR_BYTES,
    ROOT_EXTENSION,
    ClusterCA,
    LeafKey,
    PeerIdentity,
    Role,
    certificate_peer,
    check_issued_by,
    expires_at,
    load_certificate,
    to_pem,
)


def test_the_authority_is_kept_and_never_overwritten(tmp_path: Path) -> None:
    ca = ClusterCA.create(tmp_path, "demo", now=NOW)
    assert oct((tmp_path / "ca.key").stat().st_mode)[-4:] == "0600"
    assert oct((tmp_path / "ca.pem").stat().st_mode)[-4:] == "0644"
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
        with refused("BAD_CSR", CertificateError):
            ca.issue(csr, MEMBER, lifetime=60, now=NOW)


@pytest.mark.parametrize(("padding", "sound"), [(MAX_CSR_BYTES - 500, True), (MAX_CSR_BYTES, False)])
def test_a_request_that_is_too_large_is_not_parsed(ca: ClusterCA, padding: int, sound: bool) -> None:
    extension = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), bytes(padding))
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.add_extension(extension, critical=False).sign(
        ec.generate_private_key(ec.SECP256R1()), hashes.SHA256()
    )
    csr = request.public_bytes(serialization.Encoding.DER)
    if sound:
        assert ca.issue(csr, MEMBER, lifetime=60, now=NOW)
        return
    with refused("BAD_CSR", CertificateError):
        ca.issue(csr, MEMBER, lifetime=60, now=NOW)


@pytest.mark.parametrize(
    "address", ["", "a b", "*.local", "coordinator.sealring.internal", "-a", "x" * 300, "a..b"]
)
def test_bad_addresses(ca: ClusterCA, address: str) -> None:
    with pytest.raises(InvalidInput):
        issue(ca, addresses=[address])


def test_a_request_of_unknown_version_is_refused(ca: ClusterCA) -> None:
    csr = bytearray(LeafKey().csr())
    csr[csr.index(b"\x02\x01\x00") + 2] = 7
    with refused("BAD_CSR", CertificateError):
        ca.issue(bytes(csr), PeerIdentity("demo", Role.MEMBER, "m"), lifetime=60, now=NOW)


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


def test_a_longer_life_is_for_the_same_key_and_begins_as_before(ca: ClusterCA, tmp_path: Path) -> None:
    """Each of the two certificates verifies leaves that were issued under the other."""
    other, later = ClusterCA.create(tmp_path / "other", "demo", now=NOW), NOW + 6 * 365 * 86400
    both = (other.certificate, ca.certificate)
    first, new = ca.extended(both, now=later)
    assert first == other.certificate
    assert expires_at(new) == later + 10 * 365 * 86400
    old = load_certificate(ca.certificate)
    assert load_certificate(new).not_valid_before_utc == old.not_valid_before_utc
    extended = ca.named_in((first, new))
    assert extended is not None
    assert extended.certificate == new
    assert check_issued_by(load_certificate(issue(ca)), [new], now=NOW) == MEMBER
    assert check_issued_by(load_certificate(issue(extended)), [ca.certificate], now=NOW) == MEMBER
    assert ca.named_in((other.certificate,)) is None


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


def test_the_bounds_of_lives_and_names(ca: ClusterCA) -> None:
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
    with refused("BAD_CA", ConfigError):
        ClusterCA.load(tmp_path)


def test_an_authority_has_a_proper_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        ClusterCA.create(tmp_path, "Not A Name", now=NOW)
    assert not any(tmp_path.iterdir())
