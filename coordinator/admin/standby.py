"""The second machine that follows this coordinator, or took over."""

from __future__ import annotations

from collections.abc import Callable

from sealring.coordinator.auth.operators import OperatorAccess, needs
from sealring.coordinator.standby.copies import Copies
from sealring.coordinator.store import OperatorRole
from sealring.v1 import admin_pb2


class StandbyCalls:
    """RPCs of a standby. `stand_down` takes the roster of the coordinator that took over."""

    def __init__(
        self,
        operators: OperatorAccess,
        copies: Copies,
        stand_down: Callable[[bytes], None],
        stands_by: Callable[[str], None],
    ) -> None:
        """`stands_by` takes the address of the standby."""
        self.operators = operators
        self._copies = copies
        self._stand_down = stand_down
        self._stands_by = stands_by

    @needs(OperatorRole.ADMIN)
    async def CopyState(  # noqa: N802
        self, request: admin_pb2.CopyStateRequest, actor: str
    ) -> admin_pb2.CopyStateResponse:
        """Raises InvalidInput (BAD_NONCE, BAD_ADDRESS), ResourceExhausted (STATE_TOO_LARGE)."""
        if request.address:
            self._stands_by(request.address)
        return await self._copies.answer(request)

    @needs(OperatorRole.ADMIN)
    async def StandDown(  # noqa: N802
        self, request: admin_pb2.StandDownRequest, actor: str
    ) -> admin_pb2.StandDownResponse:
        """Raises FailedPrecondition (NO_LATER_TERM), RosterError."""
        self._stand_down(request.roster)
        return admin_pb2.StandDownResponse()
