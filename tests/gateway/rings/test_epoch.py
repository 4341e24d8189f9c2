"""An epoch as a gateway knows it: whether the gateway's machine takes part in the ring."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from sealring.gateway.rings.epoch import ServingEpoch
from sealring.testing.authority import make_member, make_ring, make_roster
from sealring.v1 import membership_pb2 as membership


@pytest.mark.parametrize(
    ("here", "elsewhere"),
    [
        ((), False),
        (("10.0.0.9",), False),
        (("10.0.0.1",), True),
        (("10.0.0.2",), False),
        (("10.0.0.1", "10.0.0.3"), False),
    ],
    ids=["unknown", "no node", "a node of no ring", "the head", "two nodes"],
)
def test_a_machine_with_a_node_that_is_not_in_the_ring_is_elsewhere(
    here: Collection[str], elsewhere: bool
) -> None:
    members = [make_member(addresses=(f"10.0.0.{number}:7001",)) for number in (1, 2, 3)]
    ring = make_ring(members[1:])
    roster = make_roster("attic", members, [ring], now=0.0)
    state = membership.RingState(ring=ring.id, epoch=3, deployment="demo")
    assert ServingEpoch.of(roster, ring, state, here).elsewhere is elsewhere
