"""Deployments and their rings."""

from __future__ import annotations

from sealring.coordinator.auth.operators import OperatorAccess, needs
from sealring.coordinator.rings.deployments import DeploymentService
from sealring.coordinator.rings.driver import ClusterDriver
from sealring.coordinator.rings.traces import Traces
from sealring.coordinator.store import OperatorRole
from sealring.v1 import admin_pb2

PLAN_COUNTS = 20
"""A plan of a member's programs counts as this number of calls: nodes read a model's headers for it."""


class DeploymentCalls:
    """RPCs on deployments."""

    def __init__(
        self,
        operators: OperatorAccess,
        deployments: DeploymentService,
        driver: ClusterDriver,
        traces: Traces,
    ) -> None:
        self.operators = operators
        self._deployments = deployments
        self._driver = driver
        self._traces = traces

    @needs(OperatorRole.ADMIN)
    async def CreateDeployment(  # noqa: N802
        self, request: admin_pb2.CreateDeploymentRequest, actor: str
    ) -> admin_pb2.CreateDeploymentResponse:
        """Raises what `DeploymentService.create` raises."""
        made = await self._deployments.create(request.spec, actor)
        return admin_pb2.CreateDeploymentResponse(plan=made)

    @needs(OperatorRole.ADMIN, members=PLAN_COUNTS)
    async def PlanDeployment(  # noqa: N802
        self, request: admin_pb2.PlanDeploymentRequest, actor: str
    ) -> admin_pb2.PlanDeploymentResponse:
        """Raises what `DeploymentService.plan` raises, and for a member's program PermissionDenied
        (PATH_NOT_DEPLOYED): nodes open the folders that are named here."""
        if self.operators.is_member(actor):
            self._deployments.check_paths(request.spec)
        return await self._deployments.plan(request.spec)

    @needs(OperatorRole.READ)
    async def ListDeployments(  # noqa: N802
        self, request: admin_pb2.ListDeploymentsRequest, actor: str
    ) -> admin_pb2.ListDeploymentsResponse:
        """Deployments with the state of every ring."""
        found = self._deployments.list(self._driver.load_status)
        return admin_pb2.ListDeploymentsResponse(deployments=found)

    @needs(OperatorRole.ADMIN)
    async def DeleteDeployment(  # noqa: N802
        self, request: admin_pb2.DeleteDeploymentRequest, actor: str
    ) -> admin_pb2.DeleteDeploymentResponse:
        """Raises NotFound (UNKNOWN_DEPLOYMENT)."""
        await self._deployments.delete(request.name, actor)
        return admin_pb2.DeleteDeploymentResponse()

    @needs(OperatorRole.READ)
    async def TraceRing(  # noqa: N802
        self, request: admin_pb2.TraceRingRequest, actor: str
    ) -> admin_pb2.TraceRingResponse:
        """Raises what `Traces.trace` raises."""
        member = actor if self.operators.is_member(actor) else ""
        return await self._traces.trace(request.ring, request.milliseconds, member)
