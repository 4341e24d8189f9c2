"""The Certificates service: a new mTLS certificate for the caller's own identity, and for no other."""

from __future__ import annotations

from typing import Any

import structlog

from coordinator.access import Access
from coordinator.keys import ClusterKeys
from coordinator.settings import CoordinatorSettings
from coordinator.store import Store
from mesh.certificates import Role, to_pem
from mesh.clock import Clock
from mesh.errors import InvalidInput
from mesh.identity import Label, verify
from mesh.proof import by_roster_keys, renewal
from sealring.v1 import membership_pb2, membership_pb2_grpc

_MAX_CSR_BYTES = 4096
log = structlog.get_logger()


class CertificatesService(membership_pb2_grpc.CertificatesServicer):
    """Renews the certificates of members and gateways; the operator's is renewed in its bundle."""

    def __init__(
        self, access: Access, store: Store, keys: ClusterKeys, settings: CoordinatorSettings, *, clock: Clock
    ) -> None:
        self._access = access
        self._store = store
        self._keys = keys
        self._sign = by_roster_keys(keys.rosters, Label.RENEWAL)
        self._settings = settings
        self._clock = clock

    async def Renew(  # noqa: N802
        self, request: membership_pb2.RenewRequest, context: Any
    ) -> membership_pb2.RenewResponse:
        """Raises Unauthenticated (BAD_SIGNATURE) unless the caller's identity key signed the request."""
        peer = self._access.require(context, Role.MEMBER, Role.GATEWAY)
        if not 1 <= len(request.csr) <= _MAX_CSR_BYTES:
            raise InvalidInput("signing request has a wrong length", reason="BAD_CSR", param="csr")
        member = self._store.members.get(peer.id)
        verify(member.identity_key, Label.CSR, request.csr, request.signature)
        certificate = self._keys.ca.issue(
            request.csr, peer, lifetime=self._settings.certificate_lifetime, now=self._clock()
        )
        log.info("certificate_renewed", member=peer.id, role=peer.role)
        chain, root = to_pem(certificate), self._keys.root_chain
        return membership_pb2.RenewResponse(
            certificate_chain=chain, root_metadata=root, proof=self._sign(renewal(request.csr, chain, root))
        )
