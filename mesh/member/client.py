"""A member's certificate as a client of its cluster, for programs that have none of the member's keys.

The daemon keeps it in a folder of its own. Programs with it may ask gateways and look at the cluster, for as
long as the machine is a member and the certificate is valid.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import structlog

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.identity import Signer
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import SealringError
from sealring.mesh.member.certificate_keeper import renewed
from sealring.mesh.member.coordinators import Coordinators
from sealring.mesh.member.state import MachineState, save_description, save_root, save_tls
from sealring.mesh.pki.certificates import LeafKey, PeerIdentity, Role, TlsMaterial, is_due
from sealring.mesh.pki.root import RootMetadata
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.system.files import make_private, unwritable
from sealring.v1 import membership_pb2, membership_pb2_grpc

log = structlog.get_logger()

LOOK_SECONDS = 30.0
FIRST_SECONDS = 0.5
"""Before the first attempt; each later pause is twice as long, up to LOOK_SECONDS."""

_RENEW_SECONDS = 30.0


class ClientKeeper:
    """Gets the certificate at the start, and renews it at half of its life."""

    def __init__(
        self,
        folder: Path,
        state: MachineState,
        signer: Signer,
        coordinators: Coordinators,
        *,
        clock: Clock = wall_clock,
    ) -> None:
        """`state` is the member's, in whose place `folder` gets that of its client."""
        self._folder = folder
        self._state = replace(state, peer=PeerIdentity(state.peer.cluster, Role.CLIENT, state.peer.id))
        self._signer = signer
        self._coordinators = coordinators
        self._clock = clock
        self._certificate = b""

    async def run(self) -> None:
        """Works for ever. An error is logged, and does not end the daemon."""
        pause = FIRST_SECONDS
        # The session finds the coordinator's address meanwhile.
        await self._coordinators.pause(self._coordinators.channel.address, pause)
        while True:
            looked_at = self._coordinators.channel.address
            try:
                if not self._certificate or is_due(self._certificate, self._clock()):
                    await self._renew()
                elif self._state.coordinator != self._coordinators.channel.address:
                    await self._keep(self._state.root, self._state.tls)
            except SealringError as error:
                log.info("no_client_certificate", reason=error.reason, why=error.message)
            pause = LOOK_SECONDS if self._certificate else min(2 * pause, LOOK_SECONDS)
            await self._coordinators.pause(looked_at, pause)

    async def _renew(self) -> None:
        leaf = LeafKey()
        csr = leaf.csr()
        signature = await asyncio.to_thread(self._signer.sign, Label.CSR, csr)
        stub = membership_pb2_grpc.CertificatesStub(self._coordinators.channel.get())
        request = membership_pb2.RenewRequest(csr=csr, signature=signature, client=True)
        try:
            answer = await stub.Renew(request, timeout=_RENEW_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        root, material = renewed(answer, leaf, csr, self._state, self._signer.public_key, self._clock())
        await self._keep(root, material)
        self._certificate = material.certificate
        log.info("client_certificate_renewed")

    async def _keep(self, root: RootMetadata, material: TlsMaterial) -> None:
        """Stores it with the address at which the coordinator answers now."""
        address = self._coordinators.channel.address
        self._state = replace(self._state, root=root, tls=material, coordinator=address)
        try:
            await asyncio.to_thread(_save, self._folder, self._state)
        except OSError as error:
            raise unwritable(self._folder, error) from None


def _save(folder: Path, state: MachineState) -> None:
    """Unlike `save_machine_state` it leaves what a program may read meanwhile."""
    make_private(folder)
    save_root(folder, state.root)
    save_tls(folder, state.tls)
    save_description(folder, state.peer, state.name, state.coordinator, state.root_sha256, join=state.join)
