"""What operators can verify: the roster and the audit log."""

from __future__ import annotations

from sealring.coordinator.admin.refusals import bad
from sealring.coordinator.auth.operators import OperatorAccess, needs
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import OperatorRole, Store
from sealring.v1 import admin_pb2

DEFAULT_AUDIT_ENTRIES = 100
MAX_AUDIT_ENTRIES = 1000


class AuditCalls:
    """RPCs on what is signed or chained."""

    def __init__(
        self,
        operators: OperatorAccess,
        store: Store,
        publisher: RosterPublisher,
        keys: ClusterKeys,
    ) -> None:
        self.operators = operators
        self._store = store
        self._publisher = publisher
        self._keys = keys

    @needs(OperatorRole.READ)
    async def GetRoster(  # noqa: N802
        self, request: admin_pb2.GetAdminRosterRequest, actor: str
    ) -> admin_pb2.GetAdminRosterResponse:
        """The newest signed roster and the chain of root metadata."""
        return admin_pb2.GetAdminRosterResponse(
            roster=self._publisher.current.envelope, root_metadata=self._keys.root_chain
        )

    @needs(OperatorRole.READ)
    async def ListAuditLog(  # noqa: N802
        self, request: admin_pb2.ListAuditLogRequest, actor: str
    ) -> admin_pb2.ListAuditLogResponse:
        """Raises InvalidInput (BAD_LIMIT)."""
        if request.limit > MAX_AUDIT_ENTRIES or request.after >= 1 << 63:
            raise bad("limit", f"limit is above {MAX_AUDIT_ENTRIES}, or after is no number", "BAD_LIMIT")
        limit = request.limit or DEFAULT_AUDIT_ENTRIES
        return admin_pb2.ListAuditLogResponse(
            entries=self._store.audit.entries(after=request.after, limit=limit, newest=request.newest),
        )
