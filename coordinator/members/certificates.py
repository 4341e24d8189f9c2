"""Issues renewed certificates to members and gateways."""

from __future__ import annotations

import structlog

from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredMember
from sealring.mesh.clock import Clock
from sealring.mesh.crypto.keys import Label
from sealring.mesh.member.proof import by_roster_keys, refusal, renewal
from sealring.mesh.pki.certificates import PeerIdentity, to_pem
from sealring.v1 import membership_pb2

log = structlog.get_logger()


class Issuer:
    """Issues certificates to members and gateways. The operator's is renewed in its bundle."""

    def __init__(self, keys: ClusterKeys, settings: CoordinatorSettings, *, clock: Clock) -> None:
        self._keys = keys
        self._sign = by_roster_keys(keys.rosters, Label.RENEWAL)
        self._settings = settings
        self._clock = clock

    def renew(self, member: StoredMember, csr: bytes, *, by: str) -> membership_pb2.RenewResponse:
        """A certificate for the key in `csr`, and the proof that it comes from here.

        Raises CertificateError (BAD_CSR).
        """
        root = self._keys.root_chain
        certificate = self._keys.ca.issue(
            csr,
            PeerIdentity(self._keys.root.cluster, member.role, member.id),
            lifetime=self._settings.certificate_lifetime,
            now=self._clock(),
        )
        log.info("certificate_renewed", member=member.id, role=member.role, by=by)
        chain = to_pem(certificate)
        return membership_pb2.RenewResponse(
            certificate_chain=chain, root_metadata=root, proof=self._sign(renewal(csr, chain, root))
        )

    def refuse(self, identity_key: bytes, csr: bytes) -> membership_pb2.RenewResponse:
        """The proof that a key is not enrolled, so that its holder stops asking."""
        return membership_pb2.RenewResponse(
            root_metadata=self._keys.root_chain, proof=self._sign(refusal(csr, identity_key))
        )
