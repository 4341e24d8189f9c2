"""Operators: their list, keys and revocation."""

from __future__ import annotations

from sealring.coordinator.admin.refusals import bad
from sealring.coordinator.auth.operators import OperatorAccess, needs
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.store import OperatorRole, Store
from sealring.mesh.pki.certificates import to_pem
from sealring.v1 import admin_pb2

_OPERATOR_ROLES = {
    admin_pb2.OPERATOR_ROLE_READ: OperatorRole.READ,
    admin_pb2.OPERATOR_ROLE_ADMIN: OperatorRole.ADMIN,
}
_PROTO_OPERATOR_ROLES = {str(role): number for number, role in _OPERATOR_ROLES.items()}


class OperatorCalls:
    """RPCs on operators."""

    def __init__(
        self,
        operators: OperatorAccess,
        store: Store,
        keys: ClusterKeys,
    ) -> None:
        self.operators = operators
        self._store = store
        self._keys = keys

    @needs(OperatorRole.READ)
    async def ListOperators(  # noqa: N802
        self, request: admin_pb2.ListOperatorsRequest, actor: str
    ) -> admin_pb2.ListOperatorsResponse:
        """Operators by name. Those that were revoked stand in the audit log alone."""
        return admin_pb2.ListOperatorsResponse(
            operators=[
                admin_pb2.Operator(
                    name=one.name,
                    role=_PROTO_OPERATOR_ROLES.get(one.role, admin_pb2.OPERATOR_ROLE_UNSPECIFIED),
                    added=one.added,
                    expires=one.expires,
                    key_hash=one.key_hash,
                )
                for one in self._store.operators.all()
            ]
        )

    @needs(OperatorRole.ADMIN)
    async def AddOperator(  # noqa: N802
        self, request: admin_pb2.AddOperatorRequest, actor: str
    ) -> admin_pb2.AddOperatorResponse:
        """Raises InvalidInput (BAD_ROLE), and what `OperatorAccess.add` raises."""
        role = _OPERATOR_ROLES.get(request.role)
        if role is None:
            raise bad("role", "role is neither read nor admin", "BAD_ROLE")
        certificate = self.operators.add(request.name, role, request.csr, request.ttl_seconds, actor)
        return admin_pb2.AddOperatorResponse(
            certificate_chain=to_pem(certificate), root_metadata=self._keys.root_chain
        )

    @needs(OperatorRole.ADMIN)
    async def RotateOperator(  # noqa: N802
        self, request: admin_pb2.RotateOperatorRequest, actor: str
    ) -> admin_pb2.RotateOperatorResponse:
        """Raises what `OperatorAccess.rotate` raises."""
        certificate = self.operators.rotate(request.name, request.csr, request.ttl_seconds, actor)
        return admin_pb2.RotateOperatorResponse(
            certificate_chain=to_pem(certificate), root_metadata=self._keys.root_chain
        )

    @needs(OperatorRole.ADMIN)
    async def RevokeOperator(  # noqa: N802
        self, request: admin_pb2.RevokeOperatorRequest, actor: str
    ) -> admin_pb2.RevokeOperatorResponse:
        """Revokes any operator: also the caller, and the coordinator's own. Raises NotFound
        (UNKNOWN_OPERATOR)."""
        self.operators.revoke(request.name, actor)
        return admin_pb2.RevokeOperatorResponse()
