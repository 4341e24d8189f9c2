"""The actions of epoch machines, carried out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from ringtables import Machine, driver, table

from sealring.coordinator.rings.epochs import Changed, Phase
from sealring.v1 import membership_pb2


@pytest.mark.parametrize("phase", list(Phase))
def test_a_ring_that_serves_again_has_forgotten_its_last_trouble(phase: Phase) -> None:
    rings, sent = table(r=Machine(phase)), list[Any]()
    running = rings.running["r"]
    running.served, running.groupless = 1, {2, 3}
    running.state = lambda: membership_pb2.RingState(ring="r")
    rings.not_moved = {"r": "no room"}
    made = driver(rings, watchers=SimpleNamespace(tell=sent.append))
    with structlog.testing.capture_logs() as logs:
        made.apply("r", [Changed()])
    serves = phase is Phase.SERVING
    assert (running.served, running.groupless) == ((4, set()) if serves else (1, {2, 3}))
    assert rings.not_moved == ({} if serves else {"r": "no room"})
    assert sent == [membership_pb2.WatchResponse(ring=membership_pb2.RingState(ring="r"))]
    assert [(one["ring"], one["epoch"], one["phase"], one["why"]) for one in logs] == [
        ("r", 4, phase.value, "why")
    ]
