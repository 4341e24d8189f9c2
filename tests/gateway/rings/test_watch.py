"""The gateway's stream from the coordinator: it comes back, and what watches over rosters is never lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from actedcoordinator import ActedCoordinator
from patience import until

from sealring.gateway.rings import watch as watch_module
from sealring.gateway.rings.watch import Watch
from sealring.mesh.errors import (
    FailedPrecondition,
    HandshakeError,
    PermissionDenied,
    RosterError,
    SealringError,
    Unavailable,
)
from sealring.mesh.member import Coordinators
from sealring.mesh.rpc import Backoff, Server, silence, to_status
from sealring.testing.authority import Authority
from sealring.v1 import membership_pb2 as membership
from sealring.v1 import proof_pb2


class Rings:
    """What the watch tells its rings."""

    def __init__(self) -> None:
        self.states: asyncio.Queue[str] = asyncio.Queue()
        self.rosters: list[Any] = []
        self.ended = 0
        self.on_tick: Callable[[], None] = lambda: None
        self.wanted = asyncio.Event()
        self.wishes: membership.Demand | None = None
        self.asked = False
        self.clock_ahead = 0

    def demand(self) -> membership.Demand | None:
        return self.wishes

    def model_state(self, state: membership.ModelState) -> None:
        self.states.put_nowait(state.deployment)

    def model_gone(self, deployment: str) -> None:
        self.states.put_nowait(f"without {deployment}")

    def use_roster(self, roster: Any) -> None:
        self.rosters.append(roster)

    def begin_watch(self) -> None:
        self.states.put_nowait("begin")

    def end_watch(self) -> None:
        self.ended += 1

    def ring_state(self, state: membership.RingState) -> None:
        self.states.put_nowait(state.ring)

    def ring_gone(self, ring: str) -> None:
        self.states.put_nowait(f"without {ring}")

    def all_told(self) -> None:
        self.states.put_nowait("all")

    def tick(self) -> None:
        self.on_tick()


class Introduction:
    """One that is over at once; what is put into `certificates` was renewed."""

    def __init__(self) -> None:
        self.certificates: asyncio.Queue[bytes] = asyncio.Queue()
        self.failures: list[Exception] = []

    async def exchange(self, call: Any, ask: Any) -> Any:
        if self.failures:
            raise self.failures.pop()
        return self

    async def renewals(self) -> AsyncIterator[proof_pb2.ProofRenewal]:
        while True:
            yield proof_pb2.ProofRenewal(certificate=await self.certificates.get())


class Held(bytes):
    """A roster, by its envelope."""

    members = (SimpleNamespace(id="abcd"), SimpleNamespace(id="efgh"))


class Keeper:
    """Has a roster as long as `valid` is one; takes every envelope but those that are to be refused."""

    valid: Any = Held(b"roster")
    coordinators = ("the standby",)
    lapsed: Any = None
    ahead = 0

    def __init__(self) -> None:
        self.refused: dict[bytes, Exception] = {}

    @property
    def lapses(self) -> bool:
        return self.valid is None

    def lapse(self) -> SealringError:
        return FailedPrecondition(f"the clock is {self.ahead} s ahead", reason="ROSTER_EXPIRED")

    async def accept(self, envelope: bytes, newer_root: Any) -> Any:
        if envelope in self.refused:
            raise self.refused[envelope]
        self.valid = Held(envelope)
        return self.valid


class Channel(Coordinators):
    """A channel that is made anew when it was closed, and leads to a coordinator each time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.led: list[bool] = []
        self.channel = self
        self._channel: grpc.aio.Channel | None = None

    def get(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address)
        return self._channel

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def lead(self, *, elsewhere: bool) -> bool:
        self.led.append(elsewhere)
        return True

    async def retire(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class Watching:
    def __init__(self, coordinator: ActedCoordinator, rings: Rings, channel: Channel, task: Any) -> None:
        self.coordinator, self.rings, self.channel, self.task = coordinator, rings, channel, task
        self.keeper = Keeper()
        self.introduction = Introduction()
        self.door = membership.Door(addresses=["10.0.0.1:7781"])
        self.names: dict[str, str] = {}


@pytest.fixture
async def watching(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watching]:
    monkeypatch.setattr(watch_module, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(watch_module, "Backoff", partial(Backoff, 0.01))
    coordinator, rings = ActedCoordinator(Authority.create("demo", now=time.time())), Rings()
    coordinator.proves = False  # `Introduction` is played too
    coordinator.tell(membership.WatchResponse(ring=membership.RingState(ring="ring-0")), name="ring")
    server = Server(coordinator.services())
    channel = Channel(f"127.0.0.1:{server.listen('127.0.0.1:0', None)}")
    await server.start()
    found = Watching(coordinator, rings, channel, None)

    async def newer_root() -> None: ...

    watch: Any = Watch
    found.task = asyncio.create_task(
        watch(
            channel, found.introduction, found.keeper, rings, newer_root, lambda: found.door, found.names
        ).run()
    )
    yield found
    found.task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await found.task
    await channel.retire()
    await server.stop(0)


async def serving(watching: Watching) -> None:
    """Until it has heard of the first ring, which is all that there is, or has ended."""
    for event in ("begin", "ring-0", "all"):
        heard = asyncio.ensure_future(watching.rings.states.get())
        await asyncio.wait((heard, watching.task), timeout=200, return_when=asyncio.FIRST_COMPLETED)
        assert not watching.task.done()
        assert heard.result() == event


async def test_a_channel_that_is_replaced_does_not_end_the_watch(watching: Watching) -> None:
    """Its certificate has ended; the gateway went down with it once."""
    for lost in range(2):
        async with asyncio.timeout(200):
            await watching.coordinator.watched.get()
            await serving(watching)
        assert watching.rings.ended == lost
        await watching.channel.retire()
    async with asyncio.timeout(200):
        await watching.coordinator.watched.get()
    assert not watching.task.done()


async def test_a_watch_shows_every_certificate_that_was_renewed(watching: Watching) -> None:
    """So that the coordinator lets it outlive the one that it was opened with."""
    async with asyncio.timeout(200):
        for certificate in (b"second", b"third"):
            watching.introduction.certificates.put_nowait(certificate)
            assert await watching.coordinator.renewed.get() == certificate
    assert watching.coordinator.watched.qsize() == 1


async def test_a_watch_that_is_cancelled_ends(watching: Watching) -> None:
    await serving(watching)
    watching.task.cancel()
    done, _ = await asyncio.wait((watching.task,), timeout=100)
    assert done
    assert watching.task.cancelled()


async def test_a_roster_that_has_expired_is_not_served(watching: Watching) -> None:
    await serving(watching)
    assert watching.rings.rosters == [b"roster"]
    watching.keeper.valid = None
    await until(lambda: watching.rings.rosters[-1] is None)


async def test_a_clock_that_comes_back_brings_back_the_roster_and_those_refused_meanwhile(
    watching: Watching,
) -> None:
    """The coordinator hears meanwhile what this gateway believes, and so do clients."""
    await serving(watching)
    keeper, told = watching.keeper, watching.coordinator.told
    async with asyncio.timeout(200):
        keeper.valid, keeper.ahead = None, 3600
        assert (await told.get()).trouble.reason == "ROSTER_EXPIRED"
        assert (watching.rings.rosters[-1], watching.rings.clock_ahead) == (None, 3600)
        keeper.valid, keeper.ahead = Held(b"roster"), 0
        assert (await told.get()).trouble.reason == ""
        assert (watching.rings.rosters[-1], watching.rings.clock_ahead) == (b"roster", 0)
        keeper.valid = None
        keeper.refused[b"newer"] = RosterError("it has expired", reason="ROSTER_EXPIRED")
        watching.coordinator.tell(roster(b"newer"))
        assert (await told.get()).trouble.reason == "ROSTER_EXPIRED"
        watching.coordinator.tell(GONE)
        assert await watching.rings.states.get() == "without ring-0"
        keeper.refused.clear()
        assert (await told.get()).trouble.reason == ""
    assert watching.rings.rosters[-2:] == [None, b"newer"]


async def test_the_gateway_does_not_go_on_without_its_clock(watching: Watching) -> None:
    """Nobody would see that a roster has expired."""

    def broken() -> None:
        raise RuntimeError("a fault")

    await serving(watching)
    watching.rings.on_tick = broken
    with pytest.raises(RuntimeError):
        async with asyncio.timeout(200):
            await watching.task


async def test_a_gateway_that_is_not_enrolled_any_more_ends(watching: Watching) -> None:
    await serving(watching)
    watching.coordinator.refusal = PermissionDenied("no", reason="EVICTED")
    await watching.channel.retire()
    with pytest.raises(PermissionDenied) as raised:
        async with asyncio.timeout(200):
            await watching.task
    assert raised.value.reason == "REMOVED"


def roster(envelope: bytes, names: dict[str, str] | None = None) -> membership.WatchResponse:
    return membership.WatchResponse(roster=membership.RosterUpdate(envelope=envelope, names=names))


GONE = membership.WatchResponse(gone=membership.RingGone(ring="ring-0"))


@pytest.mark.parametrize("error", [PermissionDenied("no", reason="OTHER"), Unavailable("no")])
async def test_rosters_and_rings_are_passed_on_and_refused_rosters_are_not(
    watching: Watching, error: SealringError
) -> None:
    await serving(watching)
    watching.keeper.refused[b"refused"] = error
    for event in (roster(b"good"), roster(b"refused"), roster(b"better"), GONE):
        watching.coordinator.tell(event)
    async with asyncio.timeout(200):
        assert await watching.rings.states.get() == "without ring-0"
        watching.introduction.certificates.put_nowait(b"said last")
        await watching.coordinator.renewed.get()
    assert watching.coordinator.told.empty()
    assert watching.rings.rosters == [b"roster", b"good", b"better"]
    assert watching.coordinator.watched.qsize() == 1


async def test_members_of_the_roster_have_the_names_that_came_with_it(watching: Watching) -> None:
    """Each roster brings all of them. Other machines and malformed names are left out."""
    await serving(watching)
    watching.coordinator.tell(roster(b"first", {"abcd": "mini", "efgh": "studio", "ijkl": "stranger"}))
    await until(lambda: watching.names == {"abcd": "mini", "efgh": "studio"})
    watching.coordinator.tell(roster(b"second", {"abcd": "attic", "efgh": "no name\n"}))
    await until(lambda: watching.names == {"abcd": "attic"})


async def test_a_roster_for_which_there_is_no_room_is_used_when_there_is(watching: Watching) -> None:
    """Both are reported to the coordinator; a newer roster takes the place of an older."""
    await serving(watching)
    for envelope in (b"late", b"later"):
        watching.keeper.refused[envelope] = RosterError("no space", reason="ROSTER_STATE_UNWRITABLE")
        watching.coordinator.tell(roster(envelope))
    watching.coordinator.tell(GONE)
    async with asyncio.timeout(200):
        assert (await watching.coordinator.told.get()).trouble.reason == "ROSTER_STATE_UNWRITABLE"
        assert await watching.rings.states.get() == "without ring-0"
        assert watching.rings.rosters == [b"roster"]
        watching.keeper.refused.clear()
        assert (await watching.coordinator.told.get()).trouble.reason == ""
    assert watching.rings.rosters == [b"roster", b"later"]


async def test_a_gateway_that_the_roster_no_longer_names_ends(watching: Watching) -> None:
    await serving(watching)
    watching.keeper.refused[b"without us"] = PermissionDenied("no", reason="REMOVED")
    watching.coordinator.tell(roster(b"without us"))
    with pytest.raises(PermissionDenied) as raised:
        async with asyncio.timeout(200):
            await watching.task
    assert raised.value.reason == "REMOVED"


async def test_a_stream_that_ends_is_opened_anew(watching: Watching) -> None:
    await serving(watching)
    watching.coordinator.tell(None)
    await serving(watching)
    assert watching.channel.led == [False, True], "elsewhere first, after a stream that was short"


def _raise(error: Exception) -> Any:
    raise error


async def test_another_who_answers_does_not_make_the_gateway_end(watching: Watching) -> None:
    """Neither by a wrong proof, nor by the error that this gateway is not enrolled."""
    await serving(watching)
    status = to_status(PermissionDenied("no", reason="EVICTED")).SerializeToString()
    evicted = grpc.aio.Metadata(("grpc-status-details-bin", status))
    watching.introduction.failures = [
        HandshakeError("not the coordinator", reason="BAD_PROOF"),
        grpc.aio.AioRpcError(grpc.StatusCode.PERMISSION_DENIED, grpc.aio.Metadata(), evicted, details="no"),
    ]
    await watching.channel.retire()
    await serving(watching)
    unreachable = [HandshakeError("not the coordinator either", reason="BAD_PROOF")]
    genuine = watching.channel.get
    watching.channel.get = lambda: _raise(unreachable.pop()) if unreachable else genuine()  # type: ignore[method-assign]
    await watching.channel.retire()
    await serving(watching)
    assert not unreachable
    assert not watching.introduction.failures
    assert not watching.task.done()


async def test_wishes_are_reported_when_they_change_and_models_are_passed_on(watching: Watching) -> None:
    await serving(watching)
    for number in (1, 2):
        watching.rings.wishes = membership.Demand(
            models=[membership.ModelDemand(deployment="big", asked=number)]
        )
        watching.rings.wanted.set()
        assert (await watching.coordinator.told.get()).demand == watching.rings.wishes
    for event in (
        membership.WatchResponse(model=membership.ModelState(deployment="big")),
        membership.WatchResponse(model_gone=membership.ModelGone(deployment="big")),
    ):
        watching.coordinator.tell(event)
    assert [await watching.rings.states.get() for _ in range(2)] == ["big", "without big"]


async def test_a_coordinator_that_takes_it_is_told_where_others_ask(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_DOOR_SECONDS", 0.0)
    await serving(watching)
    assert watching.coordinator.told.empty(), "an earlier one would end the stream"
    watching.coordinator.tell(membership.WatchResponse(all_told=membership.AllTold(doors=True)))
    one, two, three = (f"10.0.0.{number}:7781" for number in range(3))
    for door in (
        membership.Door(addresses=[one]),
        membership.Door(addresses=[two, three]),
        membership.Door(lan=[one]),
        membership.Door(),
    ):
        watching.door = door
        assert (await watching.coordinator.told.get()).door == door


async def test_a_coordinator_is_asked_whether_it_is_there_only_while_clients_wait(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not answer then is called anew."""
    monkeypatch.setattr(watch_module, "_BEAT_SECONDS", 0.0)
    monkeypatch.setattr(watch_module, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(silence, "GRACE_SECONDS", 0.0)
    await serving(watching)
    ticked = asyncio.Event()
    told = membership.WatchResponse(all_told=membership.AllTold(hears=True))
    watching.coordinator.tell(told)
    assert await watching.rings.states.get() == "all"
    watching.rings.on_tick = ticked.set
    for _ in range(2):
        ticked.clear()
        await ticked.wait()
    assert watching.coordinator.told.empty()
    watching.rings.asked = True
    assert (await watching.coordinator.told.get()).HasField("beat")
    await serving(watching)
