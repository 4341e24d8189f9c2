"""Join tokens and the join code."""

from __future__ import annotations

from sealring.coordinator.admin.refusals import bad
from sealring.coordinator.auth.operators import OperatorAccess, needs
from sealring.coordinator.members.joincodes import JoinCodes, is_used_up
from sealring.coordinator.members.tokens import JoinTokens
from sealring.coordinator.store import OperatorRole, Store
from sealring.mesh.clock import Clock
from sealring.mesh.pki.certificates import PROTO_ROLES, ROLES, Role
from sealring.v1 import admin_pb2

DEFAULT_TOKEN_SECONDS = 600
MAX_TOKEN_SECONDS = 3600
MAX_TOKEN_USES = 64
_MAX_NOTE = 200


class TokenCalls:
    """RPCs on what machines join with."""

    def __init__(
        self,
        operators: OperatorAccess,
        store: Store,
        tokens: JoinTokens,
        codes: JoinCodes,
        clock: Clock,
    ) -> None:
        self.operators = operators
        self._store = store
        self._tokens = tokens
        self._codes = codes
        self._clock = clock

    @needs(OperatorRole.ADMIN)
    async def CreateJoinToken(  # noqa: N802
        self, request: admin_pb2.CreateJoinTokenRequest, actor: str
    ) -> admin_pb2.CreateJoinTokenResponse:
        """Raises InvalidInput (BAD_ROLE, BAD_TTL, BAD_NOTE, BAD_USES) and ResourceExhausted
        (TOO_MANY_TOKENS)."""
        role = ROLES.get(request.role)
        if role is None:
            raise bad("role", "role is neither node nor gateway", "BAD_ROLE")
        _check_bounds(request)
        if len(request.note) > _MAX_NOTE or not request.note.isprintable():
            raise bad("note", f"note is longer than {_MAX_NOTE} or not printable", "BAD_NOTE")
        token, expires = self._tokens.make(
            role,
            actor,
            now=int(self._clock()),
            seconds=request.ttl_seconds or DEFAULT_TOKEN_SECONDS,
            note=request.note,
            uses=request.uses or 1,
        )
        return admin_pb2.CreateJoinTokenResponse(
            token=token.format(), token_id=token.token_id, expires=expires
        )

    @needs(OperatorRole.READ)
    async def ListJoinTokens(  # noqa: N802
        self, request: admin_pb2.ListJoinTokensRequest, actor: str
    ) -> admin_pb2.ListJoinTokensResponse:
        """The tokens that can still be used, without their secrets, and the state of the join code."""
        code = self._codes.current()
        info = None
        if code is not None:
            info = admin_pb2.JoinCodeInfo(
                created=code.created,
                expires=code.expires,
                uses=code.uses,
                wrong=code.wrong,
                used_up=is_used_up(code),
            )
        return admin_pb2.ListJoinTokensResponse(
            code=info,
            tokens=[
                admin_pb2.JoinTokenInfo(
                    token_id=token.id,
                    role=PROTO_ROLES[Role(token.role)],
                    created=token.created,
                    expires=token.expires,
                    note=token.note,
                    uses=token.uses,
                )
                for token in self._store.tokens.open(now=self._clock())
            ],
        )

    @needs(OperatorRole.ADMIN)
    async def RevokeJoinToken(  # noqa: N802
        self, request: admin_pb2.RevokeJoinTokenRequest, actor: str
    ) -> admin_pb2.RevokeJoinTokenResponse:
        """Raises NotFound (UNKNOWN_TOKEN)."""
        with self._store.transaction():
            self._store.tokens.revoke(request.token_id)
            self._store.audit.append(self._clock(), actor, "revoke_join_token", request.token_id, {})
        return admin_pb2.RevokeJoinTokenResponse()

    @needs(OperatorRole.ADMIN)
    async def CreateJoinCode(  # noqa: N802
        self, request: admin_pb2.CreateJoinCodeRequest, actor: str
    ) -> admin_pb2.CreateJoinCodeResponse:
        """Raises InvalidInput (BAD_TTL, BAD_USES)."""
        _check_bounds(request)
        code = self._codes.create(
            actor, seconds=request.ttl_seconds or DEFAULT_TOKEN_SECONDS, uses=request.uses or 1
        )
        return admin_pb2.CreateJoinCodeResponse(code=code.code, expires=code.expires)

    @needs(OperatorRole.ADMIN)
    async def ShowJoinCode(  # noqa: N802
        self, request: admin_pb2.ShowJoinCodeRequest, actor: str
    ) -> admin_pb2.ShowJoinCodeResponse:
        code = self._codes.current()
        if code is None or is_used_up(code):
            return admin_pb2.ShowJoinCodeResponse()
        return admin_pb2.ShowJoinCodeResponse(code=code.code, expires=code.expires, uses=code.uses)

    @needs(OperatorRole.ADMIN)
    async def RevokeJoinCode(  # noqa: N802
        self, request: admin_pb2.RevokeJoinCodeRequest, actor: str
    ) -> admin_pb2.RevokeJoinCodeResponse:
        """Ends the join code, if there is one."""
        self._codes.revoke(actor)
        return admin_pb2.RevokeJoinCodeResponse()


def _check_bounds(request: admin_pb2.CreateJoinTokenRequest | admin_pb2.CreateJoinCodeRequest) -> None:
    if request.ttl_seconds > MAX_TOKEN_SECONDS:
        raise bad("ttl_seconds", f"it is good for at most {MAX_TOKEN_SECONDS} s", "BAD_TTL")
    if request.uses > MAX_TOKEN_USES:
        raise bad("uses", f"it lets at most {MAX_TOKEN_USES} machines join", "BAD_USES")
