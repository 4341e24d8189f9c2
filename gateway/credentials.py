"""The gateway's own standing in its cluster: identity, rotating certificate, a locked state folder."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import structlog
from cryptography import x509

from mesh.certificates import LeafKey, Role, check_issued_by, load_certificate, needs_rotation
from mesh.clock import Clock, wall_clock
from mesh.errors import CertificateError, ConfigError, Conflict, SealringError
from mesh.identity import Label, Signer, SoftwareSigner, member_id
from mesh.memberstate import (
    IDENTITY_KEY,
    MemberState,
    load_member_state,
    parse_pem_leaf,
    save_root,
    save_tls,
)
from mesh.rootmeta import RootMetadata, decode_chain, verify_root_chain
from mesh.status import from_rpc_error
from mesh.tls import PeerChannel, TlsMaterial, TlsStore
from sealring.v1 import membership_pb2, membership_pb2_grpc

log = structlog.get_logger()

_LOOK_SECONDS = 60.0
_RENEW_SECONDS = 30.0


@contextmanager
def lock_state(folder: Path) -> Iterator[None]:
    """Holds the state folder until the end of the block; made first. Raises Conflict (STATE_IN_USE)."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise Conflict(
            f"another process uses the state folder {folder}",
            hint="stop it, or name another folder",
            reason="STATE_IN_USE",
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def load_gateway(folder: Path) -> tuple[MemberState, Signer]:
    """The enrolment in `folder` and its identity. Raises ConfigError (NOT_ENROLLED, MEMBER_STATE_CORRUPT)."""
    state = load_member_state(folder)
    try:
        signer = SoftwareSigner.load(folder / IDENTITY_KEY)
    except FileNotFoundError:
        raise _not_ours(folder) from None
    if state.peer.role is not Role.GATEWAY or member_id(signer.public_key) != state.peer.id:
        raise _not_ours(folder)
    return state, signer


def _not_ours(folder: Path) -> ConfigError:
    return ConfigError(
        f"the enrolment in {folder} and its identity key do not belong together, or are not a gateway's",
        hint="restore the folder from a backup, or join again in another one",
        reason="MEMBER_STATE_CORRUPT",
    )


class CertificateKeeper:
    """Gets a new key and certificate at half life, and newer root metadata with it; streams go on."""

    def __init__(
        self,
        folder: Path,
        state: MemberState,
        store: TlsStore,
        signer: Signer,
        channel: PeerChannel,
        on_root: Callable[[RootMetadata], None],
        *,
        clock: Clock = wall_clock,
    ) -> None:
        self._folder = folder
        self._state = state
        self._store = store
        self._signer = signer
        self._channel = channel
        self._on_root = on_root
        self._clock = clock
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Looks once a minute; a renewal that fails is tried again at the next look."""
        while True:
            if needs_rotation(self._store.current()[1].certificate, self._clock()):
                try:
                    await self.renew()
                except SealringError as error:
                    log.warning("certificate not renewed", reason=error.reason)
            await asyncio.sleep(_LOOK_SECONDS * random.uniform(0.5, 1.0))  # noqa: S311

    async def renew(self) -> None:
        """Raises CertificateError, RosterError, Unavailable; then nothing has changed."""
        async with self._turn:
            leaf = LeafKey()
            csr = leaf.csr()
            signature = await asyncio.to_thread(self._signer.sign, Label.CSR, csr)
            stub = membership_pb2_grpc.CertificatesStub(self._channel.get())
            request = membership_pb2.RenewRequest(csr=csr, signature=signature)
            try:
                answer = await stub.Renew(request, timeout=_RENEW_SECONDS)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            root, material = self._verify(answer, leaf, csr)
            await asyncio.to_thread(self._keep, root, material)
            self._store.replace(material)
            self._state = replace(self._state, root=root, tls=material)
            self._on_root(root)
            log.info("certificate renewed")

    def _verify(
        self, answer: membership_pb2.RenewResponse, leaf: LeafKey, csr: bytes
    ) -> tuple[RootMetadata, TlsMaterial]:
        now = self._clock()
        root = verify_root_chain(decode_chain(answer.root_metadata), self._state.root_sha256, now=now)
        if root.version < self._state.root.version:
            raise CertificateError("coordinator sent older root metadata", reason="ROOT_ROLLBACK")
        try:
            der = parse_pem_leaf(answer.certificate_chain)
        except ValueError:
            raise CertificateError("certificate is malformed", reason="BAD_CERTIFICATE") from None
        certificate = load_certificate(der)
        same_key = certificate.public_key() == x509.load_der_x509_csr(csr).public_key()
        if check_issued_by(certificate, root.authorities, now=now) != self._state.peer or not same_key:
            raise CertificateError("certificate is not for this gateway", reason="BAD_CERTIFICATE")
        return root, TlsMaterial(leaf.private_pem(), der, root.authorities)

    def _keep(self, root: RootMetadata, material: TlsMaterial) -> None:
        save_root(self._folder, root)
        save_tls(self._folder, material)
