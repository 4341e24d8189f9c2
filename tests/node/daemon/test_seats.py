import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from sealring.mesh.errors import FailedPrecondition, NotFound
from sealring.node.daemon.epoch import Phase
from sealring.node.daemon.seats import Background, Seats
from sealring.v1 import membership_pb2


class Epoch:
    """Notes how it ends."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.gateway: Any = SimpleNamespace(id="gateway")
        self.done: list[Any] = []

    def end(self, reason: str) -> None:
        self.done.append(reason)

    def fault(self, error: Any) -> None:
        self.done.append(error.reason)

    def dismiss(self, gateways: set[str], reason: str) -> None:
        self.done.append(gateways)


class FakeSeat:
    """A seat of scripted epochs."""

    def __init__(self, ring: str) -> None:
        self.ring = ring
        self.phase = Phase.UP
        self.epoch: Any = None

    def prepare(self, plan: Any, prepared: Any) -> None:
        self.epoch = Epoch(plan)

    def named(self, number: int) -> Any:
        return self.epoch if self.epoch is not None and self.epoch.plan.epoch == number else None

    async def vacate(self, epoch: Any) -> None:
        epoch.done.append("vacated")
        self.epoch = None


@pytest.fixture
def background() -> Background:
    return Background()


@pytest.fixture
def seats(background: Background) -> Any:
    """One seat, whose epoch 3 is up."""
    made: Any = Seats("me", lambda ring: FakeSeat(ring), background)  # type: ignore[arg-type, return-value]
    made.prepare(
        SimpleNamespace(ring="demo-0", epoch=3, members=("me", "other")), membership_pb2.PrepareEpoch()
    )
    return made


def roster(members: Any = ("me", "other"), *, ring: str = "demo-0", gateways: Any = ("gateway",)) -> Any:
    rings = [SimpleNamespace(id=ring, members=members)]
    return SimpleNamespace(
        rings_of=lambda member: rings, gateways=[SimpleNamespace(id=one) for one in gateways]
    )


@pytest.mark.parametrize("unload", [False, True])
async def test_only_the_named_epoch_ends(seats: Any, background: Background, unload: bool) -> None:
    epoch = seats.serving("demo-0", 3)
    for ring, number in (("demo-1", 3), ("demo-0", 2), ("demo-0", 3)):
        seats.end(ring, number, f"{ring} {number}", unload=unload)
        await background.idle()
    assert epoch.done == ["demo-0 3", *(["vacated"] if unload else [])]
    assert [seat.ring for seat in seats] == ([] if unload else ["demo-0"])


def test_an_epoch_that_is_not_served_is_refused_with_a_reason(seats: Any) -> None:
    for ring, number in (("demo-1", 3), ("demo-0", 2)):
        with pytest.raises(FailedPrecondition) as caught:
            seats.serving(ring, number)
        assert caught.value.reason == "EPOCH_NOT_SERVING"


@pytest.mark.parametrize(
    ("changed", "done"),
    [
        ({}, [{"gateway"}]),
        ({"members": ("me",)}, ["RING_CHANGED"]),
        ({"gateways": ("another",)}, ["GATEWAY_REMOVED"]),
        ({"ring": "demo-1"}, ["the ring is not in the roster any more", "vacated"]),
    ],
)
async def test_an_epoch_ends_with_what_the_roster_takes_away(
    seats: Any, background: Background, changed: Any, done: Any
) -> None:
    epoch = seats.serving("demo-0", 3)
    seats.follow(roster(**changed))
    await background.idle()
    assert epoch.done == done


def test_an_ended_epoch_is_not_ended_again(seats: Any) -> None:
    epoch = seats.serving("demo-0", 3)
    (seat,) = seats
    seats.fault(NotFound("gone", reason="FIRST"))
    seat.phase = Phase.ENDED
    seats.fault(NotFound("gone", reason="SECOND"))
    assert epoch.done == ["FIRST"]


async def test_a_task_that_fails_is_logged() -> None:
    background = Background()

    async def fails() -> None:
        raise ValueError("a fault")

    with capture_logs() as logs:
        background.start(fails())
        await background.idle()
    assert [(one["event"], type(one["exc_info"])) for one in logs] == [("daemon_task_failed", ValueError)]


async def test_tasks_end_with_the_daemon() -> None:
    background = Background()
    ended: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    background.start(waits())
    await asyncio.sleep(0)
    await background.stop()
    assert ended == [True]
