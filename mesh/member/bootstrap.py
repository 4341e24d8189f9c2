"""First contact: learn a cluster's root metadata from nothing but an address and a pinned root fingerprint.

The coordinator's TLS leaf carries the chain of root metadata in a private extension. A newcomer completes a
TLS handshake, sends nothing, and reads the leaf. It checks the chain against its pin, and the leaf against
the authority that the root names. Only then it opens a gRPC channel that trusts this authority.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cryptography import x509

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.encoding import FormatError, decode_base32, encode_base32
from sealring.mesh.errors import (
    CertificateError,
    DeadlineExceeded,
    InvalidInput,
    RosterError,
    SealringError,
    Unavailable,
)
from sealring.mesh.pki.certificates import (
    MAX_CERTIFICATE_BYTES,
    ROOT_EXTENSION,
    Role,
    check_issued_by,
    load_certificate,
)
from sealring.mesh.pki.root import MAX_CHAIN_BYTES, RootMetadata, decode_chain, follow_root, verify_root_chain
from sealring.mesh.rpc.reach import first_of
from sealring.mesh.rpc.transport import transport
from sealring.mesh.system.addresses import format_address, parse_address

TOKEN_ID_BYTES = 10
TOKEN_SECRET_BYTES = 32
MAX_TOKEN_ADDRESSES = 4
MAX_TOKEN_CHARACTERS = 614
_MAX_ADDRESSES_BYTES = 300
_CHECK_BYTES = 4
_TOKEN = re.compile(r"(sr2\.([a-z2-7]{52})\.([a-z2-7]{16})\.([a-z2-7]{52}))\.([a-z2-7]{7,487})\Z")


@dataclass(frozen=True)
class JoinToken:
    """A join token: the pinned root fingerprint, the token's id, its secret (never shown by repr), and the
    coordinator's join addresses (host:port, the best first).

    The addresses are hints that nothing vouches for: the server found there has to show the pinned root.
    """

    root_sha256: bytes
    token_id: str
    secret: bytes
    addresses: tuple[str, ...]

    @classmethod
    def generate(cls, root_sha256: bytes, addresses: Sequence[str]) -> Self:
        """A fresh token for the cluster with this root fingerprint; as many of the addresses as it holds.

        Raises InvalidInput (BAD_ADDRESS) when it would hold none.
        """
        identifier = encode_base32(secrets.token_bytes(TOKEN_ID_BYTES))
        return cls(root_sha256, identifier, secrets.token_bytes(TOKEN_SECRET_BYTES), _fitting(addresses))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `sr2.<root hash>.<id>.<secret>.<check and addresses>` (base32, one spelling).

        Raises InvalidInput (BAD_TOKEN).
        """
        match = _TOKEN.match(text)
        try:
            if match is None:
                raise FormatError("not a token")
            root_sha256 = decode_base32(match[2], size=32)
            decode_base32(match[3], size=TOKEN_ID_BYTES)
            secret = decode_base32(match[4], size=TOKEN_SECRET_BYTES)
            packed = decode_base32(match[5], size=len(match[5]) * 5 // 8)
            if packed[:_CHECK_BYTES] != _check(match[1], packed[_CHECK_BYTES:]):
                raise FormatError("a character is wrong or missing")
            addresses = tuple(packed[_CHECK_BYTES:].decode("ascii").split(","))
            if not addresses or _fitting(addresses) != addresses:
                raise FormatError("its addresses are malformed")
        except (ValueError, InvalidInput):  # FormatError, text that is not ASCII; a malformed address
            raise InvalidInput(
                "the join token is malformed",
                reason="BAD_TOKEN",
                hint="copy all of it, from sr2 to its last character, and run the same release everywhere",
            ) from None
        return cls(root_sha256, match[3], secret, addresses)

    def format(self) -> str:
        """The token as text, secret included: for the operator's eyes only."""
        head = f"sr2.{encode_base32(self.root_sha256)}.{self.token_id}.{encode_base32(self.secret)}"
        addresses = ",".join(self.addresses).encode("ascii")
        return f"{head}.{encode_base32(_check(head, addresses) + addresses)}"

    def __repr__(self) -> str:
        return f"JoinToken({self.token_id})"


def _check(head: str, addresses: bytes) -> bytes:
    """A checksum against copying errors, so that their message differs from a refusal; it protects
    nothing."""
    return hashlib.sha256(b"sealring join token v2\x00" + head.encode("ascii") + addresses).digest()[
        :_CHECK_BYTES
    ]


def _fitting(addresses: Sequence[str]) -> tuple[str, ...]:
    """The first addresses, as many as a token holds. Raises InvalidInput (BAD_ADDRESS)."""
    fitting: list[str] = []
    for address in addresses:
        host, port = parse_address(address)
        if address != format_address(host, port) or port == 0:
            raise InvalidInput(f"{address[:80]!r} is no address to join at", reason="BAD_ADDRESS")
        if len(fitting) < MAX_TOKEN_ADDRESSES and len(",".join([*fitting, address])) <= _MAX_ADDRESSES_BYTES:
            fitting.append(address)
    if not fitting:
        raise InvalidInput("a token needs an address to join at", reason="BAD_ADDRESS")
    return tuple(fitting)


async def find_coordinator(
    root_sha256: bytes, addresses: Sequence[str], *, deadline: float, clock: Clock = wall_clock
) -> tuple[str, RootMetadata]:
    """The first of these addresses (one at least) where the coordinator of the pinned root answers, and the
    verified root metadata.

    They are tried as in `mesh/rpc/reach.py`, each for `deadline` seconds, so that a dead one costs nothing.
    Raises as `fetch_root`: the error of the first server that answered, or of any address if none did.
    """
    failures: list[SealringError] = []

    async def attempt(address: str) -> tuple[str, RootMetadata] | None:
        host, port = parse_address(address)
        try:
            return address, await fetch_root(host, port, root_sha256, deadline=deadline, clock=clock)
        except SealringError as error:
            failures.append(error)
            return None

    found = await first_of(addresses, attempt)
    if found is None:
        raise min(failures, key=lambda one: isinstance(one, Unavailable | DeadlineExceeded))
    return found


async def claimed_root(
    host: str, port: int, *, deadline: float, clock: Clock = wall_clock
) -> tuple[bytes, RootMetadata]:
    """The fingerprint of the root that the coordinator at `host:port` shows, and its metadata.

    Nothing says yet that it is the root that the caller wants. Raises as `fetch_root`.
    """
    leaf = await fetch_leaf(host, port, deadline=deadline)
    chain = decode_chain(_root_extension(load_certificate(leaf)))
    if not chain:
        raise RosterError("root metadata chain has a wrong length", reason="ROOT_CHAIN_LENGTH")
    pin = follow_root(chain[0], None).fingerprint
    return pin, verify_coordinator_leaf(leaf, pin, now=clock())


async def fetch_root(
    host: str, port: int, root_sha256: bytes, *, deadline: float, clock: Clock = wall_clock
) -> RootMetadata:
    """The verified root metadata of the coordinator at `host:port`, within `deadline` seconds.

    Nothing but a TLS handshake is sent. Raises as `fetch_leaf`, RosterError (ROOT_*), CertificateError
    (NO_ROOT_METADATA, NOT_ISSUED_HERE, ...).
    """
    leaf = await fetch_leaf(host, port, deadline=deadline)
    return verify_coordinator_leaf(leaf, root_sha256, now=clock())


async def fetch_leaf(host: str, port: int, *, deadline: float) -> bytes:
    """The certificate (DER) of whatever answers at `host:port`, not verified, within `deadline` seconds.

    Raises Unavailable (COORDINATOR_UNREACHABLE), DeadlineExceeded (COORDINATOR_SILENT), CertificateError
    (BAD_CERTIFICATE).
    """
    try:
        async with asyncio.timeout(deadline):
            return await _read_leaf(host, port)
    except TimeoutError:
        raise DeadlineExceeded(
            f"coordinator {host}:{port} did not finish a TLS handshake in time", reason="COORDINATOR_SILENT"
        ) from None
    except (OSError, ssl.SSLError, EOFError) as error:
        raise Unavailable(
            f"coordinator {host}:{port} cannot be reached",
            reason="COORDINATOR_UNREACHABLE",
            hint="check the address, the port and that the coordinator runs",
        ) from error


def verify_coordinator_leaf(leaf: bytes, root_sha256: bytes, *, now: float) -> RootMetadata:
    """The root metadata inside a coordinator's leaf (DER), if chain, pin, times and issuer all hold.

    Raises RosterError (ROOT_*) and CertificateError.
    """
    certificate = load_certificate(leaf)
    root = verify_root_chain(decode_chain(_root_extension(certificate)), root_sha256, now=now)
    peer = check_issued_by(certificate, root.authorities, now=now)
    if peer.role is not Role.COORDINATOR or peer.cluster != root.cluster:
        raise CertificateError("certificate is not the coordinator's", reason="NOT_COORDINATOR")
    return root


def _root_extension(certificate: x509.Certificate) -> bytes:
    try:
        value = certificate.extensions.get_extension_for_oid(ROOT_EXTENSION).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        raise CertificateError(
            "server's certificate holds no root metadata",
            reason="NO_ROOT_METADATA",
            hint="the address is not that of a coordinator",
        ) from None
    if not isinstance(value, x509.UnrecognizedExtension) or len(value.value) > MAX_CHAIN_BYTES:
        raise RosterError("root metadata chain is too long", reason="ROOT_CHAIN_LENGTH")
    return value.value


async def _read_leaf(host: str, port: int) -> bytes:
    leaf = await (transport.get().leaf or _leaf_over_tcp)(host, port)
    if leaf is None or len(leaf) > MAX_CERTIFICATE_BYTES:
        raise CertificateError("server presented no usable certificate", reason="BAD_CERTIFICATE")
    return leaf


async def _leaf_over_tcp(host: str, port: int) -> bytes | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="")
    try:
        session = writer.get_extra_info("ssl_object")
        leaf: bytes | None = session.getpeercert(binary_form=True)
        return leaf
    finally:
        writer.transport.abort()
