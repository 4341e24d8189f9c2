"""Describes a node to operators: the stored facts, its last report, and the rings that it serves."""

from __future__ import annotations

from collections.abc import Sequence

from sealring.coordinator.planning.planner import memory_of
from sealring.coordinator.store import StoredMember
from sealring.coordinator.streams.sessions import NodeSession
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.rpc.protocol12 import say_singly
from sealring.v1 import admin_pb2


def describe_node(
    member: StoredMember,
    session: NodeSession | None,
    places: Sequence[tuple[str, admin_pb2.StagePlan]],
    trust: int,
    now: float,
    trouble: str,
    *,
    awake: Clock = monotonic_clock,
) -> admin_pb2.Node:
    """A node for operators. `places` are the rings and stages that it is planned into, `trust` its score, and
    `now` the wall clock's time. `trouble` says why it does not come online, or is not trusted. `awake` is the
    clock of the session."""
    node = admin_pb2.Node(
        id=member.id,
        name=member.name,
        state=_state(member, session),
        addresses=member.addresses,
        level=member.level,
        trust=trust,
        software_version=member.software_version,
        manifest=member.manifest_hash.hex(),
    )
    node.trouble = trouble
    if session is not None:
        node.last_seen = int(now - (awake() - session.last_seen))
    if session is not None and session.heartbeat is not None:
        node.heartbeat.CopyFrom(session.heartbeat)
        say_singly(node, "heartbeat")
    for ring, stage in sorted(places, key=lambda place: place[0]):
        node.rings.add(
            ring=ring,
            rank=stage.rank,
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
            memory=memory_of(stage),
        )
    return node


def _state(member: StoredMember, session: NodeSession | None) -> admin_pb2.NodeState.ValueType:
    if session is None:
        return admin_pb2.NODE_STATE_OFFLINE
    return admin_pb2.NODE_STATE_DRAINING if member.draining else admin_pb2.NODE_STATE_ONLINE
