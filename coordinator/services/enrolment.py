"""The Enrolment service: a machine with a valid token, signature and evidence becomes a member.

The holder of a good token learns which check refused a join; others do not. The coordinator's log always
names it. Sizes and forms, which the caller knows anyway, are answered clearly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from sealring.coordinator.auth.nonces import Attempts
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.members.enrolment import Enrolment, check_form, refused
from sealring.coordinator.members.joincodes import JoinCodes
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import DeadlineExceeded, InvalidInput, PermissionDenied, SealringError
from sealring.mesh.pki.certificates import PeerIdentity, to_pem
from sealring.v1 import membership_pb2, membership_pb2_grpc

_NONCE_SECONDS = 60
_CODE_SECONDS = 10.0
_WHY_REFUSED = "the join token is wrong, used or expired; ask the operator for a new one"
log = structlog.get_logger()


class EnrolmentService(membership_pb2_grpc.EnrolmentServicer):
    """Answers joins. `main_address` gives the address that new members connect to."""

    def __init__(
        self,
        enrolment: Enrolment,
        codes: JoinCodes,
        keys: ClusterKeys,
        publisher: RosterPublisher,
        settings: CoordinatorSettings,
        main_address: Callable[[], str],
        *,
        clock: Clock,
        attempts_clock: Clock = monotonic_clock,
    ) -> None:
        self._enrolment = enrolment
        self._codes = codes
        self._keys = keys
        self._publisher = publisher
        self._settings = settings
        self._main_address = main_address
        self._clock = clock
        self._attempts = Attempts(lifetime=_NONCE_SECONDS, clock=attempts_clock)

    async def GetNonce(  # noqa: N802
        self, request: membership_pb2.GetNonceRequest, context: Any
    ) -> membership_pb2.GetNonceResponse:
        """A fresh nonce for one attempt. Raises ResourceExhausted (RATE_LIMITED)."""
        return self._attempts.begin(context)

    async def Enrol(  # noqa: N802
        self, request: membership_pb2.EnrolRequest, context: Any
    ) -> membership_pb2.EnrolResponse:
        """Raises InvalidInput for malformed requests, PermissionDenied (JOIN_REFUSED) for all else."""
        self._attempts.admit(context)
        role = check_form(request)
        try:
            if not self._attempts.use(request.nonce):  # first: a nonce serves one attempt, good or bad
                raise refused("NONCE", "it took too long, or was sent twice", "join again")
            member = self._enrolment.admit(request, role)
            certificate = self._keys.ca.issue(
                request.csr,
                PeerIdentity(self._keys.root.cluster, role, member.id),
                lifetime=self._settings.certificate_lifetime,
                now=self._clock(),
            )
            self._enrolment.spend(request, role, member)
        except SealringError as error:
            log.warning(
                "join_refused",
                token_id=request.token_id,
                role=role,
                why=error.reason,
                detail=error.message,
                hint=error.hint,
            )
            raise self._join_refused(request, error) from None
        log.info("member_enrolled", member=member.id, name=member.name, role=role, level=member.level)
        return membership_pb2.EnrolResponse(
            member_id=member.id,
            cluster=self._keys.root.cluster,
            certificate_chain=to_pem(certificate),
            root_metadata=self._keys.root_chain,
            roster=self._publisher.current.envelope,
            coordinator_address=self._main_address(),
            name=member.name,
        )

    async def JoinByCode(  # noqa: N802
        self, requests: AsyncIterator[membership_pb2.CodeRequest], context: Any
    ) -> AsyncIterator[membership_pb2.CodeAnswer]:
        """Raises what `JoinCodes` raises, ResourceExhausted (RATE_LIMITED), InvalidInput (BAD_JOIN),
        DeadlineExceeded (TOO_SLOW)."""
        self._attempts.admit(context)
        first = await _next(requests, "share")
        attempt = self._codes.begin(first.share)
        yield membership_pb2.CodeAnswer(share=attempt.share)
        second = await _next(requests, "confirmation")
        yield membership_pb2.CodeAnswer(token=self._codes.finish(attempt, second.confirmation))

    def _join_refused(self, request: membership_pb2.EnrolRequest, why: SealringError) -> PermissionDenied:
        """The error for the caller. Only the holder of a valid token learns the cause."""
        if self._enrolment.holds_token(request):
            return PermissionDenied(
                f"the join was refused: {why.message}", hint=why.hint, reason="JOIN_REFUSED", cause=why.reason
            )
        return PermissionDenied("the join was refused", hint=_WHY_REFUSED, reason="JOIN_REFUSED")


async def _next(
    requests: AsyncIterator[membership_pb2.CodeRequest], wanted: str
) -> membership_pb2.CodeRequest:
    """The caller's next message. Raises InvalidInput (BAD_JOIN), DeadlineExceeded (TOO_SLOW)."""
    try:
        async with asyncio.timeout(_CODE_SECONDS):
            request = await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded("the exchange took too long", reason="TOO_SLOW") from None
    if request is None or request.WhichOneof("message") != wanted:
        raise InvalidInput(f"the message is no {wanted}", reason="BAD_JOIN", param=wanted)
    return request
