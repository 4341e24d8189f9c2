"""The coordinator's part of the proofs that its streams begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store
from sealring.mesh.errors import FailedPrecondition
from sealring.mesh.member.proof import (
    CalledProof,
    Connection,
    HeldRoster,
    Purpose,
    by_roster_keys,
    of_identity,
)
from sealring.mesh.member.tenure import Tenure
from sealring.mesh.pki.certificates import PeerIdentity, key_hash
from sealring.mesh.rpc.tls import peer_certificate
from sealring.v1 import proof_pb2

log = structlog.get_logger()


class Proofs:
    """Answers offers with the roster keys, and checks that callers hold the key that they enrolled with."""

    def __init__(
        self,
        keys: ClusterKeys,
        store: Store,
        publisher: RosterPublisher,
        refused: Callable[[str, str], None],
    ) -> None:
        """`refused` is called with the id of a caller of an incompatible release, and the reason."""
        self._keys = keys
        self._store = store
        self._publisher = publisher
        self._refused = refused
        self._sign = by_roster_keys(keys.rosters)

    def begin(
        self, purpose: Purpose, peer: PeerIdentity, context: Any, offer: proof_pb2.ProofOffer
    ) -> CalledProof:
        """Raises Unauthenticated (NO_PROOF), FailedPrecondition (INCOMPATIBLE_VERSION)."""
        current = self._publisher.current
        connection = Connection(purpose, peer.cluster, peer.id, "", key_hash(peer_certificate(context)))
        held = HeldRoster(current.version, current.hash)
        try:
            return CalledProof(connection, offer, held, root_version=self._keys.root.version)
        except FailedPrecondition as error:
            log.warning("release_refused", caller=peer.id, role=peer.role, why=error.message)
            self._refused(peer.id, str(error))
            raise

    async def answer(self, proof: CalledProof) -> proof_pb2.ProofAnswer:
        """The coordinator's own proof, signed by every roster key that it holds."""
        return await proof.answer(self._sign)

    def check(self, proof: CalledProof, peer: PeerIdentity, finish: proof_pb2.ProofFinish) -> Tenure:
        """How long the stream goes on. Raises Unauthenticated (BAD_PROOF), NotFound."""

        def identity_key() -> bytes:
            return self._store.members.get(peer.id).identity_key

        proof.check(finish, of_identity(identity_key()))
        return Tenure(proof, peer, identity_key, lambda: self._keys.root.authorities)
