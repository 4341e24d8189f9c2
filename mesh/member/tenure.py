"""The life of a stream on a server: it ends with its caller's certificate, or with a newer one shown on it.

gRPC knows only the handshake's certificate, and a connection never shows another. A caller that has renewed
therefore sends the new certificate on each of its open streams, with a proof by its identity key. A stream
without it ends with the last certificate. Eviction ends streams at once, whatever was proved.
"""

from __future__ import annotations

from collections.abc import Callable

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import Unauthenticated
from sealring.mesh.member.proof import CalledProof, of_identity
from sealring.mesh.pki.certificates import PeerIdentity, check_issued_by, expires_at, load_certificate
from sealring.mesh.rpc.interceptor import Lease, stream_lease
from sealring.v1 import proof_pb2


class Tenure:
    """The life of a stream whose caller has proved its identity. Make it in the task that handles the
    stream."""

    def __init__(
        self,
        proof: CalledProof,
        caller: PeerIdentity,
        identity_key: Callable[[], bytes],
        authorities: Callable[[], tuple[bytes, ...]],
        *,
        clock: Clock = wall_clock,
    ) -> None:
        """`identity_key` returns the caller's key from the newest roster, or raises a SealringError."""
        self._proof = proof
        self._caller = caller
        self._identity_key = identity_key
        self._authorities = authorities
        self._clock = clock
        self._lease: Lease = stream_lease.get()

    def renew(self, renewal: proof_pb2.ProofRenewal) -> None:
        """Extends the stream until the caller's new certificate ends.

        Raises Unauthenticated (BAD_PROOF), CertificateError, and what `identity_key` raises.
        """
        self._proof.check_renewal(renewal, of_identity(self._identity_key()))
        certificate = load_certificate(renewal.certificate)
        if check_issued_by(certificate, self._authorities(), now=self._clock()) != self._caller:
            raise Unauthenticated("the caller shows somebody else's certificate", reason="BAD_PROOF")
        self._lease.extend(expires_at(renewal.certificate))
