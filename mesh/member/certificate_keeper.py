"""Keeps an enrolled machine's mTLS certificate fresh: renewed at half life, while streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import structlog

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.identity import Signer
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import CertificateError, SealringError
from sealring.mesh.member.coordinators import Coordinators
from sealring.mesh.member.proof import check_proof, of_coordinator, refusal, renewal
from sealring.mesh.member.renewal import renew_by_identity
from sealring.mesh.member.roster_keeper import removed
from sealring.mesh.member.state import MachineState, own_material, save_root, save_tls
from sealring.mesh.pki.certificates import LeafKey, TlsMaterial, expires_at, is_due, renewal_due, valid_at
from sealring.mesh.pki.root import RootMetadata, decode_chain, verify_root_chain
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import TlsStore
from sealring.mesh.system.addresses import format_address, parse_address
from sealring.mesh.system.files import unwritable
from sealring.v1 import membership_pb2, membership_pb2_grpc

log = structlog.get_logger()

_LOOK_SECONDS = 30.0
_ENDED_LOOK_SECONDS = 2.0
_RENEW_SECONDS = 30.0


class CertificateKeeper:
    """Renews through the coordinator and stores the result; a crash leaves a matching pair.

    A valid certificate is renewed over mTLS, any other by the identity key alone
    (`mesh/member/renewal.py`).
    """

    def __init__(
        self,
        folder: Path,
        state: MachineState,
        store: TlsStore,
        signer: Signer,
        coordinators: Coordinators,
        on_root: Callable[[RootMetadata], None],
        *,
        clock: Clock = wall_clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._folder = folder
        self._state = state
        self._store = store
        self._signer = signer
        self._coordinators = coordinators
        self._on_root = on_root
        self._clock = clock
        self._sleep = sleep
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Renews at half of the certificate's life, and retries.

        It looks at the clock every 30 s, since timers stand still while a machine is suspended. While the
        certificate is not valid it looks every 2 s, since the machine cannot connect to any other. Raises
        PermissionDenied (REMOVED) when the coordinator has signed that this machine is not enrolled.
        """
        while True:
            if is_due(self._certificate, self._clock()):
                try:
                    await self.renew()
                except SealringError as error:
                    if error.reason == "REMOVED":
                        raise
                    log.warning(
                        "certificate_not_renewed", reason=error.reason, why=error.message, hint=error.hint
                    )
            certificate, now = self._certificate, self._clock()
            next_time = expires_at(certificate) if is_due(certificate, now) else renewal_due(certificate)
            pause = next_time - now if valid_at(certificate, now) else 0.0
            await self._sleep(min(_LOOK_SECONDS, max(_ENDED_LOOK_SECONDS, pause)))

    async def renew(self) -> None:
        """Gets, verifies, stores and uses a new certificate, and newer root metadata if there is any.

        Raises CertificateError, RosterError, Unauthenticated (BAD_PROOF), PermissionDenied (REMOVED, or a
        refusal without proof), Unavailable, FailedPrecondition (NO_JOIN_ADDRESS), ConfigError
        (STATE_UNWRITABLE).
        """
        async with self._turn:
            leaf = LeafKey()
            csr = leaf.csr()
            valid = valid_at(self._certificate, self._clock())
            answer = await (self._over_mtls(csr) if valid else self._by_identity(csr))
            root, material = renewed(answer, leaf, csr, self._state, self._signer.public_key, self._clock())
            await asyncio.to_thread(self._keep, root, material)
            self._store.replace(material)
            self._state = replace(self._state, root=root, tls=material)
            self._on_root(root)
            log.info("certificate_renewed", by_identity=not valid)

    @property
    def _certificate(self) -> bytes:
        return self._store.current()[1].certificate

    async def _over_mtls(self, csr: bytes) -> membership_pb2.RenewResponse:
        signature = await asyncio.to_thread(self._signer.sign, Label.CSR, csr)
        stub = membership_pb2_grpc.CertificatesStub(self._coordinators.channel.get())
        request = membership_pb2.RenewRequest(csr=csr, signature=signature)
        try:
            return await stub.Renew(request, timeout=_RENEW_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def _by_identity(self, csr: bytes) -> membership_pb2.RenewResponse:
        pin = self._state.root_sha256
        return await renew_by_identity(self._join_addresses(), pin, self._signer, csr, clock=self._clock)

    def _join_addresses(self) -> list[str]:
        """The address of the enrolment, and its port at every host where the coordinator may be now."""
        join = self._state.join
        if not join:
            return []
        port = parse_address(join)[1]
        hosts = (parse_address(one)[0] for one in self._coordinators.addresses)
        return list(dict.fromkeys((join, *(format_address(host, port) for host in hosts))))

    def _keep(self, root: RootMetadata, material: TlsMaterial) -> None:
        try:
            save_root(self._folder, root)
            save_tls(self._folder, material)
        except OSError as error:
            raise unwritable(self._folder, error) from None


def renewed(
    answer: membership_pb2.RenewResponse,
    leaf: LeafKey,
    csr: bytes,
    state: MachineState,
    identity_key: bytes,
    now: float,
) -> tuple[RootMetadata, TlsMaterial]:
    """The root and the TLS material in a coordinator's answer to a signing request of the peer of `state`.

    Raises CertificateError, RosterError, Unauthenticated (BAD_PROOF), PermissionDenied (REMOVED).
    """
    root = verify_root_chain(decode_chain(answer.root_metadata), state.root_sha256, now=now)
    if root.version < state.root.version:
        raise CertificateError("coordinator sent older root metadata", reason="ROOT_ROLLBACK")
    refused = not answer.certificate_chain
    if refused:
        said = refusal(csr, identity_key)
    else:
        said = renewal(csr, answer.certificate_chain, answer.root_metadata)
    check_proof(said, answer.proof, of_coordinator(root, Label.RENEWAL))
    if refused:
        raise removed()
    return root, own_material(answer.certificate_chain, leaf, state.peer, root.authorities, now=now)
