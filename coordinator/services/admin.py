"""The Admin service: everything that an operator does, each change with an entry in the audit log."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable

from sealring.coordinator.auth.operators import OperatorAccess, needs
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.members.expulsion import Expulsion
from sealring.coordinator.members.joincodes import JoinCodes, is_used_up
from sealring.coordinator.members.tokens import JoinTokens
from sealring.coordinator.nodes.description import describe_node
from sealring.coordinator.nodes.diagnoses import Diagnoses
from sealring.coordinator.nodes.links import Links
from sealring.coordinator.nodes.models import Models
from sealring.coordinator.rings.deployments import DeploymentService
from sealring.coordinator.rings.moves import Moves
from sealring.coordinator.rings.ondemand import OnDemand
from sealring.coordinator.rings.traces import Traces
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.standby.copies import Copies
from sealring.coordinator.store import OperatorRole, Store
from sealring.coordinator.streams.sessions import Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.clock import Clock
from sealring.mesh.crypto.identity import check_member_id
from sealring.mesh.errors import InvalidInput
from sealring.mesh.pki.certificates import PROTO_ROLES, ROLES, Role, to_pem
from sealring.v1 import admin_pb2, admin_pb2_grpc

DEFAULT_TOKEN_SECONDS = 600
MAX_TOKEN_SECONDS = 3600
MAX_TOKEN_USES = 64
DEFAULT_AUDIT_ENTRIES = 100
MAX_AUDIT_ENTRIES = 1000
MAX_REVOKED_SHOWN = 1000
_MAX_NOTE = 200
_PROTO_OPERATOR_ROLES: dict[OperatorRole | None, admin_pb2.OperatorRole.ValueType] = {
    OperatorRole.READ: admin_pb2.OPERATOR_ROLE_READ,
    OperatorRole.ADMIN: admin_pb2.OPERATOR_ROLE_ADMIN,
}
_OPERATOR_ROLES = {number: role for role, number in _PROTO_OPERATOR_ROLES.items()}


class AdminService(admin_pb2_grpc.AdminServicer):
    """The operators' RPCs. Each handler states the role that it `needs`."""

    def __init__(
        self,
        operators: OperatorAccess,
        store: Store,
        keys: ClusterKeys,
        publisher: RosterPublisher,
        sessions: Sessions,
        watchers: Watchers,
        expulsion: Expulsion,
        deployments: DeploymentService,
        on_demand: OnDemand,
        moves: Moves,
        traces: Traces,
        diagnoses: Diagnoses,
        models: Models,
        *,
        links: Links,
        tokens: JoinTokens,
        codes: JoinCodes,
        copies: Copies,
        stand_down: Callable[[bytes], None],
        clock: Clock,
    ) -> None:
        """`stand_down` takes the roster of the coordinator that took over."""
        self._links = links
        self._copies = copies
        self._stand_down = stand_down
        self._tokens = tokens
        self._codes = codes
        self.operators = operators
        self._store = store
        self._keys = keys
        self._publisher = publisher
        self._sessions = sessions
        self._watchers = watchers
        self._expulsion = expulsion
        self._deployments = deployments
        self._on_demand = on_demand
        self._moves = moves
        self._traces = traces
        self._diagnoses = diagnoses
        self._models = models
        self._clock = clock

    # The standby

    @needs(OperatorRole.ADMIN)
    async def CopyState(  # noqa: N802
        self, request: admin_pb2.CopyStateRequest, actor: str
    ) -> admin_pb2.CopyStateResponse:
        """Raises InvalidInput (BAD_NONCE), ResourceExhausted (STATE_TOO_LARGE)."""
        return await self._copies.answer(request)

    @needs(OperatorRole.ADMIN)
    async def StandDown(  # noqa: N802
        self, request: admin_pb2.StandDownRequest, actor: str
    ) -> admin_pb2.StandDownResponse:
        """Raises FailedPrecondition (NO_LATER_TERM), RosterError."""
        self._stand_down(request.roster)
        return admin_pb2.StandDownResponse()

    # Join tokens

    @needs(OperatorRole.ADMIN)
    async def CreateJoinToken(  # noqa: N802
        self, request: admin_pb2.CreateJoinTokenRequest, actor: str
    ) -> admin_pb2.CreateJoinTokenResponse:
        """Raises InvalidInput (BAD_ROLE, BAD_TTL, BAD_NOTE, BAD_USES) and ResourceExhausted
        (TOO_MANY_TOKENS)."""
        role = ROLES.get(request.role)
        if role is None:
            raise _bad("role", "role is neither node nor gateway", "BAD_ROLE")
        _check_bounds(request)
        if len(request.note) > _MAX_NOTE or not request.note.isprintable():
            raise _bad("note", f"note is longer than {_MAX_NOTE} or not printable", "BAD_NOTE")
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
                    role=PROTO_ROLES[token.role],
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
    async def RevokeJoinCode(  # noqa: N802
        self, request: admin_pb2.RevokeJoinCodeRequest, actor: str
    ) -> admin_pb2.RevokeJoinCodeResponse:
        """Ends the join code, if there is one."""
        self._codes.revoke(actor)
        return admin_pb2.RevokeJoinCodeResponse()

    # Nodes

    @needs(OperatorRole.READ)
    async def ListNodes(  # noqa: N802
        self, request: admin_pb2.ListNodesRequest, actor: str
    ) -> admin_pb2.ListNodesResponse:
        """Every enrolled node and gateway, online or not, by name; the revoked identities; nodes' links."""
        self._sessions.attend()
        members = sorted(self._store.members.all(Role.MEMBER), key=lambda one: one.name)
        places: dict[str, list[tuple[str, admin_pb2.StagePlan]]] = defaultdict(list)
        for deployment in self._store.deployments.all():
            for ring in deployment.plan.rings:
                for stage in ring.stages:
                    places[stage.member].append((ring.ring, stage))
        return admin_pb2.ListNodesResponse(
            nodes=[
                describe_node(
                    member,
                    self._sessions.find(member.id),
                    places[member.id],
                    self._publisher.standing.trust(member),
                    self._clock(),
                    self._sessions.trouble(member.id) or self._publisher.standing.refusal(member),
                )
                for member in members
            ],
            links=self._links.described({member.id for member in members}),
            gateways=[
                admin_pb2.Gateway(
                    id=gateway.id,
                    name=gateway.name,
                    watching=self._watchers.watches(gateway.id),
                    enrolled=gateway.enrolled_at,
                    trouble=self._watchers.trouble(gateway.id) or self._sessions.trouble(gateway.id),
                )
                for gateway in sorted(self._store.members.all(Role.GATEWAY), key=lambda one: one.name)
            ],
            revoked=[
                admin_pb2.RevokedIdentity(
                    id=one.id, name=one.name, role=PROTO_ROLES[one.role], at=one.at, banned=one.banned
                )
                for one in self._store.members.gone(limit=MAX_REVOKED_SHOWN)
            ],
        )

    @needs(OperatorRole.ADMIN)
    async def DrainNode(  # noqa: N802
        self, request: admin_pb2.DrainNodeRequest, actor: str
    ) -> admin_pb2.DrainNodeResponse:
        """Raises NotFound (UNKNOWN_NODE), InvalidInput (BAD_MEMBER_ID)."""
        member = self._store.members.get(_member_id(request.id))
        if member.role is not Role.MEMBER:
            raise _bad("id", "a gateway cannot be drained", "NOT_A_NODE")
        if bool(member.draining) != request.undo:
            return admin_pb2.DrainNodeResponse()
        until = 0 if request.undo else self._moves.drain_end()

        def begin() -> None:
            if request.undo:
                self._moves.staying(member.id)
            else:
                self._moves.draining(member.id, until)

        with self._publisher.change(stored=begin):
            self._store.members.save(dataclasses.replace(member, draining=until))
            action = "undo_drain_node" if request.undo else "drain_node"
            self._store.audit.append(self._clock(), actor, action, member.id, {"name": member.name})
        return admin_pb2.DrainNodeResponse()

    @needs(OperatorRole.ADMIN)
    async def EvictNode(  # noqa: N802
        self, request: admin_pb2.EvictNodeRequest, actor: str
    ) -> admin_pb2.EvictNodeResponse:
        """Raises NotFound (UNKNOWN_NODE), InvalidInput (BAD_MEMBER_ID)."""
        self._expulsion.evict(self._store.members.get(_member_id(request.id)), actor)
        return admin_pb2.EvictNodeResponse()

    @needs(OperatorRole.ADMIN)
    async def BanNode(  # noqa: N802
        self, request: admin_pb2.BanNodeRequest, actor: str
    ) -> admin_pb2.BanNodeResponse:
        """Bans a node, also one that was evicted. Raises NotFound (UNKNOWN_NODE), InvalidInput
        (BAD_MEMBER_ID)."""
        identifier = _member_id(request.id)
        members = self._store.members
        self._expulsion.ban(members.find_revocation(identifier) or members.get(identifier), actor)
        return admin_pb2.BanNodeResponse()

    # Models

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
        member = self._store.members.get(_member_id(node))
        await self._models.change(member.id, model, remove=remove, to_plan=to_plan)
        details = {"name": member.name, "model": model}
        action = "remove_model" if remove else "pull_model"
        self._store.audit.append(self._clock(), actor, action, member.id, details)

    # Deployments

    @needs(OperatorRole.ADMIN)
    async def CreateDeployment(  # noqa: N802
        self, request: admin_pb2.CreateDeploymentRequest, actor: str
    ) -> admin_pb2.CreateDeploymentResponse:
        """Raises what `DeploymentService.create` raises."""
        made = await self._deployments.create(request.spec, actor)
        return admin_pb2.CreateDeploymentResponse(plan=made)

    @needs(OperatorRole.ADMIN)
    async def PlanDeployment(  # noqa: N802
        self, request: admin_pb2.PlanDeploymentRequest, actor: str
    ) -> admin_pb2.PlanDeploymentResponse:
        """Raises what `DeploymentService.plan` raises."""
        return await self._deployments.plan(request.spec)

    @needs(OperatorRole.READ)
    async def ListDeployments(  # noqa: N802
        self, request: admin_pb2.ListDeploymentsRequest, actor: str
    ) -> admin_pb2.ListDeploymentsResponse:
        """Deployments with the state of every ring."""
        found = self._deployments.list(self._on_demand.status)
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
        return await self._traces.trace(request.ring, request.milliseconds)

    @needs(OperatorRole.ADMIN)
    async def DiagnoseNode(  # noqa: N802
        self, request: admin_pb2.DiagnoseNodeRequest, actor: str
    ) -> admin_pb2.DiagnoseNodeResponse:
        """Raises NotFound (UNKNOWN_NODE), InvalidInput (BAD_MEMBER_ID), and what `Diagnoses.ask` raises."""
        member = self._store.members.get(_member_id(request.id))
        self._store.audit.append(self._clock(), actor, "diagnose_node", member.id, {"name": member.name})
        return await self._diagnoses.ask(member.id)

    # What can be verified

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
            raise _bad("limit", f"limit is above {MAX_AUDIT_ENTRIES}, or after is no number", "BAD_LIMIT")
        limit = request.limit or DEFAULT_AUDIT_ENTRIES
        return admin_pb2.ListAuditLogResponse(
            entries=self._store.audit.entries(after=request.after, limit=limit, newest=request.newest),
        )

    # Operators

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
            raise _bad("role", "role is neither read nor admin", "BAD_ROLE")
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


def _member_id(identifier: str) -> str:
    try:
        return check_member_id(identifier)
    except InvalidInput as error:
        error.metadata["param"] = "id"
        raise


def _check_bounds(request: admin_pb2.CreateJoinTokenRequest | admin_pb2.CreateJoinCodeRequest) -> None:
    if request.ttl_seconds > MAX_TOKEN_SECONDS:
        raise _bad("ttl_seconds", f"it is good for at most {MAX_TOKEN_SECONDS} s", "BAD_TTL")
    if request.uses > MAX_TOKEN_USES:
        raise _bad("uses", f"it lets at most {MAX_TOKEN_USES} machines join", "BAD_USES")


def _bad(param: str, message: str, reason: str) -> InvalidInput:
    return InvalidInput(message, reason=reason, param=param)
