"""The rights of callers, checked at every call: a certificate outlives an eviction."""

from __future__ import annotations

from sealring.coordinator.store import Store
from sealring.mesh.errors import PermissionDenied, Unauthenticated
from sealring.mesh.pki.certificates import PeerIdentity, Role
from sealring.mesh.rpc.interceptor import Context
from sealring.mesh.rpc.tls import peer_identity


class Access:
    """Identifies callers, and refuses those that are not enrolled or have the wrong role."""

    def __init__(self, cluster: str, store: Store) -> None:
        self._cluster = cluster
        self._store = store

    def require(self, context: Context, *roles: Role) -> PeerIdentity:
        """The calling member or gateway, if it has one of the roles and is still enrolled.

        Raises as `identify`, and PermissionDenied (NOT_ENROLLED).
        """
        peer = self.identify(context, *roles)
        member = self._store.members.find(peer.id)
        if member is None or member.role != peer.role:
            raise PermissionDenied(
                "caller is no longer enrolled",
                hint="it was evicted or banned; ask the operator for a new join token",
                reason="NOT_ENROLLED",
            )
        return peer

    def identify(self, context: Context, *roles: Role) -> PeerIdentity:
        """The caller as its certificate names it, if it is of this cluster and has one of the roles.

        Raises Unauthenticated (NO_CLIENT_CERTIFICATE, OTHER_CLUSTER), PermissionDenied (WRONG_ROLE).
        """
        peer = peer_identity(context)
        if peer.cluster != self._cluster:
            raise Unauthenticated("caller belongs to another cluster", reason="OTHER_CLUSTER")
        if peer.role not in roles:
            raise PermissionDenied(
                f"a {peer.role} may not call this",
                hint=f"only these may: {', '.join(roles)}",
                reason="WRONG_ROLE",
            )
        return peer
