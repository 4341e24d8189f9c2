"""How long a server lets a stream go on: until its caller's certificate expires, or a newer one shown on it.

gRPC sees the certificate of the handshake alone, and a connection never shows another. So a caller that has
renewed says so on its open streams, with a proof that its identity key makes for each of them, and what says
nothing ends when the last certificate does. Being thrown out ends streams as before, whatever was proved.
"""

from __future__ import annotations

from collections.abc import Callable

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import Unauthenticated
from sealring.mesh.member.proof import CalledProof, of_identity
from sealring.mesh.pki.certificates import PeerIdentity, check_issued_by, expires_at, load_certificate
from sealring.mesh.rpc.interceptor import Lease, current_lease
from sealring.v1 import proof_pb2


class Tenure:
    """One stream whose caller has proved who it is. Make it where the stream is handled."""

    def __init__(
        self,
        proof: CalledProof,
        caller: PeerIdentity,
        identity_key: Callable[[], bytes],
        authorities: Callable[[], tuple[bytes, ...]],
        *,
        clock: Clock = wall_clock,
    ) -> None:
        """`identity_key` gives the caller's as it is known now, or raises the SealringError why not."""
        self._proof = proof
        self._caller = caller
        self._identity_key = identity_key
        self._authorities = authorities
        self._clock = clock
        self._lease: Lease = current_lease()

    def renew(self, renewal: proof_pb2.ProofRenewal) -> None:
        """Lets the stream go on until the caller's new certificate ends.

        Raises Unauthenticated (BAD_PROOF), CertificateError, and what `identity_key` raises.
        """
        self._proof.check_renewal(renewal, of_identity(self._identity_key()))
        certificate = load_certificate(renewal.certificate)
        if check_issued_by(certificate, self._authorities(), now=self._clock()) != self._caller:
            raise Unauthenticated("the caller shows somebody else's certificate", reason="BAD_PROOF")
        self._lease.extend(expires_at(renewal.certificate))
