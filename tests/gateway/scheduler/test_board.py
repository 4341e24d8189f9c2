"""Plans that the gateway's own composition refuses."""

from __future__ import annotations

import pytest
from ringfacts import member_with, ring_of

from sealring.gateway.scheduler.board import Board, PlanError
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import Composition
from sealring.v1 import control_pb2 as control

RING = ring_of(member_with(1 << 20))


def restored(prefix: int) -> control.Change:
    restore = control.Restore(prefix=prefix, recall=prefix, tokens=8, name=bytes(16))
    return control.Change(restore=restore)


@pytest.mark.parametrize(("changes", "refused"), [(3, False), (4, True)])
def test_a_step_has_no_more_changes_at_the_gateway_than_members_take(
    changes: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.mesh.ring.composition.MAX_CHANGES", 3)
    board, member = Board(RING), Composition(epoch=1, max_rows=8, prefill_chunk=64)
    for prefix in range(1, changes + 1):
        board.plan(restored(prefix))
    step = control.Step()
    if refused:
        with pytest.raises(PlanError) as caught:
            board.announce(step)
        assert isinstance(caught.value.__cause__, InvalidInput)
        with pytest.raises(InvalidInput):
            member.apply(step)
    else:
        board.announce(step)
        assert len(member.apply(step).changes) == changes
