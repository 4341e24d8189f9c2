"""The LAN door's certificates: a root for phones to trust, and a leaf for the addresses of this machine.

With the key of a root that a phone trusts, a thief can pose as any site to it. So the root's key signs one
issuer and is forgotten. The issuer's key stays here, and may sign for addresses of a house alone.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sealring.edge.access.edge_tls import EdgeTls
from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.identity import private_pem
from sealring.mesh.errors import ConfigError
from sealring.mesh.pki.authority import unsigned
from sealring.mesh.system.files import create_exclusive, read_secret, write_atomic
from sealring.mesh.system.networks import HOUSE

log = structlog.get_logger()

ROOT_FILE = "sealring-lan.crt"
"""What phones and laptops trust. Its name is what people see of it."""

_AUTHORITY_FILE, _SERVED_FILE = "authority.pem", "served.pem"
_LIFE, _DAY = timedelta(days=365), timedelta(days=1)
"""A leaf's life: Apple's systems take 825 days at most, some browsers 398."""

_ALWAYS = datetime(2020, 1, 1, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)
"""From when to when root and issuer are good: no clock that is wrong has phones trust another one."""

_SERVERS = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])

Key = ec.EllipticCurvePrivateKey


class LanTls(EdgeTls):
    """The leaf that is served: issued anew at half of its life, and when this machine has other addresses."""

    def __init__(
        self, folder: Path, name: str, hosts: Callable[[], Sequence[str]], *, clock: Clock = wall_clock
    ) -> None:
        """Makes what there is not yet in `folder`. `name` is what phones call the root, `hosts` are the
        addresses and names at which the door is open.

        Raises ConfigError (BAD_TLS_FILES, SECRET_FILE_UNSAFE), OSError.
        """
        self._file = folder / _SERVED_FILE  # one file: key and certificate change together
        self._hosts = hosts
        self._clock = clock
        self._issuer, self._issuer_key = _authority(folder, name)
        self._renew()
        super().__init__(self._file, self._file)

    async def refresh(self) -> None:
        """Issues another leaf where one is due, and takes it up."""
        try:
            self._renew()
        except OSError as error:
            log.error("lan_certificate_not_renewed", error=error)
        await super().refresh()

    def _renew(self) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC)
        names = [_general(one) for one in dict.fromkeys((*self._hosts(), "localhost", "127.0.0.1"))]
        if self._serves(names, now):
            return
        key = ec.generate_private_key(ec.SECP256R1())
        issuer, by = self._issuer, self._issuer_key
        leaf = unsigned(
            _named("sealring"), key.public_key(), issuer.subject, by.public_key(), (now - _DAY, now + _LIFE)
        )
        leaf = leaf.add_extension(x509.SubjectAlternativeName(names), False).add_extension(_SERVERS, False)
        made = leaf.sign(by, hashes.SHA256())
        write_atomic(self._file, private_pem(key) + _pem(made) + _pem(self._issuer))
        log.info("lan_certificate_issued", hosts=[str(one.value) for one in names])

    def _serves(self, names: Collection[x509.GeneralName], now: datetime) -> bool:
        """Whether the file's leaf is of this issuer, for these names, and less than half of its life is
        over."""
        try:
            leaf = x509.load_pem_x509_certificate(read_secret(self._file))
            leaf.verify_directly_issued_by(self._issuer)
            found: Any = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except Exception:  # it is missing, damaged, or of another issuer
            return False
        begin, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
        return set(found) == set(names) and begin <= now < begin + (end - begin) / 2


def local_names() -> list[str]:
    """The name of this machine by multicast DNS, where it has one, as Macs do."""
    return re.findall(r"\A[a-z0-9-]{1,63}\.local\Z", socket.gethostname().lower())


def fingerprint(root: Path) -> str:
    """The SHA-256 of the certificate in a file, as phones show it."""
    return x509.load_pem_x509_certificate(root.read_bytes()).fingerprint(hashes.SHA256()).hex(" ").upper()


def _authority(folder: Path, name: str) -> tuple[x509.Certificate, Key]:
    """The issuer and its key, which are made if there are none."""
    file = folder / _AUTHORITY_FILE
    try:
        if not file.exists():
            create_exclusive(file, _made(name))
        kept = read_secret(file)
        issuer, root = x509.load_pem_x509_certificates(kept)
        key = serialization.load_pem_private_key(kept, None)
    except ValueError:
        raise ConfigError(
            f"{file} is damaged",
            hint="remove it and start the gateway again; phones then have to trust another root",
            reason="BAD_TLS_FILES",
        ) from None
    assert isinstance(key, Key)
    write_atomic(folder / ROOT_FILE, _pem(root), mode=0o644)
    return issuer, key


def _made(name: str) -> bytes:
    """A new authority as PEM: the issuer's key, the issuer, the root. The root's key is in nothing."""
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    permitted = [x509.DNSName("local"), x509.DNSName("localhost"), *map(x509.IPAddress, HOUSE)]
    named, by = _named(name), root_key.public_key()
    root, issuer = (
        unsigned(subject, owner.public_key(), named, by, _ALWAYS, signs)
        .add_extension(x509.NameConstraints(permitted, None), critical=True)
        .add_extension(_SERVERS, critical=False)  # names bind neither code nor mail
        .sign(root_key, hashes.SHA256())
        for subject, owner, signs in ((named, root_key, 1), (_named(f"issuer of {name}"), key, 0))
    )
    return private_pem(key) + _pem(issuer) + _pem(root)


def _named(name: str) -> x509.Name:
    """A name as it may be by RFC 5280, appendix A.1: of 64 letters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
