"""What a seat tells of its newest epoch, and which epoch that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.errors import Conflict
from sealring.node.daemon import seat as module
from sealring.node.daemon.engine_process import EngineFigures
from sealring.node.daemon.epoch import Phase
from sealring.node.daemon.seat import Seat
from sealring.v1 import membership_pb2


class Epoch:
    """Notes what becomes of it."""

    def __init__(self, plan: Any, seat: Any, *, after: Any = None) -> None:
        self.plan, self.after = plan, after
        self.phase, self.links = Phase.PREPARING, [membership_pb2.LinkInfo(from_rank=1)]
        self.engine: Any = None
        self.gateway: Any = None
        self.done: list[str] = []

    def prepare(self) -> None:
        self.done.append("prepare")

    def end(self, reason: str) -> None:
        self.done.append(reason)


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "MemberEpoch", Epoch)
    around: Any = SimpleNamespace(engines=SimpleNamespace(seat=lambda: SimpleNamespace(stage="stage")))
    return Seat("r", around)


def prepare(seat: Any, number: int) -> None:
    seat.prepare(SimpleNamespace(epoch=number), membership_pb2.PrepareEpoch(ring="r", epoch=number))


def test_an_epoch_takes_the_place_of_an_older_one_and_of_no_newer(seat: Any) -> None:
    assert (seat.phase, seat.stage, seat.named(1)) == (Phase.ENDED, "stage", None)
    prepare(seat, 3)
    first = seat.epoch
    assert (first.done, first.after, seat.phase) == (["prepare"], None, Phase.PREPARING)
    for number in (2, 3):
        with pytest.raises(Conflict) as caught:
            prepare(seat, number)
        assert caught.value.reason == "STALE_EPOCH"
    assert (seat.epoch, first.done) == (first, ["prepare"])
    assert (seat.named(3), seat.named(4)) == (first, None)
    prepare(seat, 4)
    assert (first.done, seat.epoch.after, seat.epoch.done) == (["prepare", "superseded"], first, ["prepare"])
    assert seat.named(3) is None


@pytest.mark.parametrize("phase", list(Phase))
def test_what_serves_is_told_to_a_coordinator_that_may_have_forgotten_it(seat: Any, phase: Phase) -> None:
    assert seat.serving() is None
    prepare(seat, 3)
    seat.epoch.phase = phase
    told = membership_pb2.ServingEpoch(prepared={"ring": "r", "epoch": 3}, links=[{"from_rank": 1}])
    assert seat.serving() == (told if phase is Phase.UP else None)


@pytest.mark.parametrize(
    ("gateway", "attended"),
    [(None, False), (SimpleNamespace(used=False), False), (SimpleNamespace(used=True), True)],
)
def test_heartbeats_tell_of_an_epoch_that_has_an_engine(seat: Any, gateway: Any, attended: bool) -> None:
    assert seat.health() is None
    prepare(seat, 3)
    assert seat.health() is None
    figures = EngineFigures(steps=5, memory=6, step_us=7, drafted=8, accepted=4)
    seat.epoch.engine, seat.epoch.gateway = SimpleNamespace(figures=figures), gateway
    assert seat.health() == membership_pb2.RingHealth(
        ring="r", epoch=3, steps=5, engine_memory=6, step_us=7, drafted=8, accepted=4, attended=attended
    )
    seat.epoch.phase = Phase.ENDED
    assert seat.health() is None
