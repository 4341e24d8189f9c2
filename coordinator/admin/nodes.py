"""Nodes and gateways: their list, drains and ends."""

from __future__ import annotations

from collections import defaultdict

from sealring.coordinator.admin.refusals import bad, member_id
from sealring.coordinator.auth.operators import OperatorAccess, needs
from sealring.coordinator.members.expulsion import Expulsion
from sealring.coordinator.nodes.description import describe_node
from sealring.coordinator.nodes.diagnoses import Diagnoses
from sealring.coordinator.nodes.links import Links
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import OperatorRole, Store
from sealring.coordinator.streams.sessions import Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.clock import Clock
from sealring.mesh.pki.certificates import PROTO_ROLES, Role
from sealring.v1 import admin_pb2

MAX_REVOKED_SHOWN = 1000


class NodeList:
    """The list of all machines."""

    def __init__(
        self,
        operators: OperatorAccess,
        store: Store,
        publisher: RosterPublisher,
        sessions: Sessions,
        watchers: Watchers,
        links: Links,
        clock: Clock,
    ) -> None:
        self.operators = operators
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._watchers = watchers
        self._links = links
        self._clock = clock

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
            trouble=self._store.trouble,
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
                    addresses=self._watchers.addresses(gateway.id, self._publisher.roster),
                    lan=self._watchers.lan(gateway.id),
                )
                for gateway in sorted(self._store.members.all(Role.GATEWAY), key=lambda one: one.name)
            ],
            revoked=[
                admin_pb2.RevokedIdentity(
                    id=one.id, name=one.name, role=PROTO_ROLES[Role(one.role)], at=one.at, banned=one.banned
                )
                for one in self._store.members.gone(limit=MAX_REVOKED_SHOWN)
            ],
        )


class NodeCalls:
    """RPCs on one machine."""

    def __init__(
        self,
        operators: OperatorAccess,
        store: Store,
        publisher: RosterPublisher,
        expulsion: Expulsion,
        diagnoses: Diagnoses,
        clock: Clock,
        drain_timeout: float,
    ) -> None:
        """`drain_timeout` is the time in seconds after which a drain moves rings that are not idle."""
        self.operators = operators
        self._store = store
        self._publisher = publisher
        self._expulsion = expulsion
        self._drain_timeout = drain_timeout
        self._diagnoses = diagnoses
        self._clock = clock

    @needs(OperatorRole.ADMIN)
    async def DrainNode(  # noqa: N802
        self, request: admin_pb2.DrainNodeRequest, actor: str
    ) -> admin_pb2.DrainNodeResponse:
        """Raises NotFound (UNKNOWN_NODE), InvalidInput (BAD_MEMBER_ID)."""
        member = self._store.members.get(member_id(request.id))
        if member.role != Role.MEMBER:
            raise bad("id", "a gateway cannot be drained", "NOT_A_NODE")
        if bool(member.draining) != request.undo:
            return admin_pb2.DrainNodeResponse()
        until = 0 if request.undo else int(self._clock() + self._drain_timeout) + 1
        with self._publisher.change():
            member.draining = until
            self._store.members.save(member)
            action = "undo_drain_node" if request.undo else "drain_node"
            self._store.audit.append(self._clock(), actor, action, member.id, {"name": member.name})
        return admin_pb2.DrainNodeResponse()

    @needs(OperatorRole.ADMIN)
    async def EvictNode(  # noqa: N802
        self, request: admin_pb2.EvictNodeRequest, actor: str
    ) -> admin_pb2.EvictNodeResponse:
        """Raises NotFound (UNKNOWN_NODE), InvalidInput (BAD_MEMBER_ID)."""
        self._expulsion.evict(self._store.members.get(member_id(request.id)), actor)
        return admin_pb2.EvictNodeResponse()

    @needs(OperatorRole.ADMIN)
    async def BanNode(  # noqa: N802
        self, request: admin_pb2.BanNodeRequest, actor: str
    ) -> admin_pb2.BanNodeResponse:
        """Bans a node, also one that was evicted. Raises NotFound (UNKNOWN_NODE), InvalidInput
        (BAD_MEMBER_ID)."""
        identifier = member_id(request.id)
        members = self._store.members
        self._expulsion.ban(members.find_revocation(identifier) or members.get(identifier), actor)
        return admin_pb2.BanNodeResponse()

    @needs(OperatorRole.ADMIN)
    async def DiagnoseNode(  # noqa: N802
        self, request: admin_pb2.DiagnoseNodeRequest, actor: str
    ) -> admin_pb2.DiagnoseNodeResponse:
        """Raises NotFound (UNKNOWN_NODE), InvalidInput (BAD_MEMBER_ID), and what `Diagnoses.ask` raises."""
        member = self._store.members.get(member_id(request.id))
        self._store.audit.append(self._clock(), actor, "diagnose_node", member.id, {"name": member.name})
        return await self._diagnoses.ask(member.id)
