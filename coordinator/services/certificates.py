"""The Certificates and Renewal services: a new mTLS certificate for the caller's own identity alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from sealring.coordinator.auth.access import Access
from sealring.coordinator.auth.nonces import Attempts
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredMember
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.crypto.identity import member_id, verify
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import InvalidInput, PermissionDenied, SealringError
from sealring.mesh.member.proof import by_roster_keys, refusal, renewal
from sealring.mesh.member.renewal import renewal_content
from sealring.mesh.member.state import parse_pem_leaf
from sealring.mesh.pki.authority import MAX_CSR_BYTES
from sealring.mesh.pki.certificates import PeerIdentity, Role, key_hash, to_pem
from sealring.mesh.rpc.limits import Buckets
from sealring.v1 import membership_pb2, membership_pb2_grpc


class Issuer:
    """Issues certificates to members and gateways. The operator's is renewed in its bundle."""

    def __init__(self, keys: ClusterKeys, settings: CoordinatorSettings, *, clock: Clock) -> None:
        self._keys = keys
        self._sign = by_roster_keys(keys.rosters, Label.RENEWAL)
        self._settings = settings
        self._clock = clock

    def renew(
        self, member: StoredMember, csr: bytes, *, by: str, role: Role | None = None
    ) -> membership_pb2.RenewResponse:
        """A certificate for the key in `csr`, and the proof that it comes from here. `role` is by default
        that of the member.

        Raises CertificateError (BAD_CSR).
        """
        role = role or Role(member.role)
        root = self._keys.root_chain
        certificate = self._keys.ca.issue(
            csr,
            PeerIdentity(self._keys.root.cluster, role, member.id),
            lifetime=self._settings.certificate_lifetime,
            now=self._clock(),
        )
        log.info("certificate_renewed", member=member.id, role=role, by=by)
        chain = to_pem(certificate)
        return membership_pb2.RenewResponse(
            certificate_chain=chain, root_metadata=root, proof=self._sign(renewal(csr, chain, root))
        )

    def refuse(self, identity_key: bytes, csr: bytes) -> membership_pb2.RenewResponse:
        """The proof that a key is not enrolled, so that its holder stops asking."""
        return membership_pb2.RenewResponse(
            root_metadata=self._keys.root_chain, proof=self._sign(refusal(csr, identity_key))
        )


RENEWALS_AT_ONCE = 20
_RENEWALS_PER_SECOND = 1 / 30
"""Each member looks that often whether its two certificates are due; it needs some two of a kind a day."""

_NONCE_SECONDS = 30
log = structlog.get_logger()


class CertificatesService(membership_pb2_grpc.CertificatesServicer):
    """Renewal over mTLS, for certificates that are still valid."""

    def __init__(self, access: Access, store: Store, issuer: Issuer) -> None:
        self._access = access
        self._store = store
        self._issuer = issuer
        self._rates = Buckets(_RENEWALS_PER_SECOND, RENEWALS_AT_ONCE)

    async def Renew(  # noqa: N802
        self, request: membership_pb2.RenewRequest, context: Any
    ) -> membership_pb2.RenewResponse:
        """Raises Unauthenticated (BAD_SIGNATURE) unless the caller's identity key signed the request, and
        ResourceExhausted (RATE_LIMITED)."""
        roles = [Role.MEMBER] if request.client else [Role.MEMBER, Role.GATEWAY]
        peer = self._access.require(context, *roles)
        self._rates.check(peer.id)
        _check_form(request.csr)
        member = self._store.members.get(peer.id)
        verify(member.identity_key, Label.CSR, request.csr, request.signature)
        if not request.client:
            return self._issuer.renew(member, request.csr, by="mtls")
        answer = self._issuer.renew(member, request.csr, by="mtls", role=Role.CLIENT)
        member.client_key = key_hash(parse_pem_leaf(answer.certificate_chain))
        self._store.members.save(member)
        return answer


class RenewalService(membership_pb2_grpc.RenewalServicer):
    """Renewal without a client certificate, for machines whose own has expired: the identity key alone
    counts.

    A caller without the identity key of an enrolled machine learns nothing, not even which machines are
    enrolled.
    """

    def __init__(
        self,
        cluster: str,
        store: Store,
        issuer: Issuer,
        own_certificate: Callable[[], bytes],
        *,
        clock: Clock = monotonic_clock,
    ) -> None:
        """`own_certificate` returns the present certificate of the coordinator's servers, DER."""
        self._cluster = cluster
        self._store = store
        self._issuer = issuer
        self._own_certificate = own_certificate
        self._attempts = Attempts(lifetime=_NONCE_SECONDS, clock=clock)

    async def GetNonce(  # noqa: N802
        self, request: membership_pb2.GetNonceRequest, context: Any
    ) -> membership_pb2.GetNonceResponse:
        """A fresh nonce for one attempt. Raises ResourceExhausted (RATE_LIMITED)."""
        return self._attempts.begin(context)

    async def RenewByIdentity(  # noqa: N802
        self, request: membership_pb2.RenewByIdentityRequest, context: Any
    ) -> membership_pb2.RenewResponse:
        """A certificate, or for the holder of a key that is not enrolled the proof of that.

        Raises ResourceExhausted (RATE_LIMITED), InvalidInput (BAD_CSR), PermissionDenied (RENEWAL_REFUSED),
        and to the holder of the signing key CertificateError (BAD_CSR).
        """
        self._attempts.admit(context)
        _check_form(request.csr)
        content = renewal_content(
            cluster=self._cluster,
            nonce=request.nonce,
            server_key=key_hash(self._own_certificate()),
            identity_key=request.identity_key,
            csr=request.csr,
        )
        try:
            verify(request.identity_key, Label.CSR_BY_IDENTITY, content, request.signature)
        except SealringError as error:
            raise _refused(error.reason) from None
        identifier = member_id(request.identity_key)
        member = self._store.members.find(identifier)
        if member is None:
            log.warning("renewal_refused", member=identifier, why="NOT_ENROLLED")
            return self._issuer.refuse(request.identity_key, request.csr)
        if not self._attempts.use(request.nonce):  # last: strangers cannot crowd out used nonces
            raise _refused("NONCE")
        return self._issuer.renew(member, request.csr, by="identity")


def _check_form(csr: bytes) -> None:
    if not 1 <= len(csr) <= MAX_CSR_BYTES:
        raise InvalidInput("signing request has a wrong length", reason="BAD_CSR", param="csr")


def _refused(why: str) -> PermissionDenied:
    log.warning("renewal_refused", why=why)
    return PermissionDenied(
        "the renewal was refused",
        hint="the coordinator's log says why; another attempt begins with a new nonce",
        reason="RENEWAL_REFUSED",
    )
