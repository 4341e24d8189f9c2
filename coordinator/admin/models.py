"""Models that nodes fetch and remove."""

from __future__ import annotations

from sealring.coordinator.admin.refusals import member_id
from sealring.coordinator.auth.operators import OperatorAccess, needs
from sealring.coordinator.nodes.models import Models
from sealring.coordinator.store import OperatorRole, Store
from sealring.mesh.clock import Clock
from sealring.v1 import admin_pb2


class ModelCalls:
    """RPCs on the models of one node."""

    def __init__(
        self,
        operators: OperatorAccess,
        store: Store,
        models: Models,
        clock: Clock,
    ) -> None:
        self.operators = operators
        self._store = store
        self._models = models
        self._clock = clock

    @needs(OperatorRole.ADMIN)
    async def PullModel(  # noqa: N802
        self, request: admin_pb2.PullModelRequest, actor: str
    ) -> admin_pb2.PullModelResponse:
        """Raises NotFound (UNKNOWN_NODE), InvalidInput (BAD_MEMBER_ID), and what `Models.change` raises."""
        await self._change_model(request.id, request.model, actor, remove=False, to_plan=request.to_plan)
        return admin_pb2.PullModelResponse()

    @needs(OperatorRole.ADMIN)
    async def RemoveModel(  # noqa: N802
        self, request: admin_pb2.RemoveModelRequest, actor: str
    ) -> admin_pb2.RemoveModelResponse:
        """Raises NotFound (UNKNOWN_NODE), InvalidInput (BAD_MEMBER_ID), and what `Models.change` raises."""
        await self._change_model(request.id, request.model, actor, remove=True)
        return admin_pb2.RemoveModelResponse()

    async def _change_model(
        self, node: str, model: str, actor: str, *, remove: bool, to_plan: bool = False
    ) -> None:
        member = self._store.members.get(member_id(node))
        await self._models.change(member.id, model, remove=remove, to_plan=to_plan)
        details = {"name": member.name, "model": model}
        action = "remove_model" if remove else "pull_model"
        self._store.audit.append(self._clock(), actor, action, member.id, details)
