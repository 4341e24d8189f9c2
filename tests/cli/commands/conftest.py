from __future__ import annotations

from typing import Any

import pytest
from rosterkit import make_authority
from rosterkit import make_cluster as make_signed_cluster

from sealring.v1 import admin_pb2, membership_pb2

__all__ = ["make_authority", "make_signed_cluster"]

AT = 1_800_000_000
NODE, GATEWAY = membership_pb2.ROLE_NODE, membership_pb2.ROLE_GATEWAY


@pytest.fixture
def members(coordinator: Any) -> Any:
    """Two nodes, two gateways, and one of each role that was evicted and banned."""
    places = [admin_pb2.NodeRing(ring="demo-0", first_layer=0, end_layer=8)]
    coordinator.answers["ListNodes"] = admin_pb2.ListNodesResponse(
        nodes=[
            admin_pb2.Node(
                id="a" * 52,
                name="mac-1",
                state=admin_pb2.NODE_STATE_ONLINE,
                trust=10,
                memory_used=1 << 30,
                memory_usable=8 << 30,
                rings=places,
            ),
            admin_pb2.Node(
                id="b" * 52,
                name="mac-2",
                state=admin_pb2.NODE_STATE_ONLINE,
                trust=10,
                trouble="its clock is wrong",
            ),
        ],
        gateways=[
            admin_pb2.Gateway(id="g" * 52, name="edge", watching=True, enrolled=AT),
            admin_pb2.Gateway(id="h" * 52, name="spare", trouble="it cannot verify the roster"),
        ],
        revoked=[
            admin_pb2.RevokedIdentity(id="c" * 52, name="mac-3", role=NODE, at=AT),
            admin_pb2.RevokedIdentity(id="d" * 52, name="old-edge", role=GATEWAY, banned=True, at=AT),
        ],
    )
    return coordinator
