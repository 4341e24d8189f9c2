"""Who may call what: checked at every call, because a certificate outlives an eviction."""

from __future__ import annotations

from coordinator.keys import OPERATOR_ID
from coordinator.store import Store
from mesh.certificates import PeerIdentity, Role
from mesh.errors import PermissionDenied, Unauthenticated
from mesh.tls import AuthenticatedContext, peer_identity


class Access:
    """Knows the cluster and who is enrolled in it."""

    def __init__(self, cluster: str, store: Store) -> None:
        self._cluster = cluster
        self._store = store

    def require(self, context: AuthenticatedContext, *roles: Role) -> PeerIdentity:
        """The caller, if it is of this cluster, has one of the roles and is still enrolled.

        Raises Unauthenticated (NO_CLIENT_CERTIFICATE, OTHER_CLUSTER), PermissionDenied (WRONG_ROLE,
        NOT_ENROLLED).
        """
        peer = peer_identity(context)
        if peer.cluster != self._cluster:
            raise Unauthenticated("caller is of another cluster", reason="OTHER_CLUSTER")
        if peer.role not in roles:
            raise PermissionDenied(
                f"a {peer.role} may not call this",
                hint=f"it is for: {', '.join(roles)}",
                reason="WRONG_ROLE",
            )
        if not self._enrolled(peer):
            raise PermissionDenied(
                "caller is not enrolled any more",
                hint="it was evicted or banned; ask the operator for a new join token",
                reason="NOT_ENROLLED",
            )
        return peer

    def _enrolled(self, peer: PeerIdentity) -> bool:
        if peer.role is Role.OPERATOR:
            return peer.id == OPERATOR_ID
        member = self._store.members.find(peer.id)
        return member is not None and member.role is peer.role
