"""A node as operators see it."""

from __future__ import annotations

import pytest

from sealring.coordinator.nodes.description import describe_node
from sealring.coordinator.store import StoredMember
from sealring.coordinator.streams.sessions import NodeSession
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.pki.certificates import Role
from sealring.v1 import admin_pb2
from sealring.v1.membership_pb2 import Heartbeat, HeldModel


def stored(draining: int = 0) -> StoredMember:
    return StoredMember(
        *("id", Role.MEMBER, "alpha", b"key", KeyType.SOFTWARE, 1),
        addresses=("127.0.0.1:1",),
        software_version="1.0",
        manifest_hash=b"\xab" * 32,
        draining=draining,
    )


@pytest.mark.parametrize(
    ("here", "draining", "state"),
    [
        (False, 0, admin_pb2.NODE_STATE_OFFLINE),
        (False, 5, admin_pb2.NODE_STATE_OFFLINE),
        (True, 0, admin_pb2.NODE_STATE_ONLINE),
        (True, 5, admin_pb2.NODE_STATE_DRAINING),
    ],
)
def test_what_is_known_of_a_node_is_shown(
    here: bool, draining: int, state: admin_pb2.NodeState.ValueType
) -> None:
    """Rings by name, the last message by the wall clock, and memory after the first report."""
    session = NodeSession("id", bytes(16), clock=lambda: 10.0) if here else None
    places = [
        (ring, admin_pb2.StagePlan(rank=rank, first_layer=2, end_layer=4, weight_bytes=5, kv_budget=6))
        for rank, ring in enumerate(("b-0", "a-0"))
    ]
    expected = admin_pb2.Node(
        id="id",
        name="alpha",
        state=state,
        addresses=["127.0.0.1:1"],
        trust=10,
        software_version="1.0",
        manifest="ab" * 32,
        level="none",
        trouble="it is late",
        last_seen=1000 - 20 if here else 0,
        rings=[
            {"ring": ring, "rank": rank, "first_layer": 2, "end_layer": 4, "memory": 11}
            for ring, rank in (("a-0", 1), ("b-0", 0))
        ],
    )
    assert (
        describe_node(stored(draining), session, places, 10, 1000.0, "it is late", awake=lambda: 30.0)
        == expected
    )
    if session is not None:
        report = {
            "memory_total": 9,
            "memory_usable": 8,
            "memory_used": 7,
            "memory_overhead": 6,
            "load": 0.5,
        }
        session.beat(Heartbeat(**report, models=[HeldModel(name="m")]))  # type: ignore[arg-type]
        expected.MergeFrom(admin_pb2.Node(**report, models=[HeldModel(name="m")]))  # type: ignore[arg-type]
        assert (
            describe_node(stored(draining), session, places, 10, 1000.0, "it is late", awake=lambda: 30.0)
            == expected
        )
