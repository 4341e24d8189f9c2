"""The LAN door's certificates, as OpenSSL's strictest client sees them, and what their keys can sign."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from sealring.gateway.lan import certificate
from sealring.gateway.lan.certificate import ROOT_FILE, LanTls, fingerprint, local_names
from sealring.mesh.crypto import private_pem
from sealring.mesh.errors import ConfigError
from sealring.mesh.pki import unsigned
from sealring.testing import ManualClock

DAY = 86_400.0
HOSTS = ["attic.local", "192.168.1.7"]


class Now(ManualClock):
    def __init__(self) -> None:
        super().__init__(time.time())


def made(folder: Path, hosts: list[str] | None = None, clock: ManualClock | None = None) -> LanTls:
    return LanTls(
        folder, "sealring attic", lambda: HOSTS if hosts is None else hosts, clock=clock or time.time
    )


def leaf_of(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "served.pem").read_bytes())


def names_of(folder: Path) -> list[str]:
    found = leaf_of(folder).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(one.value) for one in found]


async def met(server: ssl.SSLContext, root: Path, host: str) -> None:
    """Shakes hands as a client that trusts the root alone. Raises SSLError."""
    trusting = ssl.create_default_context(cafile=str(root))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=server)
    port = listening.sockets[0].getsockname()[1]
    async with listening:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname=host)
        writer.close()


async def test_who_trusts_the_root_reaches_this_machine_by_each_of_its_names(tmp_path: Path) -> None:
    tls = made(tmp_path)
    for host in (*HOSTS, "localhost", "127.0.0.1"):
        await met(tls.context, tmp_path / ROOT_FILE, host)
    for host in ("192.168.1.8", "cellar.local"):
        with pytest.raises(ssl.SSLCertVerificationError):
            await met(tls.context, tmp_path / ROOT_FILE, host)


@pytest.mark.parametrize("host", ["example.com", "bank.local.example.com", "1.1.1.1", "2606:4700::1111"])
async def test_a_thief_of_the_folder_poses_as_nobody_on_the_internet(tmp_path: Path, host: str) -> None:
    """The root's own key is in no file; the issuer's signs for a house alone."""
    made(tmp_path)
    kept = (tmp_path / "authority.pem").read_bytes()
    issuer, root = x509.load_pem_x509_certificates(kept)
    key = serialization.load_pem_private_key(kept, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == issuer.public_key() != root.public_key()
    assert b"".join(one.read_bytes() for one in tmp_path.iterdir()).count(b"PRIVATE KEY-----\n") == 4
    own = ec.generate_private_key(ec.SECP256R1())
    try:
        general: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        general = x509.DNSName(host)
    now = datetime.datetime.now(datetime.UTC)
    lasts = now - datetime.timedelta(1), now + datetime.timedelta(1)
    name = x509.Name([])
    forged = unsigned(name, own.public_key(), issuer.subject, key.public_key(), lasts)
    forged = forged.add_extension(x509.SubjectAlternativeName([general]), critical=True)
    chain = [forged.sign(key, hashes.SHA256()), issuer]
    file = tmp_path / "forged.pem"
    pems = [one.public_bytes(serialization.Encoding.PEM) for one in chain]
    file.write_bytes(private_pem(own) + b"".join(pems))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree"):
        await met(context, tmp_path / ROOT_FILE, host)


@pytest.mark.parametrize("cluster", ["attic", "a" * 63])
async def test_root_and_issuer_sign_for_servers_alone(tmp_path: Path, cluster: str) -> None:
    """Mail, code and clients have no names that bind them. A cluster's name may have 63 letters."""
    LanTls(tmp_path, f"sealring {cluster}", lambda: HOSTS)
    issuer, root = x509.load_pem_x509_certificates((tmp_path / "authority.pem").read_bytes())
    assert issuer.subject != root.subject
    for one in (issuer, root):
        usage = one.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]


async def test_another_leaf_comes_at_half_of_its_life_and_with_other_addresses(tmp_path: Path) -> None:
    """A clock that was set back has one made as well. The root stays, whatever the clock says."""
    clock, hosts = Now(), ["192.168.1.7"]
    tls = made(tmp_path, hosts, clock)
    root, first = fingerprint(tmp_path / ROOT_FILE), leaf_of(tmp_path)
    for seconds, changes in ((100 * DAY, False), (100 * DAY, True), (-300 * DAY, True), (-8000 * DAY, True)):
        clock.now += seconds
        await tls.refresh()
        assert (leaf_of(tmp_path) != first) is changes
        first = leaf_of(tmp_path)
    clock.now = time.time()
    hosts[:] = ["10.0.0.9"]
    await tls.refresh()
    assert names_of(tmp_path) == ["10.0.0.9", "localhost", "127.0.0.1"]
    await met(tls.context, tmp_path / ROOT_FILE, "10.0.0.9")
    assert fingerprint(tmp_path / ROOT_FILE) == root


async def test_what_was_made_is_taken_up_at_the_next_start(tmp_path: Path) -> None:
    made(tmp_path)
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    made(tmp_path)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before
    assert all(one.stat().st_mode & 0o077 == 0 for one in tmp_path.glob("*.pem"))
    (tmp_path / ROOT_FILE).unlink()
    (tmp_path / "served.pem").write_bytes(b"damaged")
    await met(made(tmp_path).context, tmp_path / ROOT_FILE, "192.168.1.7")
    assert (tmp_path / ROOT_FILE).read_bytes() == before[ROOT_FILE]
    (tmp_path / "authority.pem").write_bytes(b"damaged")
    with pytest.raises(ConfigError) as caught:
        made(tmp_path)
    assert caught.value.reason == "BAD_TLS_FILES"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Attic.local", ["attic.local"]),
        ("attic", []),
        ("attic.example.com", []),
        ("dachb\u00f6den.local", []),
        ("an attic.local", []),
        ("a" * 64 + ".local", []),
        ("attic.local\n", []),
    ],
)
def test_a_name_by_multicast_dns_is_one_that_a_certificate_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: list[str]
) -> None:
    """Hosts may have any name. One that does not fit would keep the gateway from starting."""
    monkeypatch.setattr("socket.gethostname", lambda: name)
    assert local_names() == found
    made(tmp_path, local_names())


async def test_a_disk_that_takes_nothing_leaves_the_leaf_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["192.168.1.7"]
    tls = made(tmp_path, hosts)

    def full(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(certificate, "write_atomic", full)
    hosts[:] = ["192.168.1.9"]
    await tls.refresh()
    await met(tls.context, tmp_path / ROOT_FILE, "192.168.1.7")
