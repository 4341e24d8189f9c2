"""What a ring's scheduler is told of an epoch."""

from __future__ import annotations

import pytest

from gateway.ring import ServingEpoch, ring_facts
from gateway.scheduler import MemberMemory
from sealring.v1 import control_pb2 as control

SERVING = ServingEpoch("ring-0", 4, "model", (), 8, 64, 4096, False, 0, 1)


def test_members_tell_their_memory_and_the_least_that_their_caches_allow() -> None:
    attached = [
        control.Attached(kv_bytes_per_token=3, kv_bytes_per_row=4, kv_budget=5, prefixes=support)
        for support in (control.PREFIX_SUPPORT_ANY, control.PREFIX_SUPPORT_EXACT)
    ]
    facts = ring_facts(SERVING, attached)
    assert (facts.epoch, facts.max_rows, facts.prefill_chunk) == (4, 8, 64)
    assert facts.members == (MemberMemory(3, 4, 5),) * 2
    assert facts.prefixes == control.PREFIX_SUPPORT_EXACT


@pytest.mark.parametrize(
    ("in_turn", "lanes"), [((True, True), 3), ((True, False), 2), ((False, False), 2), ((True,), 1)]
)
def test_one_lane_more_than_stages_wants_all_members_to_compute_rows_in_turn(
    in_turn: tuple[bool, ...], lanes: int
) -> None:
    facts = ring_facts(SERVING, [control.Attached(kv_budget=1, rows_in_turn=each) for each in in_turn])
    assert facts.lanes == lanes
