"""A seat: its newest epoch, what it reports of it, and its folders and ports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.errors import ConfigError, Conflict
from sealring.mesh.system.networks import own_addresses
from sealring.mesh.system.pace import Reached
from sealring.node.daemon.engine_process import EngineFigures
from sealring.node.daemon.epoch import Phase
from sealring.node.daemon.rotation import StepGate
from sealring.node.daemon.seat import Seat
from sealring.v1 import membership_pb2


class Epoch:
    """Notes what becomes of it."""

    def __init__(self, plan: Any, seat: Any, *, after: Any = None) -> None:
        self.plan, self.after = plan, after
        self.phase, self.links = Phase.PREPARING, [membership_pb2.LinkInfo(from_rank=1)]
        self.engine: Any = None
        self.gateway: Any = None
        self.gate = StepGate()
        self.done: list[str] = []

    def prepare(self) -> None:
        self.done.append("prepare")

    def end(self, reason: str) -> None:
        self.done.append(reason)


@pytest.fixture
def around(tmp_path: Path) -> Any:
    return SimpleNamespace(
        engines=SimpleNamespace(seat=lambda: SimpleNamespace(stage="stage")),
        run_folder=tmp_path / "run",
        ring_host="127.0.0.1",
        measure_links=False,
        on_step=lambda: None,
    )


@pytest.fixture
def seat(around: Any) -> Any:
    return Seat("r", around, make_epoch=Epoch)  # type: ignore[arg-type]


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
def test_how_far_an_epoch_is_that_is_prepared_is_told_in_words(seat: Any, phase: Phase) -> None:
    assert seat.work == ""
    prepare(seat, 3)
    seat.epoch.reached, seat.epoch.phase = Reached("loading", 1 << 20, 2 << 20), phase
    told = {
        Phase.PREPARING: "r: loading 1.0 of 2.0 MiB",
        Phase.PREPARED: "r: waiting for the other members",
    }
    assert seat.work == told.get(phase, "")


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


async def test_a_run_folder_that_takes_no_files_is_named(seat: Any, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(ConfigError) as caught:
        await seat.carrier(None, (), print)
    assert caught.value.reason == "STATE_UNWRITABLE"
    assert str(tmp_path / "run") in str(caught.value)


def test_each_epoch_listens_for_the_previous_member_on_a_port_of_its_own(seat: Any) -> None:
    first, second = object(), object()
    listener, address = seat.listener(first)
    assert seat.listener(first) == (listener, address)
    assert address == f"127.0.0.1:{listener.getsockname()[1]}"
    other, elsewhere = seat.listener(second)
    assert elsewhere != address
    for plan, held in ((first, listener), (second, other)):
        seat.release(plan)
        assert held.fileno() == -1


def test_the_ring_may_come_over_all_addresses_of_the_machine(seat: Any, around: Any) -> None:
    around.measure_links = True
    listener, addresses = seat.listener(plan := object())
    port = listener.getsockname()[1]
    own = [one.host for one in own_addresses()]
    assert addresses.split(",") == [f"{host}:{port}" for host in ("127.0.0.1", *own)][:8]
    assert listener.getsockname()[0] == ("0.0.0.0" if own else "127.0.0.1")
    seat.release(plan)


def test_a_ring_host_that_cannot_be_listened_on_is_a_clear_error(seat: Any, around: Any) -> None:
    around.ring_host = "203.0.113.1"  # of no machine (RFC 5737)
    with pytest.raises(ConfigError) as raised:
        seat.listener(object())
    assert raised.value.reason == "CANNOT_LISTEN"


def test_the_first_step_after_a_rest_ends_the_rest_of_the_node(seat: Any, around: Any) -> None:
    begun: list[int] = []
    around.on_step = lambda: begun.append(seat.epoch.gate.last)
    seat.prepare(SimpleNamespace(epoch=3), membership_pb2.PrepareEpoch(ring="r", epoch=3))
    for step in (1, 2, 3):
        seat.epoch.gate.passed(step)
    assert begun == [1]
