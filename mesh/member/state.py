"""The state folder of an enrolled machine, written so that a crash never leaves half an enrolment.

It holds `tls.key tls.pem root.dsse member.json`, and for members and gateways also `identity.key roster.dsse
roster-state.json`. `member.json` is written last: a folder with it is enrolled.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from sealring.mesh.crypto.encoding import Fields, FormatError, canonical_json, parse_json_object
from sealring.mesh.errors import AlreadyExists, CertificateError, ConfigError, SealringError
from sealring.mesh.pki.certificates import (
    LeafKey,
    PeerIdentity,
    Role,
    TlsMaterial,
    check_issued_by,
    load_certificate,
    to_pem,
)
from sealring.mesh.pki.root import RootMetadata, decode_chain, encode_chain, follow_chain
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.files import make_private, read_bounded, read_secret, write_atomic
from sealring.mesh.system.paths import CLIENT_FOLDER, MEMBER_FILE, is_enrolled

IDENTITY_KEY = "identity.key"
ROSTER = "roster.dsse"
ROSTER_STATE = "roster-state.json"
_TLS_KEY = "tls.key"
_NEXT_TLS_KEY = "tls.key.next"
_TLS_CERTIFICATE = "tls.pem"
_ROOT = "root.dsse"
_NAMES = ("member_id", "cluster", "role", "name", "coordinator", "join", "root_sha256")
_MAX_BYTES = 1 << 17


@dataclass(frozen=True)
class MachineState:
    """An enrolment: the machine, its cluster, and the coordinator's main address.

    `join` is the join address of the enrolment. The machine renews an expired certificate there. It is empty
    for operators and for enrolments by older releases.
    """

    peer: PeerIdentity
    name: str
    coordinator: str
    root_sha256: bytes
    root: RootMetadata
    tls: TlsMaterial
    join: str = ""


def check_may_join(folder: Path, root_sha256: bytes) -> None:
    """Requires a folder that is not enrolled, or enrolled in the cluster with this pin: it may join again.

    Raises AlreadyExists (ALREADY_ENROLLED).
    """
    if not is_enrolled(folder):
        return
    try:
        held: bytes | None = load_machine_state(folder).root_sha256
    except SealringError:
        held = None
    if held != root_sha256:
        raise AlreadyExists(
            f"{folder} holds an enrolment in another cluster",
            hint="name another state folder, or give it up: sealring node leave, sealring gateway leave",
            reason="ALREADY_ENROLLED",
        )


def forget_enrolment(folder: Path) -> None:
    """Remove an enrolment, its client's too, and the memory of its rosters; the identity key stays.

    Raises OSError.
    """
    shutil.rmtree(folder / CLIENT_FOLDER, ignore_errors=True)
    tls = (_TLS_KEY, _NEXT_TLS_KEY, _TLS_CERTIFICATE)
    for name in (MEMBER_FILE, *tls, _ROOT, ROSTER, ROSTER_STATE):
        (folder / name).unlink(missing_ok=True)


def save_machine_state(folder: Path, state: MachineState) -> None:
    """Write an enrolment; an earlier one in the folder is void before its first file is replaced."""
    make_private(folder)
    (folder / MEMBER_FILE).unlink(missing_ok=True)
    save_root(folder, state.root)
    save_tls(folder, state.tls)
    save_description(folder, state.peer, state.name, state.coordinator, state.root_sha256, join=state.join)


def save_description(
    folder: Path, peer: PeerIdentity, name: str, coordinator: str, root_sha256: bytes, *, join: str = ""
) -> None:
    """Replace `member.json`."""
    content = {
        "member_id": peer.id,
        "cluster": peer.cluster,
        "role": peer.role,
        "name": name,
        "coordinator": coordinator,
        "join": join,
        "root_sha256": root_sha256.hex(),
    }
    write_atomic(folder / MEMBER_FILE, canonical_json(content) + b"\n")


def save_root(folder: Path, root: RootMetadata) -> None:
    """Replace the root metadata."""
    write_atomic(folder / _ROOT, encode_chain(root.chain))


def save_tls(folder: Path, material: TlsMaterial) -> None:
    """Replace key and certificate; a crash at any point leaves a matching pair."""
    # The order matters. A crash after the first write leaves the old pair whole. After the second, the new
    # certificate finds its key under the name of the next one (`_load_pair`). The rename only tidies up.
    write_atomic(folder / _NEXT_TLS_KEY, material.private_key)
    write_atomic(folder / _TLS_CERTIFICATE, to_pem(material.certificate))
    os.replace(folder / _NEXT_TLS_KEY, folder / _TLS_KEY)


def load_machine_state(folder: Path) -> MachineState:
    """The enrolment in `folder`, its root metadata verified against the pin.

    The root may have expired while the machine was off: callers check its times. Raises ConfigError
    (NOT_ENROLLED, MEMBER_STATE_CORRUPT, SECRET_FILE_UNSAFE), RosterError (ROOT_*).
    """
    if not is_enrolled(folder):
        raise ConfigError(
            f"there is no enrolment in {folder}",
            hint="join a cluster first: sealring join TOKEN, or for a gateway: sealring gateway join TOKEN",
            reason="NOT_ENROLLED",
        )
    try:
        described = parse_json_object(read_secret(folder / MEMBER_FILE), max_bytes=_MAX_BYTES)
        fields = Fields({"join": "", **described}, _NAMES)
        peer = PeerIdentity(fields.text("cluster"), Role(fields.text("role")), fields.text("member_id"))
        coordinator = fields.text("coordinator", max_length=300)
        parse_address(coordinator)
        join = fields.text("join", min_length=0, max_length=300)
        if join:
            parse_address(join)
        root_sha256 = bytes.fromhex(fields.text("root_sha256", min_length=64, max_length=64))
        chain = decode_chain(read_bounded(folder / _ROOT, max_bytes=_MAX_BYTES))
        private_key, certificate = _load_pair(folder)
        name = fields.text("name")
    except (OSError, ValueError, UnsupportedAlgorithm, SealringError) as error:
        if isinstance(error, SealringError) and error.reason == "SECRET_FILE_UNSAFE":
            raise
        raise ConfigError(
            f"the enrolment in {folder} is corrupt",
            hint="restore it from a backup, or join again after: sealring node leave, sealring gateway leave",
            reason="MEMBER_STATE_CORRUPT",
        ) from error
    root = follow_chain(chain, root_sha256)
    material = TlsMaterial(private_key, certificate, root.authorities)
    return MachineState(peer, name, coordinator, root_sha256, root, material, join)


def parse_pem_leaf(pem: bytes) -> bytes:
    """The first certificate of a PEM chain as DER. Raises ValueError."""
    if len(pem) > _MAX_BYTES:
        raise FormatError("certificate chain is too large")
    try:
        return x509.load_pem_x509_certificates(pem)[0].public_bytes(Encoding.DER)
    except x509.InvalidVersion as error:
        raise FormatError("certificate has an unknown version") from error


def own_material(
    chain: bytes, key: LeafKey, peer: PeerIdentity, authorities: tuple[bytes, ...], *, now: float
) -> TlsMaterial:
    """TLS material from the chain (PEM) that the coordinator issued for this machine and key.

    Raises CertificateError (BAD_CERTIFICATE, and as `check_issued_by`).
    """
    try:
        der = parse_pem_leaf(chain)
    except ValueError:
        raise CertificateError("certificate is malformed", reason="BAD_CERTIFICATE") from None
    certificate = load_certificate(der)
    if check_issued_by(certificate, authorities, now=now) != peer or not key.is_in(certificate):
        raise CertificateError("certificate is not for this machine", reason="BAD_CERTIFICATE")
    return TlsMaterial(key.private_pem(), der, authorities)


def _load_pair(folder: Path) -> tuple[bytes, bytes]:
    """The TLS key and its certificate; the key is the next one after a crash between the two writes.

    A daemon may replace both meanwhile, so they are read again for as long as the certificate changes.
    """
    before = b""
    while True:
        certificate = parse_pem_leaf(read_bounded(folder / _TLS_CERTIFICATE, max_bytes=_MAX_BYTES))
        if certificate == before:
            raise FormatError("no key belongs to the certificate")
        wanted = _spki(x509.load_der_x509_certificate(certificate).public_key())
        for name in (_NEXT_TLS_KEY, _TLS_KEY):
            try:
                key = read_secret(folder / name)
            except FileNotFoundError:
                continue
            if _spki(load_pem_private_key(key, password=None).public_key()) == wanted:
                return key, certificate
        before = certificate


def _spki(key: object) -> bytes:
    public_bytes = getattr(key, "public_bytes")  # noqa: B009 - every public key type has it, no base class says so
    spki: bytes = public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return spki
